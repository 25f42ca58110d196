# ruff: noqa: SLF001 - torch tells part of its state by private names only
"""Settings of a process that change results or speed, read before and after every request, and put back.

Foreign code has a process of its own, and the coordinator's clock judges its times. This catches the effects of honest
code on code in the same process.
"""

import gc
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

Flag = tuple[Callable[[], Any], Callable[[Any], object] | None]
"""How to read a setting, and how to put it back: None if that is impossible."""
SHOWN = 120
CHANGED_BY_US = ("gradients", "garbage collection")  # settings that a visit itself changes
OF_TORCH = (
    *("sdp_priority_order", "math_sdp_allow_fp16_bf16_reduction", "mkldnn_enabled", "mkldnn_deterministic"),
    *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "cpu_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_bf16_reduced_precision_reduction", "cublas_allow_fp16_reduced_precision_reduction"),
    *("cublas_allow_fp16_accumulation", "blas_preferred_backend", "deterministic_algorithms"),
)
"""Settings with an accessor of this name in torch._C, as `_get_` and `_set_`."""
FUNCTIONS: tuple[tuple[Any, str], ...] = (
    *((functional, name) for name in ("scaled_dot_product_attention", "softmax", "linear")),
    *((torch, name) for name in ("matmul", "bmm", "baddbmm", "einsum", "softmax")),
    *((torch.Tensor, name) for name in ("__matmul__", "matmul", "softmax")),
    *((time, name) for name in ("perf_counter", "perf_counter_ns")),
)
"""Functions that libraries replace for the whole process, as SageAttention's manual advises; and the clocks."""


class SharedStateError(Exception):
    """An implementation changed settings of the whole process."""


def _flags() -> dict[str, Flag]:
    flags: dict[str, Flag] = {
        "number of threads": (torch.get_num_threads, torch.set_num_threads),
        "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
        "default device": (
            lambda: getattr(getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None), "device", None),
            torch.set_default_device,
        ),
        "float32 matmul precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
        "flushing of denormals": (lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
        "anomaly detection": (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
        "gradients": (torch.is_grad_enabled, torch.set_grad_enabled),
        "inference mode": (torch.is_inference_mode_enabled, None),
        "function modes": (torch._C._len_torch_function_stack, None),
        "dispatch modes": (torch._C._len_torch_dispatch_stack, None),
        "garbage collection": (gc.isenabled, lambda kept: gc.enable() if kept else gc.disable()),
        "trace function": (sys.gettrace, sys.settrace),
        "profile function": (sys.getprofile, sys.setprofile),
        "priority": (partial(os.getpriority, os.PRIO_PROCESS, 0), partial(os.setpriority, os.PRIO_PROCESS, 0)),
    }
    if hasattr(os, "sched_getaffinity"):  # only on Linux
        flags["processors"] = partial(os.sched_getaffinity, 0), partial(os.sched_setaffinity, 0)
    for name in OF_TORCH:
        flags[name.replace("_", " ")] = getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}")
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        flags[f"sdpa {name}"] = getattr(torch._C, f"_get_{name}_sdp_enabled"), getattr(torch._C, f"_set_sdp_use_{name}")
    for name in (name for name in names() if hasattr(torch, name)):
        is_enabled, enable = torch.is_autocast_enabled, torch.set_autocast_enabled
        flags[f"autocast on {name}"] = partial(is_enabled, name), partial(enable, name)
    for place, name in FUNCTIONS:
        flags[f"{place.__name__}.{name}"] = partial(getattr, place, name), partial(setattr, place, name)
    return flags


FLAGS = _flags()
AT_START = {f"{place.__name__}.{name}": getattr(place, name) for place, name in FUNCTIONS}


class Guard:
    """A snapshot of the settings."""

    def __init__(self) -> None:
        self.kept = {name: read() for name, (read, _) in FLAGS.items()} | AT_START
        self.folder = os.getcwd()  # noqa: PTH109 - called often

    def restored(self, *, within_a_visit: bool = False) -> list[str]:
        """Put changed settings back; return the changes in words. The current folder costs nothing: it is put back."""
        os.chdir(self.folder)
        now = {name: FLAGS[name][0]() for name in FLAGS if not (within_a_visit and name in CHANGED_BY_US)}
        changed = {name: seen for name, seen in now.items() if seen != self.kept[name]}
        for name in changed:
            if (write := FLAGS[name][1]) is not None:
                with suppress(Exception):
                    write(self.kept[name])
        return [f"{name} from {str(self.kept[name])[:SHOWN]} to {str(seen)[:SHOWN]}" for name, seen in changed.items()]

    def require_unchanged(self) -> None:
        """Restore the settings that the harness does not change during a visit.

        Raises:
            SharedStateError: some were changed; the message names them.
        """
        if changed := self.restored(within_a_visit=True):
            raise SharedStateError(blame(changed))


def blame(changed: list[str]) -> str:
    """Message about an implementation that changed settings."""
    return f"it changed {', '.join(changed)} for everybody in the process"
