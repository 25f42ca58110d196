"""CUDA devices: the only module that uses torch.cuda. Their clock is in devices/queued.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from msgspec import structs

from attnbench.devices import CaptureError, Facts, T, nvml
from attnbench.devices.accelerators import Accelerator
from attnbench.storage.records import DeviceState

DRIVER, AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/dev/kfd")
PACKAGES = (
    "triton",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "nvidia-cudnn-frontend",
    "sageattention",
    "transformer-engine",
    "xformers",
)
"""Packages whose kernels affect the speed of attention: their versions are stored with the device."""
SETTINGS = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUBLAS_WORKSPACE_CONFIG",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
    "FLASH_ATTENTION_*",
    "NCCL_*",
    "NVTE_*",
    "XFORMERS_*",
)
UNTRIED = (
    "answers are compared with a float64 oracle; times are between events behind a spinning kernel; the names of AMD's "
    "kernels are not known, and neither are its clocks and power"
)
BUSY = "busy or unavailable"  # part of CUDA's message if a device accepts no further process
EXCLUSIVE = "{} accepts no further process: if its mode is EXCLUSIVE_PROCESS, run nvidia-smi --compute-mode=DEFAULT"
NUM_WARM_UPS = 3
"""Calls before a graph is recorded, so that it contains no compilation, loading or allocation. Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"""


class Cuda(Accelerator):
    """An Nvidia GPU, or an AMD GPU, for which torch uses the same names."""

    alignment_bytes = 16  # width of vector loads; misaligned loads destroy the context
    activities = ("CPU", "CUDA")  # the host, which launches, and the device
    has_graphs = can_spin = counts_energy = True
    collectives = "nccl"
    _is_refused = False  # the driver has refused this process

    def spin(self, cycles: int) -> None:
        """Queue torch's spinning kernel."""
        self.module._sleep(cycles)  # noqa: SLF001 - torch has no public spinning kernel

    @property
    def untried(self) -> str:  # type: ignore[override]  # it depends on the driver
        """A note for AMD GPUs, on which this code was never run; "" for others."""
        return UNTRIED if AMD_DRIVER.exists() and not DRIVER.exists() else ""

    def seems_present(self) -> bool:
        """Return whether a driver is loaded."""
        return DRIVER.exists() or AMD_DRIVER.exists()

    def missing(self) -> str | None:
        """Return why the device is missing: no driver, too few devices, or the driver's refusal; None if it is here."""
        return EXCLUSIVE.format(self.name) if self._is_refused else super().missing()

    def select(self) -> None:
        """Make this the current device and create its context; if the driver refuses, the device is `missing`."""
        try:
            super().select()
        except RuntimeError as error:
            if BUSY not in str(error):
                raise
            self._is_refused = True

    def missing_compiler(self) -> str | None:
        """Return a message if triton is missing; otherwise None."""
        return None if "triton" in sys.modules or find_spec("triton") else "triton is not installed"

    def facts(self) -> Facts:
        """Return facts about the device, its driver, the libraries that torch was built with, and kernel packages.

        For `cuda` without a number, they list each kind of GPU of the machine.
        """
        import torch

        accelerator, clocks, versions = "", dict[str, str](), dict[str, str]()
        if torch.version.cuda:
            versions = {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        if torch.version.hip:
            versions = {"rocm": torch.version.hip}
        if torch.cuda.is_available():
            numbers = range(1, 1 if ":" in self.name else torch.cuda.device_count())
            kinds = []
            for place in (self.name, *(f"cuda:{number}" for number in numbers)):
                found = torch.cuda.get_device_properties(place)
                capability = f"compute capability {found.major}.{found.minor}"
                kinds.append(f"{found.name}, {found.total_memory} bytes, {capability}")
            accelerator = "; ".join(dict.fromkeys(kinds))
            clocks = nvml.limits(*nvml.find(torch.cuda.get_device_properties(self.name).uuid))
            for name in PACKAGES:
                with suppress(PackageNotFoundError):
                    versions[name] = version(name)
            if DRIVER.exists() and (driver := re.search(r"(\d+\.\d+(?:\.\d+)?)", DRIVER.read_text())):
                versions["nvidia driver"] = driver[1]
        return Facts(
            accelerator=accelerator,
            versions=versions,
            flags={"cuda_allow_tf32": str(torch.backends.cuda.matmul.allow_tf32)},
            clocks=clocks,
            settings=SETTINGS,
        )

    def is_broken(self) -> bool:
        """Return whether an error has corrupted the context.

        Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, errors that corrupt it.
        """
        if self._is_refused or not self.module.is_initialized():
            return False
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def apply_first_use_changes(self) -> None:
        """Make SDPA choose a kernel: at the first choice on a Hopper GPU, torch puts cuDNN first for the process.

        Source: https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
        priority_order.
        """
        import torch

        if self._is_refused:
            return
        query = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=self.name)
        torch._fused_sdp_choice(query, query, query)  # noqa: SLF001 - a call would build cuDNN's plan, too

    def compute_capability(self) -> tuple[int, int] | None:
        """Return the compute capability as CUDA defines it; None on AMD, whose architectures have other numbers."""
        import torch

        has_one = torch.cuda.is_available() and torch.version.hip is None
        return torch.cuda.get_device_capability(self.name) if has_one else None

    @cached_property
    def _pool(self) -> Any:  # noqa: ANN401 - torch has a type for it
        """The pool of scratch memory that all graphs share, since they never run at the same time."""
        return self.module.graph_pool_handle()

    def captured(self, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Record the call that `make` creates as a graph; `make`, the call and autograd run on one separate stream.

        A result is valid until another graph is replayed, because graphs share their memory. The call is kept alive,
        because a backward pass reads tensors that its forward pass saved, at the same addresses in each replay.
        """
        import torch

        with self.current():
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            self.synchronize()
            with torch.cuda.stream(stream):
                call = make()
                for _ in range(NUM_WARM_UPS):
                    call()
            self.synchronize()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    held = call, call()
            except Exception as error:
                first = error.__context__ or error  # ending a failed recording raises a second error
                said = (str(first).splitlines() or [""])[0]
                raise CaptureError(f"it cannot be recorded as a CUDA graph: {type(first).__name__}: {said}") from error

        def replay() -> T:
            graph.replay()
            return held[1]

        return replay

    @cached_property
    def _driver(self) -> tuple[Any, Any]:
        return nvml.find(self.module.get_device_properties(self.name).uuid)

    def state(self) -> DeviceState | None:
        """Read the state from NVML, in about ten microseconds.

        If spins (kernels that only keep the device busy) have measured the clock frequency, it replaces NVML's.
        """
        found = nvml.moment(*self._driver)
        if clock_hz := self.clock.clock_hz():
            found = structs.replace(found, clock_mhz=clock_hz / 1e6)
        return None if found == DeviceState() else found

    def energy_j(self) -> float | None:
        """Return the joules that NVML counts on GPUs from Volta on; None without a counter."""
        return nvml.energy_j(*self._driver)

    def cache_bytes(self) -> int:
        """Return the bytes of the second-level cache."""
        size: int = self.module.get_device_properties(self.name).L2_cache_size
        return size

    def outside_bytes(self) -> int:
        """Return the bytes in use by the context, kernel code, libraries and other processes."""
        self.synchronize()
        free, whole = self.module.mem_get_info(self.name)
        reserved: int = self.module.memory_reserved(self.name)
        return int(whole - free - reserved)


DEVICE = Cuda
