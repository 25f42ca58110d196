"""The environment of a run: processor, versions, threads, settings and flags. No host name, no path."""

import os
import platform
import re
from contextlib import suppress
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from attnbench.devices import containers, device, names, processor
from attnbench.storage.records import Environment

GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
SETTINGS = (
    "OMP_*",
    "GOMP_*",
    "KMP_*",
    "MKL_*",
    "ONEDNN_*",
    "ATEN_CPU_CAPABILITY",
    "MALLOC_*",
    "GLIBC_TUNABLES",
    "PYTORCH_ALLOC_CONF",
)
"""Environment variables that affect the speed of attention. A run records those that are set, and those in the
`settings` of a device's Facts. NAME* stands for all names that begin with NAME."""


def usable_cores() -> int:
    """Return the number of physical cores that this process may use, by affinity mask and quota, at least 1."""
    allowed = containers.processors()
    return min(psutil.cpu_count(logical=False) or allowed, allowed)


def collect() -> Environment:
    """Return the environment of this process, with the facts of each device."""
    facts = [device(name).facts() for name in names()]
    versions = {"torch": str(torch.__version__), "numpy": np.__version__, "attnbench": "not installed"}
    with suppress(PackageNotFoundError):  # runs from a checkout that is not installed
        versions["attnbench"] = version("attnbench")
    inside_torch = {"mkl": r"Math Kernel Library Version (\S+)", "onednn": r"MKL-DNN v(\S+)"}
    for name, pattern in inside_torch.items():
        if found := re.search(pattern, torch.__config__.show()):
            versions[name] = found[1]
    flags = {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": str(torch.are_deterministic_algorithms_enabled()),
        "mkldnn": str(torch.backends.mkldnn.is_available()),
    }
    for each in facts:
        versions |= each.versions
        flags |= each.flags
    settings = [*SETTINGS, *(name for each in facts for name in each.settings)]
    return Environment(
        cpu=processor(),
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        num_physical_cores=psutil.cpu_count(logical=False) or 0,
        num_logical_cores=psutil.cpu_count() or 0,
        memory_bytes=psutil.virtual_memory().total,
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        versions=versions,
        accelerator="; ".join(each.accelerator for each in facts if each.accelerator),
        num_threads=torch.get_num_threads(),
        settings={
            name: "(a path)" if os.sep in value else value
            for pattern in settings
            for name, value in sorted(os.environ.items())
            if fnmatchcase(name, pattern)
        },
        flags=flags,
        clocks=({"governor": GOVERNOR.read_text().strip()} if GOVERNOR.exists() else {})
        | {name: text for each in facts for name, text in each.clocks.items()},
        load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None,
        native_dtypes=_native_dtypes(),
    )


def _native_dtypes() -> tuple[str, ...] | None:
    """Return half-precision dtypes with native matrix products in oneDNN on this processor; None if unknown."""
    names = {"bfloat16": "_is_mkldnn_bf16_supported", "float16": "_is_mkldnn_fp16_supported"}
    asked: dict[str, Any] = {dtype: getattr(torch.ops.mkldnn, name, None) for dtype, name in names.items()}
    if not torch.backends.mkldnn.is_available() or None in asked.values():
        return None
    return tuple(dtype for dtype, is_native in asked.items() if is_native())
