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
from typing import TYPE_CHECKING, Any

from msgspec import structs

from attnbench.devices import CaptureError, Facts, T, nvml
from attnbench.devices.accelerators import Accelerator, TorchMarks
from attnbench.devices.queued import QueuedClock, Runtime
from attnbench.storage.records import DeviceState

if TYPE_CHECKING:  # the description of a device needs no torch
    import torch

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
BUSY = "busy or unavailable"
"""Part of CUDA's message if a device lets no further process in."""
EXCLUSIVE = "{} lets no further process in: if its mode is EXCLUSIVE_PROCESS, nvidia-smi --compute-mode=DEFAULT"
NUM_WARM_UPS = 3
"""Calls before a graph is recorded, so that it contains no compiling, loading and allocating. Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"""


class CudaRuntime(TorchMarks, Runtime):
    """The calls of torch.cuda that the clock needs."""

    def spin(self, cycles: int) -> None:
        """Queue torch's spinning kernel."""
        import torch

        torch.cuda._sleep(cycles)  # noqa: SLF001 - torch has no public spinning kernel


class Cuda(Accelerator):
    """An Nvidia GPU, or an AMD GPU, which torch calls by the same names."""

    alignment_bytes = 16  # width of vector loads; misaligned ones destroy the context
    activities = ("CPU", "CUDA")  # the host, which launches, and the device
    has_graphs = True
    collectives = "nccl"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.clock = QueuedClock(CudaRuntime(name))
        self._is_refused = False  # its driver lets no further process in

    @property
    def untried(self) -> str:  # type: ignore[override]  # it depends on the driver
        """A note for AMD GPUs, on which this was never run; empty for others."""
        if not self._is_amd:
            return ""
        return (
            "answers are compared with a float64 oracle; times are between events behind a spinning kernel; the names "
            "of AMD's kernels are not known, and neither are its clocks and power"
        )

    @property
    def _is_amd(self) -> bool:
        return AMD_DRIVER.exists() and not DRIVER.exists()

    def seems_present(self) -> bool:
        """Whether a driver is loaded."""
        return DRIVER.exists() or AMD_DRIVER.exists()

    def missing(self) -> str | None:
        """Report a missing driver, fewer devices than N, or a device that has refused this process."""
        return EXCLUSIVE.format(self.name) if self._is_refused else super().missing()

    def use(self, number: int) -> None:
        """Make the device with this number the current one; the driver may refuse, since that makes a context."""
        try:
            super().use(number)
        except RuntimeError as error:
            if BUSY not in str(error):
                raise
            self._is_refused = True

    def missing_compiler(self) -> str | None:
        """Report a missing triton."""
        return None if "triton" in sys.modules or find_spec("triton") else "triton is not installed"

    def facts(self) -> Facts:
        """The device, its driver, the libraries that torch was built with, and kernel packages.

        `cuda` without a number names all kinds of devices that are here.
        """
        import torch

        accelerator, versions, clocks = "", {}, dict[str, str]()
        if torch.cuda.is_available():
            first = torch.device(self.name)
            numbers = range(1, 1 if ":" in self.name else torch.cuda.device_count())
            others = (torch.device("cuda", number) for number in numbers)
            accelerator = "; ".join(dict.fromkeys(map(_description, [first, *others])))
            if (library := nvml.library()) is not None:
                clocks = nvml.limits(str(torch.cuda.get_device_properties(first).uuid), library)
        if torch.version.cuda:
            versions = {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
        if torch.version.hip:
            versions = {"rocm": torch.version.hip}
        if accelerator:
            versions |= _versions()
            driver = re.search(r"(\d+\.\d+(?:\.\d+)?)", DRIVER.read_text()) if DRIVER.exists() else None
            versions |= {"nvidia driver": driver[1]} if driver else {}
        return Facts(
            accelerator=accelerator,
            versions=versions,
            flags={"cuda_allow_tf32": str(torch.backends.cuda.matmul.allow_tf32)},
            clocks=clocks,
            settings=SETTINGS,
        )

    def is_broken(self) -> bool:
        """Whether an error has corrupted the context.

        Source: https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html, errors that corrupt it.
        """
        import torch

        if self._is_refused or not torch.cuda.is_initialized():
            return False
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def settle(self) -> None:
        """Let SDPA choose a kernel: at its first choice on a Hopper GPU, torch puts cuDNN first for the process.

        Source: https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
        priority_order.
        """
        import torch

        if self._is_refused:
            return
        query = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=self.name)
        torch._fused_sdp_choice(query, query, query)  # noqa: SLF001 - a call would build cuDNN's plan, too

    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability as CUDA defines it; AMD's architectures have other numbers."""
        import torch

        has_one = torch.cuda.is_available() and torch.version.hip is None
        return torch.cuda.get_device_capability(self.name) if has_one else None

    @cached_property
    def _pool(self) -> Any:  # noqa: ANN401 - torch has a type for it
        """The memory of all graphs, which never run at the same time: each alone would keep its own scratch memory."""
        import torch

        return torch.cuda.graph_pool_handle()

    def captured(self, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Record on a stream of its own; everything that `make` queues goes there, so that autograd stays on it.

        A result is right until another graph is replayed: graphs share their memory.
        """
        import torch

        with torch.cuda.device(torch.device(self.name)):
            stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            self.synchronize()
            with torch.cuda.stream(stream):
                call = make()
                for _ in range(NUM_WARM_UPS):
                    call()
            self.synchronize()
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=stream):
                    kept = call()
            except Exception as error:
                first = error.__context__ or error  # ending a failed recording raises once more
                said = (str(first).splitlines() or [""])[0]
                raise CaptureError(f"it cannot be recorded as a CUDA graph: {type(first).__name__}: {said}") from error

        def replay() -> T:
            graph.replay()
            return kept

        return replay

    @cached_property
    def _handle(self) -> tuple[Any, Any] | None:
        """The module pynvml and its handle of this device, or None."""
        import torch

        library = nvml.library()
        uuid = torch.cuda.get_device_properties(torch.device(self.name)).uuid
        handle = None if library is None else nvml.handle(str(uuid), library)
        return None if handle is None else (library, handle)

    def state(self) -> DeviceState | None:
        """Read the state by NVML, in some ten microseconds; the clock is that of the spins since the last reading."""
        found = DeviceState() if self._handle is None else nvml.moment(*self._handle)
        if clock_hz := self.clock.clock_hz():
            found = structs.replace(found, clock_mhz=clock_hz / 1e6)
        return None if found == DeviceState() else found

    def cache_bytes(self) -> int:
        """Bytes of the second-level cache."""
        import torch

        size: int = torch.cuda.get_device_properties(self.name).L2_cache_size
        return size

    def outside_bytes(self) -> int:
        """Bytes held by the context, kernel code, libraries and other processes."""
        import torch

        self.synchronize()
        free, whole = self._free_and_whole()
        return whole - free - torch.cuda.memory_reserved(self.name)


DEVICE = Cuda


def _description(device: torch.device) -> str:
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = f"compute capability {properties.major}.{properties.minor}"
    return f"{properties.name}, {properties.total_memory} bytes, {capability}"


def _versions() -> dict[str, str]:
    """Versions of the installed kernel packages; imports none."""
    found = {}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
