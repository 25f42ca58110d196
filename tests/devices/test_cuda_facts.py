"""Facts about a CUDA device, with torch's compiled part replaced; and the way of its flags to a reader."""

import gc
import sys
from functools import partial
from types import SimpleNamespace
from unittest.mock import MagicMock
from weakref import ref

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.analysis.sanity import ON_A_QUEUE, flag_impossible_times, slowdown_warnings, warnings_of
from attnbench.devices import CaptureError, accelerators, cuda, device, environment, nvml
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import LATENCY, LIMITS, DeviceState, Flag, Measurement, Operators, Record, Sample, Status
from attnbench.workloads.workload import Workload
from tests.signatures import snapshots


class Calls(TorchDispatchMode):
    """Keeps the operators that are called inside the context, by name with their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def gpus(monkeypatch) -> MagicMock:
    """Two GPUs in place of torch.cuda, which keep what is called."""

    def properties(at):
        index = torch.device(at).index or 0
        return SimpleNamespace(name=f"GPU {index}", uuid=str(index), major=9, minor=0, total_memory=8)

    module = MagicMock()
    module.is_available.return_value, module.device_count.return_value = True, 2
    module.get_device_properties.side_effect = properties
    module.get_device_capability.return_value = 9, 0  # cuDNN asks, if torch was built with it
    monkeypatch.setattr(torch, "cuda", module)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(cuda, "version", {"triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(cuda, "PACKAGES", ("triton",))
    return module


def called(gpus: MagicMock) -> list[str]:
    return [name for name, _, _ in gpus.mock_calls]


def test_a_device_that_lets_no_further_process_in_is_missing(gpus):
    """In the compute mode EXCLUSIVE_PROCESS the second process once crashed, and its implementation was blamed."""
    here = cuda.Cuda("cuda:0")
    messages = "CUDA error: invalid device ordinal", f"CUDA error: devices are {cuda.BUSY}"
    gpus.set_device.side_effect = map(RuntimeError, messages)
    gpus.synchronize.side_effect = RuntimeError
    with pytest.raises(RuntimeError, match="ordinal"):
        here.select()
    assert here.missing() is None
    here.select()
    assert "EXCLUSIVE_PROCESS" in here.missing()
    here.apply_first_use_changes()  # does nothing
    assert not here.is_broken()


def test_two_kinds_of_devices_are_both_named_and_two_of_one_kind_once(gpus):
    """The environment of a run on cuda:1 once named device 0 alone.

    Every worker reads these facts. They make no context: studies/gpu/contexts.py shows that torch makes none for them.
    """
    kinds = "GPU 0, 8 bytes, compute capability 9.0; GPU 1, 8 bytes, compute capability 9.0"
    assert device("cuda").facts().accelerator == kinds
    assert device("cuda:1").facts().accelerator == kinds.partition("; ")[2]
    assert device("cuda").facts().versions["triton"] == "3.6.0"
    gpus.get_device_properties.side_effect = lambda _: SimpleNamespace(
        name="GPU", uuid="", major=9, minor=0, total_memory=8
    )
    assert device("cuda").facts().accelerator == "GPU, 8 bytes, compute capability 9.0"
    assert {*called(gpus)} - {"get_device_capability"} == {"is_available", "device_count", "get_device_properties"}


def test_settings_of_packages_are_recorded_by_their_prefix_and_a_path_is_not(monkeypatch):
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    monkeypatch.setenv("NCCL_TOPO_FILE", "/home/someone/topology.xml")
    monkeypatch.setenv("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")
    monkeypatch.setenv("NVTEXT", "1")
    found = environment.collect().settings
    assert found["NVTE_FLASH_ATTN"] == found["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"
    assert found["NCCL_TOPO_FILE"] == "(a path)"
    assert "NVTEXT" not in found


VALUES = {
    "nvmlInit": None,
    "nvmlDeviceGetHandleByUUID": lambda uuid: uuid,
    "nvmlDeviceGetMaxClockInfo": lambda **given: 1000 * given["type"],
    "nvmlDeviceGetClockInfo": lambda **given: 1500 + int(given["handle"][-1]),
    "nvmlDeviceGetEnforcedPowerLimit": 700_000,
    "nvmlDeviceGetPowerUsage": 650_400,
    "nvmlDeviceGetTemperature": 41,
    "nvmlDeviceGetTotalEnergyConsumption": 1_234_500,
    "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
    "nvmlDeviceGetCurrentClocksEventReasons": 4,
    "nvmlDeviceGetEccMode": (1, 1),
}
"""Answers of a GPU without MIG."""
NVML_VERSIONS = sorted({each.version for each in snapshots() if each.package == "pynvml"})


def pynvml_of(version: str) -> SimpleNamespace:
    """Build a module with the functions of this release, each with its parameters."""

    class NVMLError(Exception):
        """The module's error type."""

    def answer(name: str):
        def compute(**given: object) -> object:
            found = VALUES.get(name, NVMLError())
            found = found(**given) if callable(found) else found
            if isinstance(found, Exception):
                raise found
            return found

        return compute

    names = [each for each in snapshots() if each.package == "pynvml" and each.version == version]
    functions = {each.name.partition(".")[2]: each.stand_in(answer(each.name.partition(".")[2])) for each in names}
    return SimpleNamespace(NVMLError=NVMLError, **functions)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("version", NVML_VERSIONS)
def test_the_driver_describes_the_same_device_and_its_gaps_are_left_out(version, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", pynvml_of(version))
    assert device("cuda:1").facts().clocks == {
        "gpu power limit": "700 W",
        "gpu ECC": "on",
    }
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert device("cuda:1").facts().clocks == {}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_gpu_with_another_limit_is_another_machine_and_a_processor_is_as_before(limit):
    """A run at 400 W was once compared with one at 700 W as though nothing had changed."""
    plain = environment.collect()
    there = msgspec.structs.replace(plain, clocks=dict.fromkeys(LIMITS, "on") | {"gpu SM clock": "1500 MHz"})
    other = msgspec.structs.replace(there, clocks=there.clocks | {limit: "off"})
    warmer = msgspec.structs.replace(
        there, clocks=there.clocks | {"gpu SM clock": "1200 MHz", "gpu temperature": "80 C"}
    )
    assert len({plain.fingerprint, there.fingerprint, other.fingerprint}) == 3
    assert there.machine_fingerprint != other.machine_fingerprint
    assert warmer.fingerprint == there.fingerprint
    assert "limits" not in plain.must_match()


def test_a_flush_ends_with_a_read_of_what_it_did_not_write(monkeypatch):
    """Lines that a flush has written must be written back, once during the timed call."""
    monkeypatch.setattr(cuda.Cuda, "cache_bytes", lambda _: 2**12)
    here = cuda.Cuda("cpu")
    written, read = here._beyond_caches
    with Calls() as seen:
        here.flush()
    done = [(name, arguments[0].data_ptr()) for name, arguments in seen.calls]
    assert done == [("add_", written.data_ptr()), ("sum", read.data_ptr())]
    assert written.nbytes == read.nbytes == 2 * 2**12


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("version", NVML_VERSIONS)
def test_a_state_comes_from_the_driver_and_its_clock_from_the_blocks(version, monkeypatch):
    """NVML once read the clock between two visits, while the device idled."""
    module = pynvml_of(version)
    monkeypatch.setitem(sys.modules, "pynvml", module)
    here = cuda.Cuda("cuda:1")
    assert here.state() == DeviceState(clock_mhz=1501, temperature_c=41, power_w=650.4, slowed_by=4)
    with monkeypatch.context() as patch:
        patch.setattr(here.clock, "clock_hz", lambda: 1.2e9)
        assert here.state() == DeviceState(clock_mhz=1200, temperature_c=41, power_w=650.4, slowed_by=4)
    monkeypatch.setitem(VALUES, "nvmlDeviceGetPowerUsage", module.NVMLError())
    assert here.state() == DeviceState(clock_mhz=1501, temperature_c=41, slowed_by=4)
    monkeypatch.setitem(VALUES, "nvmlDeviceGetCurrentClocksEventReasons", module.NVMLError())  # as of an older driver
    assert here.state().slowed_by == 4
    assert here.energy_j() == 1234.5
    monkeypatch.setitem(sys.modules, "pynvml", None)
    here = cuda.Cuda("cuda:1")
    assert here.state() is None
    assert here.energy_j() is None
    monkeypatch.setattr(here.clock, "clock_hz", lambda: 1.2e9)
    assert here.state() == DeviceState(clock_mhz=1200.0)
    assert device("cpu").state() is None


def test_a_part_of_a_gpu_is_found_by_its_own_kind_of_uuid(monkeypatch):
    module = pynvml_of(NVML_VERSIONS[-1])
    monkeypatch.setitem(sys.modules, "pynvml", module)
    monkeypatch.setitem(
        VALUES, "nvmlDeviceGetHandleByUUID", lambda uuid: uuid if uuid == "MIG-7" else module.NVMLError()
    )
    assert nvml.find("7") == (module, "MIG-7")
    assert nvml.find("8") == (module, None)


def visit_of(*clocks: float, slowed_by: int = 0) -> tuple[DeviceState, ...]:
    return tuple(DeviceState(clock_mhz=each, slowed_by=slowed_by) for each in clocks)


@pytest.mark.parametrize(
    ("visits", "said"),
    [
        # It is idle, too, and both kinds of thermal slowdown have one name.
        ([visit_of(1980, 1900, 1742, 1800, slowed_by=0x65)] * 3, ["12% within the visit: power cap, thermal slowdown"]),
        ([visit_of(1980, 1782, slowed_by=0x3)] * 3, ["10% within the visit: the driver gives no reason"]),
        ([visit_of(1980, 1742, slowed_by=4), *[visit_of(1980, 1975)] * 3], []),  # once
        ([visit_of(1400, 1700, 1980)] * 3, []),  # it rises
        ([visit_of(1980, 0.0, 1980)] * 3, []),  # one reading failed
        ([visit_of(1410, 1405, slowed_by=0x60)] * 3, []),
        ([visit_of(1980, 1975, slowed_by=0x3)] * 3, []),  # idle, or set by a user
        ([], []),
    ],
)
def test_a_clock_that_falls_or_is_held_is_a_doubt(visits, said):
    texts = [each.replace("\N{NO-BREAK SPACE}", " ").replace(" %", "%") for each in slowdown_warnings(visits)]
    assert [text.removeprefix("the clock fell ") for text in texts] == said


def test_memory_outside_is_neither_free_nor_of_torchs_allocator(gpus):
    gpus.mem_get_info.return_value, gpus.memory_reserved.return_value = (700, 1000), 250
    assert (device("cuda").outside_bytes(), device("cpu").outside_bytes()) == (50, 0)


def test_the_interference_probe_works_on_numbers_that_differ(monkeypatch):
    """Equal numbers take less power, and so less time."""
    multiplied: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "matmul", lambda left, right, out: multiplied.extend((left, right)))
    probe = cuda.Cuda("cpu").interference_probe()  # torch puts its tensors on the processor
    with Calls() as seen:
        probe()
    copied = [arguments[1] for name, arguments in seen.calls if name == "copy_"]
    assert [each.numel() for each in copied] == [2**22]
    assert all(each.std() > 0.9 for each in (*multiplied, *copied))


def test_of_the_largest_copy_hardly_anything_can_stay_in_the_cache(monkeypatch):
    """It once had four times the cache's size, so that a quarter could come from the cache."""
    cache_of_h200 = 60 * 2**20
    monkeypatch.setattr(cuda.Cuda, "cache_bytes", lambda _: cache_of_h200)
    monkeypatch.setattr(accelerators, "products_and_copies", lambda *given: given[-1])
    assert device("cuda").loads("bfloat16") > 15 * cache_of_h200  # each byte is read once and written once


def record(*flags: int, time_s: float = 1e-5, operators: Operators | None = None) -> Record:
    samples = tuple(Sample(time_s, visit=number, flags=flag) for number, flag in enumerate(flags))
    latency = Measurement(metric=LATENCY, unit="s", samples=samples)
    place = {"run": "r", "time": "", "commit": "", "environment": None, "status": Status.ok, "workload": Workload()}
    return Record(**place, implementation="it", operators=operators, measurements=(latency,))


def warnings_about(cell: Record) -> list[str]:
    return list(warnings_of(cell, median_estimate(cell.samples(LATENCY))))


@pytest.mark.parametrize("flag", [Flag.host_bound, Flag.host_near, Flag.not_hidden, Flag.waits])
def test_a_flag_of_most_samples_is_a_warning_of_the_cell_and_one_of_a_few_is_none(flag):
    assert ON_A_QUEUE[flag] in warnings_about(record(flag, flag, flag, 0))
    assert ON_A_QUEUE[flag] not in warnings_about(record(flag, 0, 0, 0))


def test_a_cell_that_leaves_work_on_another_stream_has_no_time():
    (bad,), _ = flag_impossible_times([record(*[Flag.other_stream] * 4)], {}, is_cold=False)
    assert (bad.status, bad.measurements) == (Status.invalid, ())
    assert "work on another stream" in bad.message
    (good,), _ = flag_impossible_times([record(Flag.other_stream, 0, 0, 0)], {}, is_cold=False)
    assert good.status is Status.ok


@pytest.mark.parametrize(("kernel_s", "is_doubted"), [(0.0, False), (80e-6, False), (105e-6, False), (120e-6, True)])
def test_a_call_that_is_shorter_than_its_kernels_is_doubted(kernel_s, is_doubted):
    warnings = warnings_about(record(0, 0, time_s=100e-6, operators=Operators(calls=(), kernel_s=kernel_s)))
    assert is_doubted is any("part may be untimed" in each for each in warnings)


def test_a_graph_is_recorded_on_the_stream_of_its_warm_ups(gpus):
    gpus.make.return_value = gpus.call
    gpus.call.side_effect = range(10)
    replay = cuda.Cuda("cuda").captured(gpus.make)
    side = gpus.Stream.return_value
    assert called(gpus) == [
        *("device", "device().__enter__", "Stream", "CUDAGraph", "synchronize"),
        *("stream", "stream().__enter__", "make", *["call"] * cuda.NUM_WARM_UPS, "stream().__exit__", "synchronize"),
        *("graph_pool_handle", "graph", "graph().__enter__", "call", "graph().__exit__", "device().__exit__"),
    ]
    assert gpus.stream.call_args.args == (side,)
    assert gpus.graph.call_args.kwargs["stream"] is side
    assert replay() == replay() == cuda.NUM_WARM_UPS
    assert called(gpus)[-2:] == ["CUDAGraph().replay"] * 2


def test_kept_tensors_live_as_long_as_the_graph_of_the_backward_pass(gpus):
    """Once it was freed, and on an H100 the graph of an honest backward pass computed something else than the call."""
    kept = torch.ones(3)
    held = ref(kept)
    replay = cuda.Cuda("cuda").captured(partial(partial, len, kept))
    del kept
    gc.collect()
    assert held() is not None
    del replay
    gc.collect()
    assert held() is None


def test_an_unrecordable_graph_names_the_first_fault_of_the_call(gpus):
    """A failed recording raises again at its end."""
    failure = RuntimeError("operation not permitted when stream is capturing\nand more")
    gpus.call.side_effect = [*range(cuda.NUM_WARM_UPS), failure]
    gpus.graph.return_value.__exit__.side_effect = RuntimeError("operation failed due to a previous error")
    with pytest.raises(
        CaptureError, match=r"CUDA graph: RuntimeError: operation not permitted when stream is capturing$"
    ):
        cuda.Cuda("cuda").captured(lambda: gpus.call)


def test_graphs_share_one_pool_of_memory(gpus):
    here = cuda.Cuda("cuda")
    gpus.graph_pool_handle.side_effect = range(10)
    for _ in range(2):
        here.captured(gpus.make)
    assert [each.kwargs["pool"] for each in gpus.graph.call_args_list] == [0, 0]
