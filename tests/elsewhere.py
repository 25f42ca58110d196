"""Another device for tests: its tensors are meta tensors, with shapes, dtypes and places, but no numbers.

Reads from it return random numbers, so that code which computes on the device and compares on the CPU runs to its end.
An operation between tensors of two devices fails as it does with any other device. `Counted` counts the memory that the
device would have needed.
"""

import sys
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attnbench import devices
from attnbench.devices import Device, device
from attnbench.devices.cpu import Cpu

NAME = "elsewhere"
COPIES = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)


class Elsewhere(Cpu):
    """The device, which is not the host and has no memory in common with it."""

    torch_device = "meta"
    is_host = False


@contextmanager
def installed(made: type[Device], name: str = NAME) -> Iterator[None]:
    """Register the device class `made` under that name within the context."""
    module = types.ModuleType(f"attnbench.devices.{name}")
    module.DEVICE = made
    known = (*devices.names(), name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        patch.setattr(devices, "names", lambda: known)
        yield
    device.cache_clear()


class Counted(TorchDispatchMode):
    """A mode that answers reads of numbers, and counts the bytes of the storages that exist on the device.

    Copies to the host with `large` elements or more need no memory there, either: they are one expanded number.
    """

    def __init__(self, large: float = float("inf")) -> None:
        super().__init__()
        self.large = large
        self.held_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1.0
        if func in COPIES and args[0].numel() >= self.large and str(kwargs.get("device", args[0].device)) == "cpu":
            return torch.ones(1, dtype=kwargs.get("dtype") or args[0].dtype).expand(args[0].shape)
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and str(kwargs.get("device", "meta")) == "cpu":
            drawn = torch.rand(args[0].shape, dtype=torch.float64)
            return drawn.to(kwargs.get("dtype") or args[0].dtype)
        made = func(*args, **kwargs)
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor) and each.is_meta:
                self._hold(each.untyped_storage())
        return made

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known.add(key)
            self.held_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
            weakref.finalize(storage, self._let_go, key, storage.nbytes())

    def _let_go(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.held_bytes -= num_bytes
