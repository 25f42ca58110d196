"""Attention of Hugging Face transformers called with a boolean mask, or without a mask: docs/findings.md."""

import cpu_torchvision  # noqa: F401 - comes first
import torch
from transformers import BertConfig, LlamaConfig
from transformers.models.bert.modeling_bert import BertSelfAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from attnbench.contract.adapters import adapt, split


def bert(code):
    def make(s):
        widths = {"hidden_size": s.embed_dim, "num_attention_heads": s.num_heads}
        return BertSelfAttention(BertConfig(attn_implementation=code, **widths))

    layout = split("query", "key", "value", out=None)
    return adapt(make, layout, call=lambda m, x, context, mask: m(x, attention_mask=mask.visible))


def llama(code):
    def make(s):
        sizes = {"num_key_value_heads": s.num_kv_heads, "head_dim": s.head_dim, "attention_bias": s.qkv_bias}
        widths = {"hidden_size": s.embed_dim, "num_attention_heads": s.num_heads}
        return LlamaAttention(LlamaConfig(attn_implementation=code, **widths, **sizes), layer_idx=0)

    def call(module, x, context, mask):
        cos = x.new_ones(*x.shape[:2], module.head_dim)  # rotated by angles of 0
        return module(x, position_embeddings=(cos, torch.zeros_like(cos)), attention_mask=None)

    return adapt(make, split("q_proj", "k_proj", "v_proj", out="o_proj"), call=call, masks=("none",))


bert_eager_boolean, bert_sdpa_boolean = bert("eager"), bert("sdpa")
llama_eager_unmasked, llama_sdpa_unmasked = llama("eager"), llama("sdpa")
