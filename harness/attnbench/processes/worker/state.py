# ruff: noqa: SLF001 - torch tells most of its state by private names only
"""Shared state of a process that affects results or speed: settings, and functions that must not be replaced.

A call may change none of it. Changes by an import are undone if possible, since honest libraries make some.
"""

import builtins
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from operator import is_
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import psutil
import torch
from torch.nn.modules import module as modules

from attnbench.devices import names
from attnbench.devices.waiting import settle

LONGEST = 120
NUM_LOOKS = 3
THREADS_S, CHILDREN_S = 0.01, 0.05
"""Seconds of watching a process: the system counts the time of other processes in hundredths of a second."""
BUSY_SHARE = 0.5
DEVICE_TYPES = tuple(name for name in names() if hasattr(torch, name))
WRAPPED_BY_LIBRARIES = ("compile", "load", "save")
"""Functions of torch that honest libraries wrap on import, as lightning does with torch.compile."""
HOOKS = [name for name in vars(modules) if name.startswith("_global_") and isinstance(vars(modules)[name], dict)]


class Flag(NamedTuple):
    """How to read a setting, and how to restore it: None if that is impossible."""

    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


@dataclass
class Changes:
    """Descriptions of changes."""

    settings: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)  # changes that could not be undone


class SharedStateError(Exception):
    """An implementation changed settings of the whole process."""


def _of_torch(read: str, write: str = "") -> Flag:
    """A setting with these accessors in torch._C."""
    return Flag(getattr(torch._C, f"_get_{read}"), getattr(torch._C, f"_set_{write or read}", None))


def _default_device() -> object:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


def _put_hooks(kept: dict[str, dict[int, Any]]) -> None:
    for name, hooks in kept.items():
        vars(modules)[name].clear()
        vars(modules)[name].update(hooks)


THREADS = "the number of threads"
QUICK: dict[str, Flag] = {
    THREADS: Flag(torch.get_num_threads, torch.set_num_threads),
    "the default dtype": Flag(torch.get_default_dtype, torch.set_default_dtype),
    "the precision of float32 matmuls": Flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": Flag(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "the default device": Flag(_default_device, torch.set_default_device),
    "anomaly detection": Flag(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "whether denormals are flushed to zero": Flag(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    "the number of function modes": Flag(torch._C._len_torch_function_stack),
    "the number of dispatch modes": Flag(torch._C._len_torch_dispatch_stack),
    "inference mode": Flag(torch.is_inference_mode_enabled),
    "the cache of autocast": Flag(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    "SDPA's flash kernel": _of_torch("flash_sdp_enabled", "sdp_use_flash"),
    "SDPA's memory-efficient kernel": _of_torch("mem_efficient_sdp_enabled", "sdp_use_mem_efficient"),
    "SDPA's math kernel": _of_torch("math_sdp_enabled", "sdp_use_math"),
    "SDPA's cuDNN kernel": _of_torch("cudnn_sdp_enabled", "sdp_use_cudnn"),
    "SDPA's order of kernels": _of_torch("sdp_priority_order"),
    "reduced precision in SDPA's math kernel": _of_torch("math_sdp_allow_fp16_bf16_reduction"),
    "whether oneDNN is used": _of_torch("mkldnn_enabled"),
    "whether oneDNN is deterministic": _of_torch("mkldnn_deterministic"),
    "reduced precision on the processor": _of_torch("cpu_allow_fp16_reduced_precision_reduction"),
    "whether cuDNN is used": _of_torch("cudnn_enabled"),
    "cuDNN's benchmark": _of_torch("cudnn_benchmark"),
    "whether cuDNN is deterministic": _of_torch("cudnn_deterministic"),
    "bfloat16 reductions of cuBLAS": _of_torch("cublas_allow_bf16_reduced_precision_reduction"),
    "float16 reductions of cuBLAS": _of_torch("cublas_allow_fp16_reduced_precision_reduction"),
    "float16 sums of cuBLAS": _of_torch("cublas_allow_fp16_accumulation"),
}
"""Settings that are read at every turn of a visit: some microseconds in all."""
for _name in DEVICE_TYPES:
    QUICK[f"autocast on {_name}"] = Flag(
        partial(torch.is_autocast_enabled, _name), partial(torch.set_autocast_enabled, _name)
    )
    QUICK[f"the dtype of autocast on {_name}"] = Flag(
        partial(torch.get_autocast_dtype, _name), partial(torch.set_autocast_dtype, _name)
    )

SETTINGS: dict[str, Flag] = {
    **QUICK,  # restored before the settings that depend on the precision of float32 matmuls
    **{
        f"the float32 precision of {backend} {operator}": Flag(
            partial(torch._C._get_fp32_precision_getter, backend, operator),
            partial(torch._C._set_fp32_precision_setter, backend, operator),
        )
        for backend, operator in [("generic", "all"), *product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))]
    },
    **{
        f"torch.{name}": Flag(partial(getattr, torch, name), partial(setattr, torch, name))
        for name in WRAPPED_BY_LIBRARIES
    },
    "whether gradients are kept": Flag(torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads between operators": Flag(torch.get_num_interop_threads),
    "the hooks of all modules": Flag(lambda: {name: dict(vars(modules)[name]) for name in HOOKS}, _put_hooks),
    "the hooks of saved tensors": Flag(partial(torch._C._autograd._top_saved_tensors_default_hooks, True)),  # noqa: FBT003
    "whether garbage is collected": Flag(gc.isenabled, lambda kept: gc.enable() if kept else gc.disable()),
    "the thresholds of garbage collection": Flag(gc.get_threshold, lambda kept: gc.set_threshold(*kept)),
    "the trace function": Flag(sys.gettrace, sys.settrace),
    "the profile function": Flag(sys.getprofile, sys.setprofile),
    "how often threads switch": Flag(sys.getswitchinterval, sys.setswitchinterval),
    "the processors it may run on": Flag(
        lambda: sorted(os.sched_getaffinity(0)), lambda kept: os.sched_setaffinity(0, kept)
    ),
    "its nice value": Flag(partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
}


def _look(flag: Flag) -> object:
    try:
        return flag.read()
    except Exception as error:  # noqa: BLE001 - torch raises if its older and newer settings were mixed
        return f"unreadable ({type(error).__name__})"


def _owners() -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Namespaces with protected functions, by name: torch, time, Python's own, and the whole harness."""
    for place in (torch, torch.nn.functional, torch.autograd, torch._C._nn, torch.linalg, builtins, time):
        yield place.__name__, partial(vars, place)
    for name in DEVICE_TYPES:
        yield f"torch.{name}", partial(vars, getattr(torch, name))
    yield "torch.Tensor", lambda: {**vars(torch._C.TensorBase), **vars(torch.Tensor)}
    yield "torch.nn.Module", partial(vars, torch.nn.Module)
    for name, place in list(sys.modules.items()):
        if name.startswith("attnbench.") and isinstance(place, ModuleType):
            yield name, partial(vars, place)
            for kind in list(vars(place).values()):
                if isinstance(kind, type) and kind.__module__ == name:
                    yield f"{name}.{kind.__qualname__}", partial(vars, kind)


class Functions:
    """All protected functions of torch and the harness, with the code of each; and the harness's constants."""

    def __init__(self) -> None:
        self._num_modules = len(sys.modules)
        self._ours = {name: place for name, place in sys.modules.items() if name.startswith("attnbench.")}
        self._held = [(owner, read, dict(read())) for owner, read in _owners()]
        self._codes = [
            (f"{owner}.{name}", value, value.__code__)
            for owner, _, before in self._held
            for name, value in before.items()
            if type(value) is FunctionType
        ]

    @property
    def are_all(self) -> bool:
        """Whether no module was imported since, which may have protected functions."""
        return self._num_modules == len(sys.modules)

    def replaced(self) -> list[str]:
        """Names of replaced functions. Added functions do not count: torch imports much late."""
        found = [name for name, value, code in self._codes if value.__code__ is not code]
        found += [name for name, place in self._ours.items() if sys.modules.get(name) is not place]
        for owner, read, before in self._held:
            now = read()
            has_same_names = len(before) == len(now) and all(map(is_, before, now))
            if has_same_names and all(map(is_, before.values(), now.values())):
                continue
            for name, value in before.items():
                if now.get(name) is not value and _matters(owner, name, value, now.get(name)):
                    found.append(f"{owner}.{name}")
            if owner.startswith("attnbench."):  # a module's global hides Python's own with the same name
                hidden = (name for name in now.keys() - before.keys() if hasattr(builtins, name))
                found += [f"{owner}.{name}" for name in hidden if not name.startswith("__")]
        return found


def _matters(owner: str, name: str, before: object, now: object) -> bool:
    if owner == "torch" and name in WRAPPED_BY_LIBRARIES:  # a setting
        return False
    if isinstance(now, FunctionType) and str(now.__globals__.get("__name__")).startswith("torch."):
        return not owner.startswith("torch")  # torch replaces some of its own when it imports its compiler
    is_ours = owner.startswith("attnbench.")
    return callable(before) or (is_ours and (name.isupper() or isinstance(before, property | classmethod)))


class Guard:
    """A snapshot of the process's state."""

    def __init__(self, earlier: "Guard | None" = None) -> None:
        """Take a snapshot; functions come from an earlier guard that found none replaced."""
        self._settings = {name: _look(each) for name, each in SETTINGS.items()}
        self._folder = os.getcwd()  # noqa: PTH109 - called often
        self._functions: Functions = (
            earlier._functions if earlier is not None and earlier._functions.are_all else Functions()
        )

    def expect(self, name: str) -> None:
        """Accept the current value of a setting that the harness itself has changed."""
        self._settings[name] = _look(SETTINGS[name])

    def require_unchanged(self) -> None:
        """Compare and restore the settings that are quick to read.

        Raises:
            SharedStateError: some were changed; the message names them.
        """
        if any(_look(each) != self._settings[name] for name, each in QUICK.items()):
            raise SharedStateError(blame(self._put_back(QUICK).settings))

    def restore(self) -> Changes:
        """Compare everything, restore as much as possible, and return the changes."""
        os.chdir(self._folder)  # file names are relative to it
        changes = self._put_back(SETTINGS)
        if replaced := self._functions.replaced():
            changes.settings.append(f"{_short(', '.join(replaced))} from what it was to another")
            changes.stuck.append(changes.settings[-1])
        return changes

    def _put_back(self, flags: Mapping[str, Flag]) -> Changes:
        seen = {name: _look(each) for name, each in flags.items()}
        others = {name: now for name, now in seen.items() if now != self._settings[name]}
        for _ in range(2 if others else 0):  # restoring one may change another
            for name, each in flags.items():
                if each.write is not None and _look(each) != self._settings[name]:
                    with suppress(Exception):
                        each.write(self._settings[name])
        changes = Changes()
        for name, now in others.items():
            changes.settings.append(f"{name} from {_short(self._settings[name])} to {_short(now)}")
            if _look(flags[name]) != self._settings[name]:
                changes.stuck.append(changes.settings[-1])
        return changes


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


def require_idle() -> None:
    """Check that neither threads nor children use the processors between requests.

    Raises:
        SharedStateError: one does, even on a second look.
    """
    share = 0.0
    for _ in range(NUM_LOOKS):
        settle()
        children = psutil.Process().children(recursive=True)
        window_s = CHILDREN_S if children else THREADS_S
        before_s = _processor_s(children)
        time.sleep(window_s)
        share = (_processor_s(children) - before_s) / window_s
        if share < BUSY_SHARE:
            return
    raise SharedStateError(f"between its calls it goes on using {share:.0%} of a processor, in threads or processes")


def _processor_s(children: list[psutil.Process]) -> float:
    total_s = time.process_time()
    for child in children:
        with suppress(psutil.Error):
            total_s += sum(child.cpu_times()[:2])
    return total_s


def blame(changed: list[str]) -> str:
    """Message about an implementation that changed settings."""
    return f"it changed {', '.join(changed)} for everybody in the process"
