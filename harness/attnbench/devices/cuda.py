"""CUDA devices: the only module that uses torch.cuda. Their clock is in devices/queued.py."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from attnbench.devices import CROWDED_SHARE, CaptureError, Device, Facts, T, nvml
from attnbench.devices.loads import Load, products_and_copies
from attnbench.devices.queued import QueuedClock, Runtime
from attnbench.devices.recording import Footprint, Recording, record

if TYPE_CHECKING:  # the description of a device needs no torch
    import torch
    from torch import Tensor

    from attnbench.storage.records import DeviceState

DRIVER = Path("/proc/driver/nvidia/version")
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
SIDES = (1024, 2048, 4096, 8192)
"""Side lengths of the matrices whose products show the ceiling."""
SMALLEST_COPY = 2**22
LARGEST_COPY = 2**30
"""Bytes of the largest copy: a second-level cache of 64 MiB can hold a thirtieth of its traffic."""
NUM_WARM_UPS = 3
"""Calls before a graph is recorded, so that it contains no compiling, loading and allocating. Source:
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs"""


class CudaRuntime(Runtime):
    """The calls of torch.cuda that the clock needs."""

    def __init__(self, device: str) -> None:
        """Use the current stream of `device`."""
        self.device = device

    def current(self) -> AbstractContextManager[object]:
        """Make the device the current one inside the context."""
        import torch

        return torch.cuda.device(torch.device(self.device))

    def event(self) -> Any:  # noqa: ANN401 - torch.cuda.Event, whose type needs torch
        """An event with timing."""
        import torch

        return torch.cuda.Event(enable_timing=True)

    def spin(self, cycles: int) -> None:
        """Queue torch's spinning kernel."""
        import torch

        torch.cuda._sleep(cycles)  # noqa: SLF001 - torch has no public spinning kernel

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        import torch

        torch.cuda.synchronize(self.device)

    def host_s(self) -> float:
        """The host's monotonic timer."""
        return perf_counter()


class Cuda(Device):
    """The current CUDA device `cuda`, or the device `cuda:N`."""

    is_host = False
    has_caching_allocator = True
    alignment_bytes = 16  # width of vector loads; misaligned ones destroy the context
    activities = ("CPU", "CUDA")  # the host, which launches, and the device
    has_graphs = True

    def __init__(self, name: str) -> None:
        self.name = self.torch_device = name
        self.clock = QueuedClock(CudaRuntime(name))

    def seems_present(self) -> bool:
        """Whether the driver is loaded."""
        return DRIVER.exists()

    def missing(self) -> str | None:
        """Report missing CUDA, or fewer devices than N."""
        import torch

        index = torch.device(self.name).index or 0
        is_here = torch.cuda.is_available() and index < torch.cuda.device_count()
        return None if is_here else f"this machine has no device {self.name}"

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
                clocks = nvml.state(str(torch.cuda.get_device_properties(first).uuid), library)
        if torch.version.cuda:
            versions = {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
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

        if not torch.cuda.is_initialized():
            return False
        try:
            self.synchronize()
        except RuntimeError:
            return True
        return False

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        import torch

        torch.cuda.synchronize(self.name)

    def settle(self) -> None:
        """Let SDPA choose a kernel: at its first choice on a Hopper GPU, torch puts cuDNN first for the process.

        Source: https://github.com/pytorch/pytorch/blob/v2.11.0/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
        priority_order.
        """
        import torch

        query = torch.zeros(1, 1, 8, 8, dtype=torch.float16, device=self.name)
        torch._fused_sdp_choice(query, query, query)  # noqa: SLF001 - a call would build cuDNN's plan, too

    collectives = "nccl"

    def compute_capability(self) -> tuple[int, int] | None:
        """Compute capability as CUDA defines it."""
        import torch

        return torch.cuda.get_device_capability(self.name) if torch.cuda.is_available() else None

    def number(self) -> int | None:
        """Number of devices that torch finds."""
        import torch

        return torch.cuda.device_count()

    def use(self, number: int) -> None:
        """Make the device with this number the current one."""
        import torch

        torch.cuda.set_device(number)

    def generators(self) -> Mapping[str, Any]:
        """One generator for each CUDA device."""
        import torch

        if not torch.cuda.is_initialized():
            return {}
        return {f"the generator of cuda:{n}": each for n, each in enumerate(torch.cuda.default_generators)}

    def record(self, call: Callable[[], object]) -> Recording:
        """Make one call under the profiler; memory is as the allocator counts it, with its cache empty beforehand."""
        import torch

        self.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.name)
        before, after = torch.cuda.memory_stats(self.name), {}

        def finish() -> None:
            self.synchronize()
            after.update(torch.cuda.memory_stats(self.name))

        return replace(record(call, self.activities, finish), allocated=allocated(before, after))

    def captured(self, make: Callable[[], Callable[[], T]]) -> Callable[[], T]:
        """Record on a stream of its own; everything that `make` queues goes there, so that autograd stays on it."""
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
                with torch.cuda.graph(graph, stream=stream):
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
        """Read the state by NVML; this takes some ten microseconds, and more for the power."""
        return None if self._handle is None else nvml.moment(*self._handle)

    def cache_bytes(self) -> int:
        """Bytes of the second-level cache."""
        return cache_bytes(self.name)

    @cached_property
    def _beyond_caches(self) -> Tensor:
        import torch

        return torch.empty(2 * cache_bytes(self.name), dtype=torch.uint8, device=self.name)

    def flush(self) -> object:
        """Write to a buffer of twice the second-level cache's size."""
        return self._beyond_caches.add_(1)

    def interference_probe(self, num_threads: int = 1) -> Callable[[], object]:  # noqa: ARG002 - it uses the whole device
        """A matrix product and a copy."""
        import torch

        draws = torch.Generator(device=self.name).manual_seed(0)  # equal numbers need less power, and so less time
        matrix = torch.randn(512, 512, device=self.name, generator=draws)
        source = torch.randn(2**22, device=self.name, generator=draws)
        product, target = torch.empty_like(matrix), torch.empty_like(source)

        def work() -> None:
            torch.matmul(matrix, matrix, out=product)
            target.copy_(source)

        return work

    def loads(self, dtype: str) -> list[Load]:
        """Products in the dtype, and copies beyond the second-level cache."""
        import torch

        def empty(dtype: str, length: int) -> Tensor:
            return torch.empty(length, dtype=getattr(torch, dtype), device=self.name)

        return products_and_copies(empty, [dtype], SIDES, SMALLEST_COPY, cache_bytes(self.name), LARGEST_COPY)

    def free_bytes(self) -> int:
        """Bytes of device memory available to any process, after torch has freed its cache."""
        import torch

        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(torch.device(self.name))[0]

    def outside_bytes(self) -> int:
        """Bytes held by the context, kernel code, libraries and other processes."""
        import torch

        self.synchronize()
        free, whole = torch.cuda.mem_get_info(torch.device(self.name))
        return whole - free - torch.cuda.memory_reserved(self.name)

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured."""
        import torch

        return torch.cuda.is_current_stream_capturing()

    def is_crowded(self) -> bool:
        """Whether this process's tensors hold more than a quarter of the device's memory."""
        import torch

        whole = torch.cuda.get_device_properties(self.name).total_memory
        return bool(torch.cuda.memory_allocated(self.name) > CROWDED_SHARE * whole)

    @contextmanager
    def capped(self, limit_bytes: int) -> Iterator[None]:
        """Limit the allocator to `limit_bytes` more than tensors hold now, inside the context."""
        import torch

        self.synchronize()
        torch.cuda.empty_cache()
        given: int | None = torch.device(self.name).index
        index = torch.cuda.current_device() if given is None else given  # the limit is set by index only
        whole = torch.cuda.get_device_properties(index).total_memory
        share = min(1.0, (torch.cuda.memory_reserved(index) + limit_bytes) / whole)
        torch.cuda.set_per_process_memory_fraction(share, index)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, index)


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


def cache_bytes(device: str) -> int:
    """Bytes of the device's largest cache."""
    import torch

    size: int = torch.cuda.get_device_properties(device).L2_cache_size
    return size


def allocated(before: Mapping[str, int], after: Mapping[str, int]) -> Footprint:
    """Memory between two readings of the allocator, with the peaks reset at the first."""
    inputs = before.get("allocated_bytes.all.current", 0)  # a reading is empty before the first allocation
    return Footprint(
        peak_bytes=after["allocated_bytes.all.peak"] - inputs,
        kept_bytes=after["allocated_bytes.all.current"] - inputs,
        num_allocations=after["allocation.all.allocated"] - before.get("allocation.all.allocated", 0),
        allocated_bytes=after["allocated_bytes.all.allocated"] - before.get("allocated_bytes.all.allocated", 0),
        reserved_bytes=after["reserved_bytes.all.peak"] - before.get("reserved_bytes.all.current", 0),
        unused_bytes=after["reserved_bytes.all.peak"] - after["allocated_bytes.all.peak"],
    )
