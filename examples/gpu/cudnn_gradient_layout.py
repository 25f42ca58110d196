"""SDPA on a Hopper GPU: a second backward pass whose incoming gradient has other strides gives wrong gradients.

    python cudnn_gradient_layout.py            # needs torch and an H100 or H200; exit code 1 if the fault is there

In bfloat16 and float16 SDPA takes cuDNN there. Its backward plan is kept by the shapes and strides of query, key and
value, but not by those of the incoming gradient. So the first backward pass at a shape decides how all later ones read
their gradient. A mean over tokens has a gradient of stride 0, and `out.transpose(1, 2).reshape(...)` one with the
tokens before the heads.

Shapes: B batch, H heads, T tokens, K head width.
"""

import sys
from itertools import permutations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

B, H, K = 2, 4, 64
ALLOWED = 0.02


def textbook(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(B, H, T, K) -> (B, H, T, K)."""
    scores = query @ key.mT / query.shape[-1] ** 0.5  # (B, H, T, T)
    return scores.softmax(-1) @ value


def incoming_gradient(layout: str, num_tokens: int) -> Tensor:
    """(B, H, T, K), with the strides of one of three layouts."""
    drawn = torch.randn(B, H, num_tokens, K, device="cuda", dtype=torch.bfloat16)
    return {
        "contiguous": drawn,
        "tokens first": drawn.transpose(1, 2).contiguous().transpose(1, 2),
        "one row for all tokens": drawn[:, :, :1].expand(B, H, num_tokens, K),
    }[layout]


def error(layout: str, num_tokens: int) -> float:
    """The relative error of the query's gradient against float64."""
    torch.manual_seed(0)
    inputs = [
        torch.randn(B, H, num_tokens, K, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
    ]
    incoming = incoming_gradient(layout, num_tokens)
    (seen,) = torch.autograd.grad(scaled_dot_product_attention(*inputs), inputs[:1], incoming)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    (expected,) = torch.autograd.grad(textbook(*exact), exact[:1], incoming.double())
    return float((seen.double() - expected).norm() / expected.norm())


def main() -> int:
    """Print the error of each layout, first and second, at a fresh length for each pair of layouts."""
    print(torch.__version__, torch.cuda.get_device_name(), "cuDNN", torch.backends.cudnn.version())
    is_wrong = False
    layouts = ("contiguous", "tokens first", "one row for all tokens")
    for number, (first, second) in enumerate(permutations(layouts, 2)):
        num_tokens = 128 + 16 * number  # a shape that has no plan yet
        errors = error(first, num_tokens), error(second, num_tokens)
        print(f"T={num_tokens}: {first} {errors[0]:.1e}, then {second} {errors[1]:.1e}")
        is_wrong |= not max(errors) < ALLOWED  # NaN is wrong, too
    print("the gradients are wrong" if is_wrong else "all gradients are right")
    return int(is_wrong)


if __name__ == "__main__":
    sys.exit(main())
