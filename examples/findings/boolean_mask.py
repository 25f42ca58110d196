"""BERT with attn_implementation='eager' adds a boolean mask to the scores as 0 and 1: needs torch and transformers.

`python boolean_mask.py` exits with 1 while the fault is there.
"""

import sys

import torch
from transformers import BertConfig
from transformers.models.bert.modeling_bert import eager_attention_forward

torch.manual_seed(0)
query, key, value = torch.randn(3, 1, 2, 6, 8).unbind()
visible = torch.ones(6, 6, dtype=torch.bool).tril()
module = torch.nn.Module()
module.config, module.training = BertConfig(), False
scale = 8**-0.5
seen = eager_attention_forward(module, query, key, value, visible[None, None], scaling=scale)[0].transpose(1, 2)
scores = query.double() @ key.double().mT * scale
right = scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value.double()
added = (scores + visible).softmax(-1) @ value.double()
print("error", float((seen - right).abs().max()), "error if True were added as 1", float((seen - added).abs().max()))
sys.exit(int(float((seen - right).abs().max()) > 1e-3))
