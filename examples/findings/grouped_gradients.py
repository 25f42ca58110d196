"""In bfloat16 on a CPU, SDPA's gradient of a key that 64 query heads read is far off: needs torch alone.

`python grouped_gradients.py` exits with 1 while its error is more than three times that of the textbook form.
"""

import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
query = torch.randn(2, 64, 128, 64, dtype=torch.bfloat16)
key, value = torch.randn(2, 2, 1, 128, 64, dtype=torch.bfloat16).unbind()
incoming = torch.randn(2, 64, 128, 64, dtype=torch.bfloat16)


def sdpa(query, key, value):
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def textbook(query, key, value):
    scores = query @ key.expand(-1, 64, -1, -1).mT / 8
    hidden = torch.ones(128, 128, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value.expand(-1, 64, -1, -1)


def gradients(attention, dtype=torch.bfloat16):
    leaves = [each.detach().to(dtype).requires_grad_() for each in (query, key, value)]
    return torch.autograd.grad(attention(*leaves), leaves, incoming.to(dtype))


right = gradients(textbook, torch.float64)
errors = {
    function.__name__: [float((one - other).abs().max()) for one, other in zip(gradients(function), right, strict=True)]
    for function in (sdpa, textbook)
}
for name, (of_query, of_key, of_value) in errors.items():
    print(f"{name:8} error of the gradients: query {of_query:.3g}, key {of_key:.3g}, value {of_value:.3g}")
sys.exit(int(errors["sdpa"][1] > 3 * errors["textbook"][1]))
