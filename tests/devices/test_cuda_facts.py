"""What a CUDA device says of itself, with torch's compiled part replaced; how its flags reach a reader."""

import sys
from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from attnbench.analysis.sanity import ELSEWHERE, ON_A_QUEUE, judged, warnings_of
from attnbench.devices import cuda, described, device, environment, loads
from attnbench.devices.loads import Load
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import LATENCY, LIMITS, Flag, Measurement, Record, Sample, Status
from attnbench.workloads.workload import Workload
from studies.acceptance.__main__ import FOLDERS, Part, folder_of


@pytest.fixture
def two_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def properties(at):
        index = torch.device(at).index or 0
        return SimpleNamespace(name=f"GPU {index}", uuid=str(index), major=9, minor=0, total_memory=8)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(cuda, "version", {"triton": "3.6.0"}.__getitem__)
    monkeypatch.setattr(cuda, "PACKAGES", ("triton",))


@pytest.mark.usefixtures("two_devices")
def test_each_device_names_itself_and_the_packages_of_kernels():
    """At first the facts of cuda:1 named device 0."""
    names = [device(name).facts().accelerator.partition(",")[0] for name in ("cuda", "cuda:0", "cuda:1")]
    assert names == ["GPU 0", "GPU 0", "GPU 1"]
    assert device("cuda").facts().versions["triton"] == "3.6.0"


class Nvml:
    """What there is of pynvml that is asked; this GPU has no MIG."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class NVMLError(Exception):
        """Its own error."""

    nvmlInit = staticmethod(lambda: None)  # noqa: N815 - its names
    nvmlDeviceGetHandleByUUID = staticmethod(lambda uuid: uuid)  # noqa: N815
    nvmlDeviceGetMaxClockInfo = staticmethod(lambda _, kind: 1000 * kind)  # noqa: N815
    nvmlDeviceGetClockInfo = staticmethod(lambda handle, _: 1500 + int(handle[-1]))  # noqa: N815
    nvmlDeviceGetEnforcedPowerLimit = staticmethod(lambda _: 700_000)  # noqa: N815
    nvmlDeviceGetTemperature = staticmethod(lambda *_: 41)  # noqa: N815
    nvmlDeviceGetCurrentClocksThrottleReasons = staticmethod(lambda _: 4)  # noqa: N815
    nvmlDeviceGetEccMode = staticmethod(lambda _: (1, 1))  # noqa: N815

    def nvmlDeviceGetMigMode(self, _: str) -> None:  # noqa: N802
        """Not here."""
        raise self.NVMLError


@pytest.mark.usefixtures("two_devices")
def test_what_the_driver_says_is_of_the_same_device_and_what_it_does_not_say_is_left_out(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    assert device("cuda:1").facts().clocks == {
        "gpu SM clock limit": "1000 MHz",
        "gpu memory clock limit": "2000 MHz",
        "gpu SM clock": "1501 MHz",
        "gpu power limit": "700 W",
        "gpu temperature": "41 C",
        "gpu throttle reasons": "0x4",
        "gpu ECC": "on",
    }
    monkeypatch.setitem(sys.modules, "pynvml", None)  # an import of it fails
    assert device("cuda:1").facts().clocks == {}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_gpu_with_another_limit_is_another_machine_and_a_processor_is_as_before(limit):
    """At first a run at 400 W was compared with one at 700 W as though nothing had changed."""
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


def test_what_can_still_be_given_is_read_when_torch_has_given_back_its_cache(monkeypatch):
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (len(done), 8))
    assert device("cuda").free_bytes() == 1


def test_the_interference_probe_multiplies_numbers_that_differ(monkeypatch):
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(torch, "matmul", lambda left, right, out: seen.extend((left, right)))
    on_host = cuda.Cuda("cpu")  # torch puts its tensors on the processor
    on_host.interference_probe()()
    assert all(each.std() > 0.9 for each in seen)


def test_the_interference_probe_copies_numbers_that_differ():
    """Equal numbers take less power, and so less time."""
    copied: list[torch.Tensor] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.copy_.default:
                copied.append(args[1])
            return func(*args, **(kwargs or {}))

    probe = cuda.Cuda("cpu").interference_probe()
    with Seen():
        probe()
    assert [each.numel() for each in copied] == [2**22]
    assert all(each.std() > 0.9 for each in copied)


@pytest.mark.parametrize("sheet", described.names())
def test_of_the_largest_copy_hardly_anything_can_stay_in_the_cache(sheet, monkeypatch):
    """At first it was four times the cache's size, a quarter of which may have come from the cache."""
    cache_bytes = described.load(sheet).cache_bytes
    made: list[Load] = []

    def on_meta(empty, dtypes, *sizes):
        made.extend(loads.products_and_copies(lambda dtype, n: torch.empty(n, device="meta"), [], *sizes))
        return made

    monkeypatch.setattr(cuda, "cache_bytes", lambda _: cache_bytes)
    monkeypatch.setattr(cuda, "products_and_copies", on_meta)
    device("cuda").loads("bfloat16")
    largest = made[-1]
    assert largest.size == max(each.size for each in made) == 2**30
    assert largest.amount == 2 * 2**30  # read once and written once
    assert cache_bytes < largest.amount / 30


def test_two_accelerators_never_share_a_table():
    folders = {folder_of(Part.method, name) for name in ("", "NVIDIA H200, 1 bytes", "NVIDIA A100-SXM4-80GB, 2 bytes")}
    assert {folder.name for folder in folders} == {
        "acceptance",
        "acceptance-on-nvidia-h200",
        "acceptance-on-nvidia-a100-sxm4-80gb",
    }
    assert folder_of(Part.method, "") == FOLDERS[Part.method]


def record(*flags: int) -> Record:
    samples = tuple(Sample(1e-5, visit=number, flags=flag) for number, flag in enumerate(flags))
    return Record(
        run="r",
        time="",
        commit="",
        workload=Workload(),
        implementation="it",
        environment=None,
        status=Status.ok,
        measurements=(Measurement(metric=LATENCY, unit="s", samples=samples),),
    )


@pytest.mark.parametrize("flag", [Flag.host_bound, Flag.not_hidden, Flag.waits])
def test_a_flag_of_most_samples_is_a_warning_of_the_cell_and_one_of_a_few_is_none(flag):
    for flags, is_warned in (((flag,) * 3 + (0,), True), ((flag, 0, 0, 0), False)):
        cell = record(*flags)
        time = median_estimate(cell.samples(LATENCY))
        assert (ON_A_QUEUE[flag] in list(warnings_of(cell, time))) is is_warned


def test_a_cell_that_leaves_work_on_another_stream_has_no_time():
    (bad,), _ = judged([record(*[Flag.other_stream] * 4)], {}, is_cold=False)
    assert (bad.status, bad.message, bad.measurements) == (Status.invalid, ELSEWHERE, ())
    (good,), _ = judged([record(Flag.other_stream, 0, 0, 0)], {}, is_cold=False)
    assert good.status is Status.ok


def test_a_sample_of_an_older_journal_has_neither_host_time_nor_flags():
    old = msgspec.json.decode(b"[1e-3,4,0,1,2,3,5.0,6,0.5]", type=Sample)
    assert (old.load, old.host_s, old.flags) == (0.5, 0.0, 0)
