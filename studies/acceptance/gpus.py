"""The first CUDA device, with the methods that the tests G1 to G5 of on_cuda.py need.

The class in studies/simulated/gpu.py has the same methods. A call returns when its work is queued, as torch's calls do.
"""

import time
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from attnbench.devices import device
from attnbench.storage.records import DeviceState

Call = Callable[[], object]

DEVICE = "cuda"
SPIN_CYCLES = 1_000_000
BYTES_PER_S = {"A100": 2.039e12, "H100": 3.35e12, "H200": 4.8e12}
"""Memory bandwidth in bytes/s, by model. Source: the models' pages at https://www.nvidia.com/en-us/data-center/."""


class CudaGpu:
    """The first CUDA device."""

    def __init__(self) -> None:
        """Use the device's own clock."""
        self.clock = device(DEVICE).clock

    def calls(self) -> dict[str, Call]:
        """Return calls by name: matrix products, attention, and elementwise work of one and of three kernels."""
        found: dict[str, Call] = {}
        for size in (512, 2048, 4096):
            left, right = torch.randn(2, size, size, device=DEVICE, dtype=torch.bfloat16).unbind()
            found[f"matmul {size}"] = partial(torch.matmul, left, right)
        for length in (512, 1024, 4096):
            query, key, value = torch.randn(3, 2, 16, length, 128, device=DEVICE, dtype=torch.bfloat16).unbind()
            found[f"attention {length}"] = partial(functional.scaled_dot_product_attention, query, key, value)
        rows = torch.randn(2**13, 2**12, device=DEVICE)
        found["one kernel"] = lambda: rows + 1.0
        found["three kernels"] = lambda: torch.softmax(rows * 2.0, -1) + 1.0
        return found

    def fixed_work(self) -> Call:
        """Return a call that always does the same work: a matrix product."""
        return self.calls()["matmul 2048"]

    def short_work(self) -> Call:
        """Return a call of a few microseconds: an addition."""
        source = torch.ones(2**16, device=DEVICE)
        return lambda: source + 1

    def copy(self) -> tuple[Call, int]:
        """Return a call that copies a quarter of the cache's size, and the number of bytes that it reads and writes."""
        source = torch.ones(device(DEVICE).cache_bytes() // 4, dtype=torch.uint8, device=DEVICE)
        return partial(torch.empty_like(source).copy_, source), 2 * source.nbytes

    def flush(self) -> object:
        """Empty the caches with the device's own function."""
        return device(DEVICE).flush()

    def busy(self, seconds: float) -> Call:
        """Return a call that queues torch's spinning kernel, which then runs for `seconds`."""

        def spin(cycles: int) -> None:
            torch.cuda._sleep(cycles)  # noqa: SLF001 - as in attnbench.devices.cuda

        cycles = int(SPIN_CYCLES * seconds / self.clock.elapsed(lambda: spin(SPIN_CYCLES), 1))
        return lambda: spin(cycles)

    def kernel_seconds(self, call: Call, num_calls: int) -> float:
        """Make `num_calls` calls; return their seconds in kernels on all streams, as torch's profiler reports them."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(num_calls):
                call()
            torch.cuda.synchronize()
        return sum(float(event.self_device_time_total) for event in seen.key_averages()) * 1e-6

    def num_kernels(self, call: Call) -> int:
        """Count the kernels in the device's recording of a call."""
        return len(device(DEVICE).record(call).kernels())

    def captured(self, call: Call) -> Call:
        """Record the call as a CUDA graph with the device's own function, and return a call that replays the graph."""
        return device(DEVICE).captured(lambda: call)

    def state(self) -> DeviceState:
        """Read the device's clock frequency, temperature, power and reasons for a reduced clock; 0 if unknown.

        The frequency is measured by the spinning kernels since the last call; without any, it is the driver's value.
        """
        return device(DEVICE).state() or DeviceState()

    def heat(self, seconds: float) -> None:
        """Heat the device: run large matrix products for `seconds`."""
        matrix, end = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16), time.perf_counter() + seconds
        while time.perf_counter() < end:
            matrix @ matrix
            torch.cuda.synchronize()

    def interference_probe(self) -> Call:
        """Return the device's own interference probe: fixed work that takes longer while others use the device."""
        return device(DEVICE).interference_probe()

    def peak_bytes_per_s(self) -> float | None:
        """Return the memory's peak bandwidth from its clock and width, else from BYTES_PER_S; None if unknown."""
        found = torch.cuda.get_device_properties(DEVICE)
        clock_khz, width = getattr(found, "memory_clock_rate", 0), getattr(found, "memory_bus_width", 0)
        if clock_khz and width:
            return float(2 * clock_khz * 1e3 * width / 8)
        return next((rate for name, rate in BYTES_PER_S.items() if name in found.name), None)
