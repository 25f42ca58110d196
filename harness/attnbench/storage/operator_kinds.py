"""The operators of one call, folded from the profiler's events, and the kind of work and the backend of each.

Source of the names: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml; CUDA
kernels and what torch.compile makes have names of their own.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from attnbench.storage.records import Operator

PAGE_FAULTS = "page faults"
KINDS = ("attention", "matmul", "softmax", "mask", "compiled", "copy", "allocation", "other")
"""In the order in which pictures stack them. `attention` is a kernel that does products and softmax in one, `compiled`
is what torch.compile generated itself."""

_WORDS = {  # a name has the first kind whose pattern it contains
    "compiled": r"compiledfxgraph|^triton_|cpp_fused|^graph(_\d+)?_kernel$",
    "attention": r"scaled_dot_product(?!_attention(_math\w*)?$)|flash_(attn|fwd|bwd|attention)|efficient_attention"
    r"|cudnn_attention|fmha|flex_attention|sage_?attn",
    "softmax": r"softmax|logsumexp",
    "matmul": r"\b_?(matmul|b?mm|addmm|baddbmm|addbmm|linear|einsum|dot|mv|addmv|inner|outer|_scaled_mm)\b"
    r"|gemm|gemv|mkldnn_linear|cublas|cutlass|nvjet",
    "mask": r"masked_fill|masked_scatter|\b(where|tril|triu|logical_\w+|bitwise_\w+|isinf|isneginf)\b|masked",
    "copy": r"\b(copy|_to_copy|to|clone|contiguous|cat|_?stack|repeat|repeat_interleave|index_select|index|gather"
    r"|pin_memory|constant_pad_nd|slice_backward|select_backward)\b|\b(memcpy|memset)|copybuffer|transpose_copy",
    "allocation": r"\b(empty\w*|new_empty\w*|resize|zeros\w*|new_zeros|ones\w*|new_ones|full\w*|zero|fill"
    r"|set|free)\b",
}
BACKENDS = {
    "flash": r"_scaled_dot_product_flash_attention|\b_flash_attention_forward",
    "math": r"_scaled_dot_product_attention_math",
    "efficient": r"_scaled_dot_product_efficient_attention|\b_efficient_attention_forward",
    "cudnn": r"_scaled_dot_product_cudnn_attention|\b_cudnn_attention_forward",
    "overrideable": r"_scaled_dot_product_fused_attention_overrideable",
}
"""The backends of `scaled_dot_product_attention`, as torch.nn.attention.SDPBackend has them: how their operators are
called."""
_NUMBERED = (
    (r"^## Call (\w+) \w+ ##$", r"\1"),
    (r"^(Torch-Compiled Region): .*$", r"\1"),
    (r"^(graph)_\d+(_kernel)$", r"\1\2"),  # a template's, such as flex_attention's on the CPU
)
COMPILED = "CompiledFxGraph"
"""A graph that torch.compile made."""
OUTSIDE = "outside any operator"
MANY_NAMES = 4096
"""Few names make up the hundred thousand events of a loop over tokens."""


@lru_cache(MANY_NAMES)
def plain_name(name: str) -> str:
    """The profiler's name without what differs from process to process: digests and numbers of compiled graphs."""
    for pattern, kept in _NUMBERED:
        name = re.sub(pattern, kept, name)
    return name


@lru_cache(MANY_NAMES)
def kind_of(name: str) -> str:
    """One of KINDS; what is not known is `other`."""
    bare = name.removeprefix("aten::").removesuffix("_")  # addmv_ is addmv, in place
    return next((kind for kind, pattern in _WORDS.items() if re.search(pattern, bare, re.IGNORECASE)), "other")


def backend_of(name: str) -> str:
    """One of BACKENDS, or "" for an operator that is none."""
    return next((backend for backend, pattern in BACKENDS.items() if re.search(pattern, name)), "")


class Span(NamedTuple):
    """One event of a profile: an operator from start to end, or, where bytes are given, an allocation or a release."""

    name: str
    thread: int
    start_ns: int
    end_ns: int
    allocated_bytes: int | None = None


@dataclass(slots=True)
class _Call:
    """One call of an operator."""

    name: str
    end_ns: int
    self_ns: int  # without the operators that it called
    blocks: list[int] = field(default_factory=list)  # the bytes of each


def fold(spans: Iterable[Span]) -> tuple[Operator, ...]:
    """Each operator once, the one with the most time of its own first.

    What is allocated inside an allocating operator is counted for the one that called it, which will write there.
    """
    calls: dict[str, list[_Call]] = {}
    outside = _Call(OUTSIDE, 0, 0)
    stacks: dict[int, list[_Call]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        stack = stacks.setdefault(span.thread, [])
        while stack and stack[-1].end_ns <= span.start_ns and span.end_ns > stack[-1].end_ns:
            stack.pop()
        if span.allocated_bytes is None:
            duration_ns = span.end_ns - span.start_ns
            if stack:
                stack[-1].self_ns -= duration_ns
            stack.append(_Call(plain_name(span.name), span.end_ns, duration_ns))
            calls.setdefault(stack[-1].name, []).append(stack[-1])
        elif span.allocated_bytes:
            writers = (call for call in reversed(stack) if kind_of(call.name) != "allocation")
            next(writers, stack[0] if stack else outside).blocks.append(span.allocated_bytes)
    operators = [
        Operator(
            name=name,
            kind="allocation" if name == OUTSIDE else kind_of(name),
            num_calls=0 if name == OUTSIDE else len(members),
            self_s=max(0, sum(call.self_ns for call in members)) / 1e9,
            allocated_bytes=sum(sum(call.blocks) for call in members),
            largest_bytes=max((block for call in members for block in call.blocks), default=0),
        )
        for name, members in (calls | ({OUTSIDE: [outside]} if outside.blocks else {})).items()
    ]
    return tuple(sorted(operators, key=lambda operator: (-operator.self_s, operator.name)))


def compiled(calls: Iterable[Operator]) -> bool:
    """Whether any of it was made by torch.compile."""
    return any(one.kind == "compiled" or one.name == COMPILED for one in calls)


def observed(calls: Iterable[Operator]) -> str:
    """The backend of `scaled_dot_product_attention` that ran, joined by "+" where there are several; "" for none."""
    return "+".join(sorted(set(filter(None, (backend_of(one.name) for one in calls)))))
