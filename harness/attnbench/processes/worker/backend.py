"""Which backend PyTorch says it will take for `scaled_dot_product_attention`, and why it will not take another.

PyTorch is asked where the call is made, with the very tensors, by a mode that sees each call of the function: what
decides (strides, a mask that needs a gradient, the backends that are switched on) is all there, on the CPU as on CUDA.
Source: https://docs.pytorch.org/docs/stable/notes/extending.html#extending-all-torch-api-with-modes
"""

import re
import warnings
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from attnbench.storage.operator_kinds import BACKENDS

_BACKENDS = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "overrideable": SDPBackend.OVERRIDEABLE,
}
_NAMES = {value: name for name, value in _BACKENDS.items()}
assert set(_BACKENDS) == set(BACKENDS)
NO_KERNEL = "No available kernel"
"""What PyTorch raises where no backend that is switched on can run."""
_TRIGGERED = re.compile(r"\s*\(Triggered internally at [^)]*\)\.?")
_HEADLINE = re.compile(r"not used because:?$")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The backends that PyTorch says it takes, joined by "+" where they differ; and why not the one that is wanted."""

    predicted: str = ""
    reason: str = ""


class _Asking(TorchFunctionMode):
    """Asks PyTorch at every call of scaled_dot_product_attention."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.wanted = wanted
        self.predicted: list[str] = []
        self.reasons: list[str] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever torch returns
        if func is scaled_dot_product_attention:
            taken, _ = _choice(args, kwargs or {})
            self.predicted.append(taken)
            if self.wanted and taken != self.wanted:
                self.reasons += _reasons(args, kwargs or {}, self.wanted)
        return func(*args, **(kwargs or {}))

    def answer(self) -> Answer:
        predicted = "+".join(dict.fromkeys(filter(None, self.predicted)))
        return Answer(predicted=predicted, reason="; ".join(dict.fromkeys(self.reasons)))


def ask(call: Callable[[], object], wanted: str = "") -> Answer:
    """What PyTorch says of each SDPA call inside one `call`; empty where there is none.

    Raises:
        Exception: whatever `call` raises.
    """
    mode = _Asking(wanted)
    with mode:
        call()
    return mode.answer()


def refusal(call: Callable[[], object], wanted: str) -> str:
    """Why a call that raises NO_KERNEL cannot use the backend that it demands."""
    mode = _Asking(wanted)
    with suppress(RuntimeError), mode:
        call()
    return mode.answer().reason


def _reasons(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: str) -> list[str]:
    """PyTorch's reasons against `wanted`; it gives none where the mask needs a gradient, so it is asked without one."""
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
    """The backend that would be taken for these arguments, and PyTorch's warnings, with `only` one to choose from."""
    choices = sdpa_kernel(_BACKENDS[only]) if only else nullcontext()
    with warnings.catch_warnings(record=True) as caught, choices:
        warnings.simplefilter("always")
        try:
            taken = SDPBackend(torch._fused_sdp_choice(*args, **kwargs))  # noqa: SLF001 - what the function itself asks
        except RuntimeError:
            taken = SDPBackend.ERROR
    lines = [_TRIGGERED.sub("", str(warning.message)).strip() for warning in caught]
    return _NAMES.get(taken, ""), [line.rstrip(".") for line in lines if line and not _HEADLINE.search(line)]
