"""Observe one call of a case: its operators by torch.profiler, and the backend that ran.

Nothing here is timed for a record: a profiled call is slower than a plain one, and only its shares are kept.

A function mode sees each call of `scaled_dot_product_attention` and asks PyTorch with the actual tensors which backend
it will take, and why not another. All facts that decide (strides, a mask that needs a gradient, enabled backends) are
available there, on the CPU as on CUDA. Source:
https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-modes
"""

import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnbench.checking.case import Case, build, draw_normal, place
from attnbench.contract import Implementation
from attnbench.devices.kernels import BACKENDS, compiled, observed
from attnbench.devices.recording import busy_s
from attnbench.storage.records import Operators
from attnbench.workloads.workload import Workload

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "overrideable": SDPBackend.OVERRIDEABLE,
}
_NAMES = {value: name for name, value in _BACKENDS.items()}
assert set(_BACKENDS) == set(BACKENDS)
ASKED = "aten::scaled_dot_product_attention"
NO_KERNEL = "No available kernel"
"""PyTorch's error if no enabled backend can run."""
_TRIGGERED = re.compile(r"\s*\(Triggered internally at [^)]*\)\.?")
_HEADLINE = re.compile(r"not used because:?$")


def observe(case: Case, implementation: Implementation, on_step: Callable[[], None]) -> Operators:
    """Observe `case` in at most four calls; `on_step` is called before each.

    For a backward case the backward call is profiled for its operators, and the forward call before it for its backend.
    """
    requested = implementation.backend
    with case.grad_mode():
        on_step()
        _ = case.first_s  # the first call may compile
        on_step()
        calls, kernel_s = case.recording.operators(), busy_s(case.recording.kernels())
        forward = calls
        if case.workload.direction == "backward":
            on_step()
            forward = case.device.record(case.output).operators()
        on_step()
        asking = Asking(requested)
        if any(one.name == ASKED for one in forward) and not compiled(forward):
            with asking:
                case.output()
    seen = observed(forward)
    return Operators(
        calls=calls,
        requested=requested,
        predicted="+".join(asking.predicted),
        observed=seen,
        reason="; ".join(asking.reasons) if requested not in {"", seen} else "",
        copies=implementation.copies,
        kernel_s=kernel_s,
    )


def refusal(workload: Workload, implementation: Implementation, error: RuntimeError) -> str:
    """Why the requested backend cannot run, in words, if `error` shows that; "" for any other error."""
    if not implementation.backend or NO_KERNEL not in str(error):
        return ""
    case = build(workload, implementation, place(draw_normal(workload, 0), workload))
    asking = Asking(implementation.backend)
    with case.grad_mode(), suppress(RuntimeError), asking:
        case.output()
    reason = "; ".join(asking.reasons) or "PyTorch gives no reason"
    return f"the {implementation.backend} backend was asked for and cannot run: {reason}"


class Asking(TorchFunctionMode):
    """Inside the context, asks PyTorch at every call of scaled_dot_product_attention which backend it takes.

    `predicted` are the backends that it takes, each once, and `reasons` why it does not take the `wanted` one.
    """

    def __init__(self, wanted: str = "") -> None:
        super().__init__()
        self.wanted = wanted
        self.predicted: dict[str, None] = {}
        self.reasons: dict[str, None] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - any result of torch
        if func is scaled_dot_product_attention:
            taken, _ = _choice(args, kwargs or {})
            if taken:
                self.predicted[taken] = None
            if self.wanted and taken != self.wanted:
                self.reasons |= dict.fromkeys(_reasons(args, kwargs or {}, self.wanted))
        return func(*args, **(kwargs or {}))


def _reasons(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: str) -> list[str]:
    """PyTorch's reasons against `wanted`; if it gives none for a mask with a gradient, try without one."""
    taken, reasons = _choice(args, kwargs, only=wanted)
    if taken == wanted:
        return ["it could run, and the call prefers or allows only another"]
    named = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
    mask = named.get("attn_mask")
    if reasons or mask is None or not mask.requires_grad:
        return reasons
    taken, _ = _choice((), named | {"attn_mask": mask.detach()}, only=wanted)
    return ["the mask requires a gradient, and without that it would run"] if taken == wanted else []


def _choice(args: tuple[Any, ...], kwargs: dict[str, Any], only: str = "") -> tuple[str, list[str]]:
    """The backend for these arguments, and PyTorch's warnings, restricted to `only` if set."""
    choices = sdpa_kernel(_BACKENDS[only]) if only else nullcontext()
    with warnings.catch_warnings(record=True) as caught, choices:
        warnings.simplefilter("always")
        try:
            taken = SDPBackend(torch._fused_sdp_choice(*args, **kwargs))  # noqa: SLF001 - the function itself uses it
        except RuntimeError:
            taken = SDPBackend.ERROR
    lines = [_TRIGGERED.sub("", str(warning.message)).strip() for warning in caught]
    return _NAMES.get(taken, ""), [line.rstrip(".") for line in lines if line and not _HEADLINE.search(line)]
