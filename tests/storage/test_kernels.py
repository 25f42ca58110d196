"""Kernels are attributed by name, and their time is counted for any launcher.

tests/data/profiles/kernels.json has events in the form of torch's profiler: the device, the name, start and end in
nanoseconds, the correlation id, and that of the operator that launched it. The names are those of the sources.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch._C._autograd import DeviceType

from attnbench.analysis.breakdown import backend_used, operator_shares
from attnbench.devices.kernels import observed
from attnbench.devices.recording import Recording, busy_s
from attnbench.storage.records import Operators

PROFILES = json.loads((Path(__file__).parents[1] / "data/profiles/kernels.json").read_text(encoding="utf-8"))


def event(place: str, name: str, start: int, end: int, correlation: int, linked: int) -> SimpleNamespace:
    """Build an event with the profiler's methods that the harness calls."""
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: DeviceType.CPU if place == "CPU" else DeviceType.CUDA,
        is_user_annotation=lambda: place.endswith("annotation"),
        start_ns=lambda: start,
        end_ns=lambda: end,
        start_thread_id=lambda: 1,
        correlation_id=lambda: correlation,
        linked_correlation_id=lambda: linked,
    )


def seen(name: str, requested: str = "") -> Operators:
    calls = Recording(events=[event(*each) for each in PROFILES[name]], result={}).operators()
    return Operators(calls=calls, observed=observed(calls), requested=requested)


RAN = {
    "flash of PyTorch's own": ("flash", "flash", 8e-6),
    "FlashAttention 3 registered for flash": ("flash", "flash (FlashAttention 3)", 6e-6),
    "FlashAttention 4 registered for flash": ("flash", "flash (FlashAttention 4)", 5e-6),
    "flash that ran the efficient kernel": ("efficient", "efficient", 8e-6),
    "efficient": ("efficient", "efficient", 8e-6),
    "cuDNN": ("cudnn", "cudnn", 4e-6),
    "flash-attn 2, outside any operator, and a copy inside one": ("", "FlashAttention 2", 9e-6),
    "a kernel of Triton's, launched twice, and a range that somebody named": ("", "flash_fwd_tile", 5e-6),
    "FlexAttention, compiled": ("", "compiled: Triton", 4e-6),
    "an autograd function of a package": ("", "FlashAttention 2", 4e-6),
}


@pytest.mark.parametrize("name", PROFILES)
def test_what_ran_and_how_long_is_read_from_kernels(name: str) -> None:
    backend, text, seconds = RAN[name]
    found = seen(name)
    assert (found.observed, backend_used(found)) == (backend, text)
    assert sum(one.self_s for one in found.calls) == pytest.approx(seconds)


def test_an_operator_whose_kernels_are_of_another_backend_is_a_fallback() -> None:
    assert "efficient ran" in seen("flash that ran the efficient kernel", "flash").fallback
    assert not seen("flash of PyTorch's own", "flash").fallback


def test_kernels_outside_any_operator_have_a_count_and_a_share() -> None:
    found = seen("flash-attn 2, outside any operator, and a copy inside one")
    assert operator_shares(found) == "89 % flash_fwd_kernel (8.00 us, 1 call), 11 % copy (1.00 us, 1 call)"
    twice = seen("a kernel of Triton's, launched twice, and a range that somebody named").calls
    assert [(one.name, one.num_calls) for one in twice] == [("flash_fwd_tile", 2)]


def test_kernels_at_the_same_time_count_once() -> None:
    events = [
        event("CUDA", "main", 0, 100_000, 1, 0),
        event("CUDA", "void copy_kernel(float*)", 50_000, 120_000, 2, 0),
        event("CUDA", "main", 200_000, 300_000, 3, 0),
    ]
    kernels = Recording(events=events, result={}).kernels()
    assert busy_s(kernels) == pytest.approx(220e-6)
    assert busy_s([]) == 0.0


def test_a_kernel_belongs_to_its_operator_despite_equal_ids_of_driver_calls() -> None:
    events = [
        event("CPU", "cudaMalloc", 0, 1_000, 1, 0),
        event("CPU", "aten::mm", 1_000, 5_000, 1, 0),
        event("CPU", "cudaLaunchKernel", 2_000, 3_000, 2, 1),
        event("CPU", "aten::softmax", 5_000, 9_000, 2, 0),
        event("CPU", "cudaLaunchKernel", 6_000, 7_000, 1, 2),
        event("CUDA", "gemm", 10_000, 12_000, 2, 1),
        event("CUDA", "softmax_forward", 12_000, 15_000, 1, 2),
        event("CUDA", "of Triton", 15_000, 16_000, 3, 0),
    ]
    recording = Recording(events=events, result={})
    launched = [(each.name, each.operator) for each in recording.kernels()]
    assert launched == [("gemm", "aten::mm"), ("softmax_forward", "aten::softmax"), ("of Triton", "")]
    assert {each.name for each in recording.operators()} == {"aten::mm", "aten::softmax", "of Triton"}


def test_a_compiled_graph_has_one_name_in_every_process_and_nested_time_counts_once() -> None:
    call = "## Call CompiledFxGraph fl67zm3rgfvszvvn6ppwvyn2boux6keg2szhlyncfjzfkoba3quq ##"
    events = [
        event("CPU", call, 0, 100, 1, 0),
        event("CPU", "Torch-Compiled Region: 1/0", 10, 40, 2, 0),
        event("CPU", call.replace("fl6", "aa7"), 120, 150, 3, 0),
    ]
    calls = Recording(events=events, result={}).operators()
    found = [(one.name, one.num_calls, round(1e9 * one.self_s)) for one in calls]
    assert found == [("CompiledFxGraph", 2, 100), ("Torch-Compiled Region", 1, 30)]
    assert backend_used(Operators(calls=calls)) == "compiled: generated kernels"
