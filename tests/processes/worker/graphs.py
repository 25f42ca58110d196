"""Graphs of launches on the processor: operators that torch dispatches are recorded, and repeated in the same memory.

As on CUDA, a replay knows nothing else of the host: no Python numbers, no numpy, no state from before. Operators that
wait for the device cannot be recorded.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnbench.devices import CaptureError, Device

T = TypeVar("T")
WAITS = ("aten::_local_scalar_dense",)
"""Operators that need a number on the host."""


class Recorder(TorchDispatchMode):
    """A context that records each operator with its operands and results, as a launch with its pointers."""

    def __init__(self) -> None:
        """Start with no records."""
        super().__init__()  # type: ignore[no-untyped-call] # it has no types
        self.launches: list[tuple[OpOverload, tuple[Any, ...], Mapping[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the operator, and record it."""
        if func.name() in WAITS:
            raise RuntimeError("operation not permitted when stream is capturing")
        result = func(*args, **(kwargs or {}))
        self.launches.append((func, args, kwargs or {}, _tensors(result)))
        return result

    def replay(self) -> None:
        """Repeat all operators; each result goes to the memory of the first."""
        for func, args, kwargs, results in self.launches:
            places = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
            for before, now in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if before.untyped_storage().data_ptr() not in places:  # else it is a view, or was written in place
                    before.copy_(now)


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def captured(device: Device, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:
    """Capture a call as `Device.captured` does, on the processor."""
    call = make()
    call()
    recorder = Recorder()
    try:
        with recorder:
            kept = call()
    except RuntimeError as error:
        raise CaptureError(f"{device.name}: it cannot be recorded as a graph: {error}") from error

    def replay() -> T:
        with torch.no_grad():
            recorder.replay()
        return kept

    return replay
