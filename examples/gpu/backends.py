"""Errors of attention on a CUDA GPU by backend and by strides of the inputs, against the textbook form in float64.

    python backends.py      # needs torch; cudnn-frontend and sageattention where they are installed

The output on an H100 is in results/gallery/gpu/backends.txt. `o` is the relative error of the output; `dq`, `dk` and
`dv` are those of the gradients. Each shape is first called with a dense gradient: cuDNN keeps the plan of that call.

Shapes: query (B, H, T, K), key and value (B, G, S, K).
"""

import math

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "math": SDPBackend.MATH,
    "eff": SDPBackend.EFFICIENT_ATTENTION,
}


def textbook(query, key, value, incoming, mask=None, *, is_causal=False):
    """Compute the output, and the gradients of query, key and value, in float64 on the CPU."""
    query, key, value, incoming = (each.detach().double().cpu() for each in (query, key, value, incoming))
    for tensor in (query, key, value):
        tensor.requires_grad_()
    readers = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(readers, 1).mT / math.sqrt(query.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask.cpu(), -math.inf)
    output = scores.softmax(-1) @ value.repeat_interleave(readers, 1)
    output.backward(incoming)
    return [output.detach(), query.grad, key.grad, value.grad]


def error(seen, expected):
    seen = seen.detach().double().cpu()
    return f"{float((seen - expected).norm() / expected.norm()):.2e}"


def report(name, function, query, key, value, incoming, **mask):
    query, key, value = (each.detach().requires_grad_() for each in (query, key, value))
    try:
        output = function(query, key, value)
        output.backward(incoming)
        torch.cuda.synchronize()
    except Exception as reason:  # noqa: BLE001 - a backend that does not support the call raises
        print(name, "RAISES", type(reason).__name__, str(reason)[:140])
        return
    expected = textbook(query, key, value, incoming, **mask)
    found = zip(("o", "dq", "dk", "dv"), (output, query.grad, key.grad, value.grad), expected, strict=True)
    print(f"{name:58s}", *(f"{label} {error(*pair)}" for label, *pair in found), "ostride", tuple(output.stride()))


def drawn(batch, heads, length, width, dtype=torch.bfloat16):
    return torch.randn(batch, heads, length, width, device="cuda", dtype=dtype)


def through(backend, **options):
    def attention(query, key, value):
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, enable_gqa=query.shape[1] != key.shape[1], **options)

    return attention


def gradients():
    """Report the errors of each backend for several layouts of the incoming gradient."""
    for b, h, t, g, s, k in [
        (1, 4, 280, 1, 60, 32),
        (1, 4, 280, 4, 280, 64),
        (2, 4, 256, 4, 256, 64),
        (2, 4, 67, 4, 67, 64),
    ]:
        query, key, value = drawn(b, h, t, k), drawn(b, g, s, k), drawn(b, g, s, k)
        layouts = {
            "dense": drawn(b, h, t, k),
            "row_expanded": drawn(b, h, 1, k).expand(b, h, t, k),
            "ones_expanded": torch.ones((), device="cuda", dtype=torch.bfloat16).expand(b, h, t, k),
            "head_expanded": drawn(b, 1, t, k).expand(b, h, t, k),
            "transposed": drawn(b, t, h, k).transpose(1, 2),
            "last_expanded": drawn(b, h, t, 1).expand(b, h, t, k),
            "column_major": drawn(b, h, k, t).transpose(2, 3),
        }
        for name, backend in BACKENDS.items():
            if name == "eff" and g != h:
                continue
            for layout, incoming in layouts.items():
                title = f"{name} b{b} h{h} t{t} s{s} k{k} grad {layout}"
                report(title, through(backend), query, key, value, incoming)


def low_scores():
    """Report the errors of rows whose log-sum-exp is far below 0: https://github.com/pytorch/pytorch/issues/196678."""
    for length in (64, 704, 640):
        query, key = drawn(1, 1, length, 64) * 0.1, drawn(1, 1, length, 64) * 0.1
        query[..., 0], key[..., 0] = 40, -40
        value, incoming = drawn(1, 1, length, 64), drawn(1, 1, length, 64)
        mask = torch.ones(length, length, dtype=torch.bool, device="cuda")
        for name in ("cudnn", "eff"):
            report(f"196678 {name} L{length}", through(BACKENDS[name], attn_mask=mask), query, key, value, incoming)


def cudnn_frontend():
    """Report the errors with keys and values that are views of one buffer."""
    from cudnn.experimental.ops import scaled_dot_product_attention as attention

    for b, h, t, g, s, k in [(1, 4, 280, 1, 60, 32), (2, 4, 128, 4, 128, 64)]:
        options = {"is_causal": False, "scale": k**-0.5, "enable_gqa": g != h, "diagonal_alignment": 0}

        def function(query, key, value, options=options):
            return attention(query, key, value, **options)

        query, incoming = drawn(b, h, t, k), drawn(b, h, t, k)
        title = f"cudnn_frontend dense {b, h, t, g, s, k}"
        report(title, function, query, drawn(b, g, s, k), drawn(b, g, s, k), incoming)
        for axis in (1, 2, 3):
            shape = [b, g, s, k]
            shape.insert(axis, 2)
            key, value = torch.randn(*shape, device="cuda", dtype=torch.bfloat16).unbind(axis)
            report(f"cudnn_frontend kv packed axis {axis} {key.stride()}", function, query, key, value, incoming)


def sageattention():
    """Report the errors at lengths below and above a block of the kernel."""
    from sageattention import sageattn

    for dtype in (torch.float16, torch.bfloat16):
        for b, h, t, g, s, k, is_causal in [
            (3, 6, 37, 2, 70, 64, False),
            (3, 6, 37, 6, 70, 64, False),
            (3, 6, 70, 6, 70, 64, False),
            (2, 8, 512, 8, 512, 64, False),
            (2, 8, 512, 2, 512, 64, True),
            (2, 8, 512, 8, 512, 128, True),
        ]:
            query, key, value = drawn(b, h, t, k, dtype), drawn(b, g, s, k, dtype), drawn(b, g, s, k, dtype)
            given = key.clone()
            output = sageattn(query, given, value, tensor_layout="HND", is_causal=is_causal)
            expected = textbook(query, key, value, torch.zeros_like(query), is_causal=is_causal)[0]
            changed = "" if torch.equal(key, given) else "; it has changed the key that it was given"
            print("sage", dtype, (b, h, t, g, s, k, is_causal), "o", error(output, expected), changed)


if __name__ == "__main__":
    torch.manual_seed(0)
    gradients()
    low_scores()
    for optional in (cudnn_frontend, sageattention):
        try:
            optional()
        except ImportError as missing:
            print(missing)
