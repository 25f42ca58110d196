"""Where a run takes place, as loaded: processor, versions, threads, settings and flags. No host name, no path."""

import os
import platform
import re
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from attnbench.devices import device, names
from attnbench.storage.records import Environment

SETTINGS = (
    "OMP_NUM_THREADS",
    "OMP_WAIT_POLICY",
    "OMP_PROC_BIND",
    "GOMP_SPINCOUNT",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_MAX_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "MALLOC_ARENA_MAX",
    "MALLOC_MMAP_MAX_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_TRIM_THRESHOLD_",
    "GLIBC_TUNABLES",
    "PYTORCH_ALLOC_CONF",
)
"""Variables that change how fast attention runs; recorded where set, as are those that a device names."""


def physical_cores() -> int:
    """Physical cores that this process may use; at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(psutil.cpu_count(logical=False) or allowed, allowed))


def collect() -> Environment:
    """The environment of this process, with what each device says of itself."""
    facts = [device(name).facts() for name in names()]
    settings = [*SETTINGS, *(name for each in facts for name in each.settings)]
    return Environment(
        cpu=_cpu_name(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_physical_cores=psutil.cpu_count(logical=False) or 0,
        num_logical_cores=psutil.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions=_versions() | {name: value for each in facts for name, value in each.versions.items()},
        accelerator="; ".join(each.accelerator for each in facts if each.accelerator),
        num_threads=torch.get_num_threads(),
        settings={name: os.environ[name] for name in settings if name in os.environ},
        flags=_flags() | {name: value for each in facts for name, value in each.flags.items()},
        clocks=_clocks(),
        moment=_moment(),
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        native_dtypes=_native_dtypes(),
    )


def _native_dtypes() -> tuple[str, ...] | None:
    """What oneDNN, which multiplies matrices of half precision, says of this processor; None: it cannot be asked."""
    names = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
    asked: dict[str, Any] = {dtype: getattr(torch.ops.mkldnn, name, None) for dtype, name in names.items()}
    if not torch.backends.mkldnn.is_available() or None in asked.values():
        return None
    return tuple(dtype for dtype, is_native in asked.items() if is_native())


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    """Versions as loaded, those of the libraries inside torch from its own report."""
    versions = {"torch": str(torch.__version__), "numpy": np.__version__}
    try:
        versions["attnbench"] = version("attnbench")
    except PackageNotFoundError:  # run from a checkout that is not installed
        versions["attnbench"] = "not installed"
    report = torch.__config__.show()
    patterns = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
    found = {name: re.search(pattern, report) for name, pattern in patterns.items()}
    versions |= {name: match[1] for name, match in found.items() if match}
    return versions


def _flags() -> dict[str, str]:
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "mkldnn": str(torch.backends.mkldnn.is_available()),
    }


def _moment() -> dict[str, str]:
    steps = [after - before for before, after in _ticks() if after > before]
    moment = {"timer step": f"{min(steps)} ns"} if steps else {}
    spent: Any = psutil.cpu_times()  # its fields differ from system to system
    if hasattr(spent, "steal") and sum(spent):
        moment["stolen by the host since boot"] = f"{100 * spent.steal / sum(spent):.1f} %"
    return moment


def _ticks() -> Iterator[tuple[int, int]]:
    for _ in range(1000):
        yield time.perf_counter_ns(), time.perf_counter_ns()


def _clocks() -> dict[str, str]:
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    clocks = {"governor": governor.read_text().strip()} if governor.exists() else {}
    frequency: Any = psutil.cpu_freq()  # None where the system does not tell, whatever its types say
    if frequency is not None and frequency.max:
        clocks["max_mhz"] = f"{frequency.max:.0f}"
    return clocks
