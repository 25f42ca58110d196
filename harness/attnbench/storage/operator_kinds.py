"""The operators of one call, folded from the profiler's events, and the kind of work and the backend of each.

Source of the names: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml; CUDA
kernels and what torch.compile makes have names of their own.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
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
    """One event of a profile: an operator from start to end, or, with bytes, an allocation or, below 0, a release."""

    name: str
    thread: int
    start_ns: int
    end_ns: int
    allocated_bytes: int | None = None


def nested(spans: Iterable[Span]) -> Iterator[tuple[Span, list[Span]]]:
    """Each span in the order of time, with the operators of its thread that were running, inner ones last."""
    stacks: dict[int, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        stack = stacks.setdefault(span.thread, [])
        while stack and stack[-1].end_ns <= span.start_ns and span.end_ns > stack[-1].end_ns:
            stack.pop()
        yield span, stack
        if span.allocated_bytes is None:
            stack.append(span)


def fold(spans: Iterable[Span]) -> tuple[Operator, ...]:
    """Each operator once, the one with the most time of its own first.

    What is allocated inside an allocating operator is counted for the one that called it, which will write there.
    """
    num_calls: Counter[str] = Counter()
    self_ns: Counter[str] = Counter()  # without the operators that it called
    blocks: defaultdict[str, list[int]] = defaultdict(list)  # the bytes of each
    for span, running in nested(spans):
        if span.allocated_bytes is None:
            name, duration_ns = plain_name(span.name), span.end_ns - span.start_ns
            num_calls[name] += 1
            self_ns[name] += duration_ns
            if running:
                self_ns[plain_name(running[-1].name)] -= duration_ns
        elif span.allocated_bytes > 0:
            names = [plain_name(each.name) for each in running]
            writers = (name for name in reversed(names) if kind_of(name) != "allocation")
            blocks[next(writers, names[0] if names else OUTSIDE)].append(span.allocated_bytes)
    operators = [
        Operator(
            name=name,
            kind="allocation" if name == OUTSIDE else kind_of(name),
            num_calls=num_calls[name],
            self_s=max(0, self_ns[name]) / 1e9,
            allocated_bytes=sum(blocks[name]),
            largest_bytes=max(blocks[name], default=0),
        )
        for name in dict.fromkeys([*num_calls, *blocks])
    ]
    return tuple(sorted(operators, key=lambda operator: (-operator.self_s, operator.name)))


def compiled(calls: Iterable[Operator]) -> bool:
    """Whether any of it was made by torch.compile."""
    return any(one.kind == "compiled" or one.name == COMPILED for one in calls)


def observed(calls: Iterable[Operator]) -> str:
    """The backend of `scaled_dot_product_attention` that ran, joined by "+" where there are several; "" for none."""
    return "+".join(sorted(set(filter(None, (backend_of(one.name) for one in calls)))))
