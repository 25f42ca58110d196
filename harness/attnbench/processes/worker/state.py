# ruff: noqa: SLF001 - torch exposes part of its state only under private names
"""Settings of a process that change results or speed: they are read before and after every request, and restored.

This catches accidental side effects on other code in the same process. To protect against malicious code, foreign
implementations run in processes of their own.
"""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from attnbench.devices import names

OF_TORCH = (
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled", "mkldnn_deterministic"),
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cpu_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_fp16_accumulation", "blas_preferred_backend", "deterministic_algorithms"),
)
"""Settings that torch._C reads by `_get_NAME` and writes by `_set_NAME`."""
REPLACEABLE: dict[Any, tuple[str, ...]] = {
    functional: ("scaled_dot_product_attention", "softmax", "linear"),
    torch: ("matmul", "bmm", "baddbmm", "einsum", "softmax"),
    torch.Tensor: ("__matmul__", "matmul", "softmax"),
    time: ("perf_counter", "perf_counter_ns"),
}
"""Functions and clocks that code could replace for the whole process. For example, SageAttention's manual advises to
replace `scaled_dot_product_attention`."""
FUNCTIONS = {f"{place.__name__}.{name}": (place, name) for place, names_ in REPLACEABLE.items() for name in names_}
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "number of threads": (torch.get_num_threads, torch.set_num_threads),
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "default device": (
        lambda: getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None),
        lambda _: torch.set_default_device(None),
    ),
    "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "flushing of denormals": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "inference mode": (torch.is_inference_mode_enabled, lambda _: None),  # it and the next two cannot be restored
    "function modes": (torch._C._len_torch_function_stack, lambda _: None),
    "dispatch modes": (torch._C._len_torch_dispatch_stack, lambda _: None),
    "trace function": (sys.gettrace, sys.settrace),
    "profile function": (sys.getprofile, sys.setprofile),
    "priority": (partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
    **{name: (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")) for name in OF_TORCH},
    **{
        f"sdpa {name}": (getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}"))
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    **{
        f"autocast on {name}": (partial(torch.is_autocast_enabled, name), partial(torch.set_autocast_enabled, name))
        for name in names()
        if hasattr(torch, name)
    },
    **{name: (partial(getattr, *place), partial(setattr, *place)) for name, place in FUNCTIONS.items()},
}
"""Each setting, with the functions that read and restore it. Gradient mode and garbage collection are left out, because
every call sets them."""
if hasattr(os, "sched_getaffinity"):  # only on Linux
    SETTINGS["processors"] = partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
AT_START = {name: getattr(*place) for name, place in FUNCTIONS.items()}


class SharedStateError(Exception):
    """An implementation changed settings of the whole process."""


class Guard:
    """A snapshot of the process's settings; the functions in REPLACEABLE are those at the import of this module."""

    def __init__(self) -> None:
        self.kept = {name: read() for name, (read, _) in SETTINGS.items()} | AT_START
        self.folder = os.getcwd()  # noqa: PTH109 - called often

    def restored(self) -> str:
        """Restore changed settings, and the current folder; return the changes of settings in words, or "" if none."""
        os.chdir(self.folder)
        changed = {name: seen for name, (read, _) in SETTINGS.items() if (seen := read()) != self.kept[name]}
        for name in changed:
            with suppress(Exception):
                SETTINGS[name][1](self.kept[name])
        listed = [f"{name} from {self.kept[name]!s:.120} to {seen!s:.120}" for name, seen in changed.items()]
        return f"it changed {', '.join(listed)} for all code in the process" if listed else ""

    def require_unchanged(self) -> None:
        """Restore the settings, and require that none was changed.

        Raises:
            SharedStateError: some settings were changed; the message names them.
        """
        if changed := self.restored():
            raise SharedStateError(changed)
