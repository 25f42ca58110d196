"""The operators of one call, folded from the profiler's events, and the kind of work and the backend of each.

Off the host, what an operator's name promises its kernels prove: whichever library is registered for an operator, its
kernels have names of their own.

Source of the names: https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/native_functions.yaml; kernels as
their sources call them (KERNELS).
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

from msgspec.structs import replace

from attnbench.storage.records import Operator

PAGE_FAULTS = "page faults"
KINDS = ("attention", "matmul", "softmax", "mask", "compiled", "copy", "allocation", "other")
"""In the order in which pictures stack them. `attention` is a kernel that does products and softmax in one, `compiled`
is what torch.compile generated itself."""

_WORDS = {  # a name has the first kind whose pattern it contains
    "compiled": r"compiledfxgraph|^triton_|cpp_fused|^graph(_\d+)?_kernel$",
    "attention": r"scaled_dot_product(?!_attention(_math\w*)?$)|flash_(attn|fwd|bwd|attention)|efficient_attention"
    r"|cudnn_attention|cudnn_generated\w*(sdpa|flash)|flash_?attn|fmha|flex_attention|sage_?attn|qk_int\w*_attn"
    r"|(prefill|decode)withkvcache|fused_?attn",
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
KERNELS = {
    "PyTorch's FlashAttention 2": ("flash", r"\bpytorch_flash::"),
    "FlashAttention 4": ("flash", r"flash_attncute|FlashAttention(Forward|Backward)Sm\d"),
    "FlashAttention 3": ("flash", r"\bflash::\w*(Sm[89]\d|FwdCombine)|\bflash::enable_sm\d"),
    "FlashAttention 2": ("flash", r"\bflash::flash_(fwd|bwd)"),
    "CUTLASS FMHA": ("efficient", r"\bfmha_cutlass[FB]_"),
    "cuDNN": ("cudnn", r"\bcudnn_generated_\w*(sdpa|flash)"),
    "FlashInfer": ("", r"\bflashinfer::"),
    "SageAttention": ("", r"\bqk_int\w*_attn_kernel"),
    "Triton": ("", r"^triton_"),
}
"""Whose kernel it is, by its name: the backend of PyTorch's that it may be registered for, and a pattern.

Source: aten/src/ATen/native/transformers/cuda of PyTorch (flash_attn, mem_eff_attention); csrc/flash_attn, hopper and
flash_attn/cute of https://github.com/Dao-AILab/flash-attention; include/flashinfer and csrc of the two others.
"""
OWN = ("PyTorch's FlashAttention 2", "CUTLASS FMHA", "cuDNN")
"""Those that PyTorch brings along for its backends."""
LONGEST_KERNEL = 200
"""Characters that are kept of a kernel's name with its template arguments."""
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
    """One of KINDS; an unknown name is `other`."""
    bare = name.removeprefix("aten::").removesuffix("_")  # addmv_ is addmv, in place
    return next((kind for kind, pattern in _WORDS.items() if re.search(pattern, bare, re.IGNORECASE)), "other")


def backend_of(name: str) -> str:
    """One of BACKENDS, or "" for an operator that is none."""
    return next((backend for backend, pattern in BACKENDS.items() if re.search(pattern, name)), "")


@lru_cache(MANY_NAMES)
def plain_kernel(name: str) -> str:
    """A kernel's name without its return type, its parameters and what differs from process to process."""
    bare = re.sub(r"_object_at_.*", "", name.removeprefix("void "))
    return bare.replace("(anonymous namespace)::", "").partition("(")[0][:LONGEST_KERNEL]


def makers(kernels: Iterable[str]) -> list[str]:
    """Whose kernels these are: keys of KERNELS, each once, in its order; empty where none is known."""
    names = list(kernels)
    return [maker for maker, (_, pattern) in KERNELS.items() if any(re.search(pattern, name) for name in names)]


class Kernel(NamedTuple):
    """One piece of work of a device, such as a kernel or a copy, and the operator that launched it; "" for none."""

    name: str
    duration_ns: int
    operator: str = ""
    start_ns: int = 0
    stream: int = 0  # as the profiler numbers them


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

    Memory allocated inside an allocating operator counts for its caller, which will write there.
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


def with_kernels(operators: Iterable[Operator], kernels: Iterable[Kernel]) -> tuple[Operator, ...]:
    """The operators with the time of the kernels that they launched in place of their own, most of it first.

    Kernels launched outside any operator, as by extensions and Triton, are listed by their own names.
    """
    times_ns: defaultdict[str, Counter[str]] = defaultdict(Counter)  # by operator, and in it by kernel
    num_launches: Counter[str] = Counter()
    for kernel in kernels:
        name = plain_kernel(kernel.name)
        times_ns[plain_name(kernel.operator)][name] += kernel.duration_ns
        num_launches[name] += not kernel.operator
    found = []
    for one in operators:
        own = times_ns[one.name] if one.name else Counter[str]()
        kind = kind_of(own.most_common(1)[0][0]) if own and one.kind == "other" else one.kind
        found.append(replace(one, kind=kind, self_s=own.total() / 1e9, kernels=tuple(own)))
    for name, own_ns in times_ns[""].items():
        launches = num_launches[name]
        found.append(Operator(name=name, kind=kind_of(name), num_calls=launches, self_s=own_ns / 1e9, kernels=(name,)))
    return tuple(sorted(found, key=lambda operator: (-operator.self_s, operator.name)))


def busy_s(kernels: Iterable[Kernel]) -> float:
    """Seconds in which at least one of them ran: what runs at the same time counts once."""
    total_ns = end_ns = 0
    for kernel in sorted(kernels, key=lambda kernel: kernel.start_ns):
        last_ns = kernel.start_ns + kernel.duration_ns
        total_ns += max(0, last_ns - max(kernel.start_ns, end_ns))
        end_ns = max(end_ns, last_ns)
    return total_ns / 1e9


def on_other_streams(kernels: Sequence[Kernel]) -> tuple[str, ...]:
    """The names of those that ran on another stream than most of the work did, each once."""
    times_ns: Counter[int] = Counter()
    for kernel in kernels:
        times_ns[kernel.stream] += kernel.duration_ns
    main = max(times_ns, key=lambda stream: times_ns[stream], default=0)
    return tuple(dict.fromkeys(plain_kernel(kernel.name) for kernel in kernels if kernel.stream != main))


def compiled(calls: Iterable[Operator]) -> bool:
    """Whether any of it was made by torch.compile."""
    return any(one.kind == "compiled" or one.name == COMPILED for one in calls)


def observed(calls: Iterable[Operator]) -> str:
    """The backend of `scaled_dot_product_attention` that ran, joined by "+" where there are several; "" for none.

    An operator of a backend that launched kernels of another one counts for that other.
    """
    found: set[str] = set()
    for one in calls:
        if backend := backend_of(one.name):
            proved = {KERNELS[maker][0] for maker in makers(one.kernels)} - {""}
            found |= proved or {backend}
    return "+".join(sorted(found))
