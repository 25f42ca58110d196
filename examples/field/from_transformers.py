"""Attention of Hugging Face transformers, each with its own code (eager) and with PyTorch's (sdpa).

Rotary embeddings are turned off by angles of 0, and masks are added to the scores, as its models do.
"""

import cpu_torchvision  # noqa: F401 - comes first
import torch
from transformers import BertConfig, GPT2Config, GPTNeoXConfig, LlamaConfig, ViTConfig, WhisperConfig
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.vit.modeling_vit import ViTAttention
from transformers.models.whisper.modeling_whisper import WhisperAttention

from attnbench.contract.adapters import Layout, adapt, packed, per_head, split, transposed


def config(kind, code, sizes, **more):
    widths = {"hidden_size": sizes.embed_dim, "num_attention_heads": sizes.num_heads}
    return kind(**widths, attn_implementation=code, **more)


def added(x, mask):
    """The mask (B or 1, 1, T, S) as numbers to add to the scores: 0 where visible, the lowest number elsewhere."""
    zeros = x.new_zeros(1, 1, *mask.sizes[1:])
    return zeros if mask.hidden is None else zeros.masked_fill(mask.hidden, torch.finfo(x.dtype).min)


def masked(module, x, context, mask):
    return module(x, attention_mask=added(x, mask))


def no_angles(module, x):
    cos = x.new_ones(*x.shape[:2], module.head_dim if hasattr(module, "head_dim") else module.head_size)
    return cos, torch.zeros_like(cos)


def turned(module, x, context, mask):
    return module(x, position_embeddings=no_angles(module, x), attention_mask=added(x, mask))


def bert(code, call=masked):
    return adapt(
        lambda s: BertSelfAttention(config(BertConfig, code, s)), split("query", "key", "value", out=None), call=call
    )


def gpt2(code):
    layout = transposed(packed("c_attn", out="c_proj"))
    return adapt(lambda s: GPT2Attention(config(GPT2Config, code, s), layer_idx=0), layout, call=masked)


def gpt_neox(code):
    layout = per_head("query_key_value", out="dense")
    return adapt(lambda s: GPTNeoXAttention(config(GPTNeoXConfig, code, s), layer_idx=0), layout, call=turned)


def llama(code, call=turned, **more):
    def make(s):
        sizes = {"num_key_value_heads": s.num_kv_heads, "head_dim": s.head_dim, "attention_bias": s.qkv_bias}
        return LlamaAttention(config(LlamaConfig, code, s, **sizes), layer_idx=0)

    layout = split("q_proj", "k_proj", "v_proj", out="o_proj")
    return adapt(make, layout, call=call, axes=("num_kv_heads", "embed_dim"), **more)


def vit(code):
    layout = split("q_proj", "k_proj", "v_proj", out="o_proj")
    return adapt(lambda s: ViTAttention(config(ViTConfig, code, s, qkv_bias=s.qkv_bias)), layout, call=masked)


def whisper(code):
    def pack(weights):  # its keys have no bias
        return {name: tensor for name, tensor in whole.pack(weights).items() if name != "k_proj.bias"}

    def make(s):
        return WhisperAttention(s.embed_dim, s.num_heads, config=WhisperConfig(attn_implementation=code))

    def call(module, x, context, mask):
        return module(x, key_value_states=context, attention_mask=added(x, mask))

    whole = split("q_proj", "k_proj", "v_proj", out="out_proj")
    return adapt(make, Layout(pack=pack), call=call, axes=("kv_len",))


bert_eager, bert_sdpa = bert("eager"), bert("sdpa")
gpt2_eager, gpt2_sdpa = gpt2("eager"), gpt2("sdpa")
gpt_neox_eager, gpt_neox_sdpa = gpt_neox("eager"), gpt_neox("sdpa")
llama_eager, llama_sdpa = llama("eager"), llama("sdpa")
vit_eager, vit_sdpa = vit("eager"), vit("sdpa")
whisper_eager, whisper_sdpa = whisper("eager"), whisper("sdpa")


def boolean(module, x, context, mask):
    return module(x, attention_mask=mask.visible)


def unmasked(module, x, context, mask):
    return module(x, position_embeddings=no_angles(module, x), attention_mask=None)


bert_eager_boolean, bert_sdpa_boolean = bert("eager", boolean), bert("sdpa", boolean)
llama_eager_unmasked = llama("eager", unmasked, masks=("none",))
llama_sdpa_unmasked = llama("sdpa", unmasked, masks=("none",))
