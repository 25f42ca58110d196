# ruff: noqa: SLF001 - torch tells most of its state by private names only
"""Shared state of a process that affects results or speed: settings, and functions that must not be replaced.

A call may change none of it. Changes by an import are undone if possible, since honest libraries make some.
"""

import builtins
import gc
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from types import FunctionType, ModuleType
from typing import Any

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
HOOKS = [name for name in vars(modules) if name.startswith("_global_") and isinstance(vars(modules)[name], dict)]
WRAPPED_BY_LIBRARIES = ("compile", "load", "save")
"""Functions of torch that honest libraries wrap on import, as lightning does with torch.compile."""
OF_TORCH = (
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled", "mkldnn_deterministic"),
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cpu_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_fp16_accumulation", "blas_preferred_backend", "deterministic_algorithms"),
)
"""Settings with an accessor of this name in torch._C, as `_get_` and `_set_`."""
SDPA = ("flash", "mem_efficient", "math", "cudnn", "fa3", "overrideable")
CHANGED_BY_US = ("gradients", "garbage_collection")
"""Settings that a visit itself changes."""


class SharedStateError(Exception):
    """An implementation changed settings of the whole process."""


Flag = tuple[Callable[[], Any], Callable[[Any], object] | None]
"""How to read a setting, and how to restore it: None if that is impossible."""


def _put_hooks(kept: dict[str, dict[int, Any]]) -> None:
    for name, hooks in kept.items():
        vars(modules)[name].clear()
        vars(modules)[name].update(hooks)


def _settings() -> dict[str, Flag]:
    """Every setting, by name; nearly all are read at every turn of a visit, in some tens of microseconds."""
    flags: dict[str, Flag] = {
        "number_of_threads": (torch.get_num_threads, torch.set_num_threads),
        "default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "float32_matmul_precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "default_device": (
            lambda: getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None),
            torch.set_default_device,
        ),
        "anomaly_detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "flushing_of_denormals": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "inference_mode": (torch.is_inference_mode_enabled, None),
        "function_modes": (torch._C._len_torch_function_stack, None),
        "dispatch_modes": (torch._C._len_torch_dispatch_stack, None),
        "hooks_of_saved_tensors": (partial(torch._C._autograd._top_saved_tensors_default_hooks, True), None),  # noqa: FBT003
        "garbage_collection": (gc.isenabled, lambda kept: gc.enable() if kept else gc.disable()),
        "hooks_of_all_modules": (lambda: {name: dict(vars(modules)[name]) for name in HOOKS}, _put_hooks),
        "trace_function": (sys.gettrace, sys.settrace),
        "profile_function": (sys.getprofile, sys.setprofile),
        "priority": (partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
    }
    if (monitoring := getattr(sys, "monitoring", None)) is not None:  # from Python 3.12 on
        flags["monitoring_tools"] = lambda: [*map(monitoring.get_tool, range(6))], None
    if hasattr(os, "sched_getaffinity"):  # only on Linux
        flags["processors"] = partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
    for name in OF_TORCH:
        flags[name] = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    for name in SDPA:
        read, write = getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}", None)
        flags[f"sdpa_{name}"] = read, write
    for name in DEVICE_TYPES:
        is_enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
        flags[f"autocast_on_{name}"] = partial(is_enabled, name), partial(enable, name)
        get_dtype, set_dtype = torch.get_autocast_dtype, torch.set_autocast_dtype
        flags[f"dtype_of_autocast_on_{name}"] = partial(get_dtype, name), partial(set_dtype, name)
    for place in (("generic", "all"), *product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))):
        get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
        flags[f"float32_precision_of_{'_'.join(place)}"] = partial(get, *place), partial(put, *place)
    for name in WRAPPED_BY_LIBRARIES:
        flags[f"torch.{name}"] = partial(getattr, torch, name), partial(setattr, torch, name)
    return flags


SETTINGS = _settings()
AT_EVERY_TURN = tuple(name for name in SETTINGS if name not in CHANGED_BY_US)


def _look(name: str) -> object:
    try:
        return SETTINGS[name][0]()
    except Exception as error:  # noqa: BLE001 - torch raises if its older and newer settings were mixed
        return f"unreadable ({type(error).__name__})"


def _owners() -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """Namespaces with protected functions, by name: torch, time, Python's own, and the whole harness."""
    devices = [getattr(torch, name) for name in DEVICE_TYPES]
    devices += [place.Event for place in devices if hasattr(place, "Event")]
    for place in (torch, torch.nn.functional, torch.autograd, torch._C._nn, torch.linalg, builtins, time, *devices):
        yield place.__name__, partial(vars, place)
    yield "torch.Tensor", lambda: {**vars(torch._C.TensorBase), **vars(torch.Tensor)}
    yield "torch.nn.Module", partial(vars, torch.nn.Module)
    for name, place in list(sys.modules.items()):
        if name.startswith("attnbench.") and isinstance(place, ModuleType):
            yield name, partial(vars, place)
            for kind in list(vars(place).values()):
                if isinstance(kind, type) and kind.__module__ == name:
                    yield f"{name}.{kind.__qualname__}", partial(vars, kind)


class Guard:
    """A snapshot of the process's state: settings, and all protected functions with the code of each."""

    def __init__(self) -> None:
        self._keep_functions()
        self.accept_settings()

    def _keep_functions(self) -> None:
        self._num_modules = len(sys.modules)
        self._before = [(owner, read, dict(read())) for owner, read in _owners()]
        self._codes = [
            (f"{owner}.{name}", value, value.__code__)
            for owner, _, before in self._before
            for name, value in before.items()
            if type(value) is FunctionType
        ]

    def accept_settings(self) -> None:
        """Take the settings as they are: the harness itself has changed some."""
        self._settings = {name: _look(name) for name in SETTINGS}
        self._folder = os.getcwd()  # noqa: PTH109 - called often

    def require_unchanged(self) -> None:
        """Compare the settings that the harness does not change during a visit, and restore them.

        Raises:
            SharedStateError: some were changed; the message names them.
        """
        if changed := self._restored_settings(AT_EVERY_TURN):
            raise SharedStateError(blame(changed))

    def restore(self) -> list[str]:
        """Restore as much as possible, and return the changes; those that stay are returned again by another call."""
        os.chdir(self._folder)  # file names are relative to it
        changed = self._restored_settings(SETTINGS)
        if replaced := self._replaced():
            changed.append(_short(", ".join(replaced)))
        elif self._num_modules != len(sys.modules):  # a module that was imported since may have protected functions
            self._keep_functions()
        return changed

    def _replaced(self) -> list[str]:
        """Names of replaced functions. Added functions do not count: torch imports many modules late."""
        changed = [name for name, function, code in self._codes if function.__code__ is not code]
        for owner, read, before in self._before:
            now = read()
            for name, value in before.items():
                if now.get(name) is not value and _matters(owner, name, value, now.get(name)):
                    changed.append(f"{owner}.{name}")
            if owner.startswith("attnbench."):  # a module's global hides Python's own with the same name
                hidden = (name for name in now.keys() - before.keys() if hasattr(builtins, name))
                changed += [f"{owner}.{name}" for name in hidden if not name.startswith("__")]
        return changed

    def _restored_settings(self, compared: Iterable[str]) -> list[str]:
        others = {name: now for name in compared if (now := _look(name)) != self._settings[name]}
        for _ in range(2 if others else 0):  # restoring one may change another
            for name in compared:
                write = SETTINGS[name][1]
                if write is not None and _look(name) != self._settings[name]:
                    with suppress(Exception):
                        write(self._settings[name])
        return [
            f"{name.replace('_', ' ')} from {_short(self._settings[name])} to {_short(now)}"
            for name, now in others.items()
        ]


def _matters(owner: str, name: str, before: object, now: object) -> bool:
    if owner == "torch" and name in WRAPPED_BY_LIBRARIES:
        return False
    if isinstance(now, FunctionType) and str(now.__globals__.get("__name__")).startswith("torch."):
        return not owner.startswith("torch")  # torch replaces some of its own when it imports its compiler
    is_ours = owner.startswith("attnbench.")
    return callable(before) or (is_ours and (name.isupper() or isinstance(before, property | classmethod)))


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


def _processor_s(children: Iterable[psutil.Process]) -> float:
    total_s = time.process_time()
    for child in children:
        with suppress(psutil.Error):
            total_s += sum(child.cpu_times()[:2])
    return total_s


def blame(changed: list[str]) -> str:
    """Message about an implementation that changed settings."""
    return f"it changed {', '.join(changed)} for everybody in the process"
