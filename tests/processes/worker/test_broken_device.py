"""A device that fails from one call on in a process: the cell that broke it is blamed, and no other is affected."""

import sys

import pytest

from attnbench.devices import device
from attnbench.processes.messages import Failed, Heartbeat, SampleBlocks
from attnbench.processes.worker.answers import Worker
from attnbench.storage.records import PROBE, Arm, Status
from attnbench.workloads.workload import Workload
from tests import elsewhere
from tests.checks import LIMIT_S, cell_of, checked

BROKEN = "cannot be used any more in its process"
DEVICE = '''
"""A device whose context is lost, in this process, as soon as somebody says so."""

from attnbench.devices.cpu import Cpu, CpuClock

LOST = []


def use():
    if LOST:
        raise RuntimeError("CUDA error: misaligned address")


class FragileClock(CpuClock):
    def elapsed(self, call, num_calls):
        use()
        elapsed = super().elapsed(call, num_calls)
        use()
        return elapsed


class Fragile(Cpu):
    alignment_bytes = 16

    def __init__(self, name):
        super().__init__(name)
        self.clock = FragileClock()

    def seems_present(self):
        return False

    def synchronize(self):
        use()

    def is_broken(self):
        return bool(LOST)


DEVICE = Fragile
'''
ATTEND = '''
import attnbench.devices.fragile as device

def right(query, key, value, *, mask=None):
    device.use()
    scores = query @ key.mT / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value

def breaking(query, key, value, *, mask=None):
    """Loses the context where rows have gaps, and says so then and ever after."""
    if query.stride(-2) not in (query.shape[-1], 1):
        device.LOST.append(1)
    return right(query, key, value, mask=mask)

def misaligned(query, key, value, *, mask=None):
    """Loses the context where tensors are not aligned, as a kernel does that loads 16 bytes at once."""
    for each in (query, key, value):
        places = [each.storage_offset(), *each.stride()[:-1]]
        if each.stride(-1) == 1 and any(place * each.itemsize % 16 for place in places):
            device.LOST.append(1)
            device.use()
    return right(query, key, value, mask=mask)

CALLS = []

def quiet(query, key, value, *, mask=None):
    """Loses it after its check, by what it has queued: the call itself returns."""
    made = right(query, key, value, mask=mask)
    CALLS.append(1)
    if len(CALLS) == 3:
        device.LOST.append(1)
    return made
'''


@pytest.fixture
def fragile(tmp_path):
    scope = {"__name__": "attnbench.devices.fragile"}
    exec(compile(DEVICE, "fragile.py", "exec"), scope)  # noqa: S102 - the file that the run below has
    with elsewhere.installed(scope["DEVICE"], "fragile"):
        for name in ("LOST", "use"):
            setattr(sys.modules["attnbench.devices.fragile"], name, scope[name])
        file = tmp_path / "attend.py"
        file.write_text(ATTEND, encoding="utf-8")
        yield file, scope["LOST"]


POINT = Workload(device="fragile", seq_len=40, num_heads=2, head_dim=8, direction="inference")


def test_who_breaks_the_device_in_a_check_has_an_error_and_no_wrong_answer(fragile):
    file, _ = fragile
    runner = Worker(Heartbeat())
    found = checked(cell_of(f"{file}:breaking", POINT), runner)
    assert isinstance(found, Failed)
    assert found.status is Status.error
    assert "misaligned address" in found.message
    assert BROKEN in found.message
    assert runner.is_broken


def test_what_breaks_it_after_an_answer_is_no_answer(fragile):
    file, _ = fragile
    worker = Worker(Heartbeat())
    assert not isinstance(worker.answer("prepare", cell=cell_of(f"{file}:right", POINT), limit_s=LIMIT_S), Failed)
    assert not worker.is_broken
    found = worker.answer("prepare", cell=cell_of(f"{file}:quiet", POINT, "quiet"), limit_s=LIMIT_S)
    assert isinstance(found, Failed)
    assert found.arm == Arm(implementation="quiet")
    assert worker.is_broken
    assert not device("cuda").is_broken()  # and it is tested if there is none


def test_of_a_visit_the_arm_is_blamed_whose_turn_it_was_and_not_the_next(fragile):
    file, _ = fragile
    worker = Worker(Heartbeat())
    worker.answer("prepare", cell=cell_of(f"{file}:right", POINT), limit_s=LIMIT_S)  # it sets the process up
    arms = tuple((Arm(implementation=name), f"{file}:{name}") for name in ("quiet", "right"))
    visit = SampleBlocks(workload=POINT, arms=(*arms, (PROBE, "")), epoch=0, number=0, num_blocks=4, seed=0)
    found = worker.answer("sample_blocks", visit=visit)
    assert isinstance(found, Failed)
    assert (found.arm, found.status) == (arms[0][0], Status.error)
    assert BROKEN in found.message
    assert worker.is_broken


def test_a_kernel_that_needs_aligned_inputs_gets_them(fragile):
    file, lost = fragile
    assert checked(cell_of(f"{file}:misaligned", POINT)).status is Status.ok
    assert not lost
