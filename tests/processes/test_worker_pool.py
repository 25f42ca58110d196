"""Separate runners for untrusted code: requests to each, the referee, and the blame."""

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace

import msgspec
import pytest

from attnbench.devices.waiting import longest_wait_s, waits
from attnbench.plugins import is_foreign
from attnbench.processes import messages, worker_pool
from attnbench.processes.messages import Failed, FailedError
from attnbench.processes.worker_pool import ByThreads, WorkerPool
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import BASE, CANDIDATE, PROBE, Arm, DeviceState, Sample, Status
from attnbench.timing.blocks import PROBE_SAMPLE_S
from attnbench.workloads.workload import Workload
from studies.simulated import virtual

OURS, THEIRS = Arm(implementation="sdpa"), Arm(implementation="theirs")
ARMS = ((THEIRS, "x.py:f"), (PROBE, ""), (OURS, "sdpa"))
VISIT = messages.SampleBlocks(
    workload=Workload(seq_len=64), arms=ARMS, epoch=0, number=0, num_blocks=4, seed=6, verifies=False
)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Scripted(AbstractContextManager):
    """A worker whose samples claim `claimed_s` for each call, but take `call_s`. `change` changes its answers."""

    def __init__(self, clock, claimed_s=1e-3, call_s=1e-3, wrong="", failing=None):
        self.clock, self.claimed_s, self.call_s, self.failing, self.wrong = clock, claimed_s, call_s, failing, wrong
        self.asked, self.layouts, self.siblings, self.is_running, self.processor_s = [], [], [], False, 0.0
        self.change = lambda _function, _arguments, answer: answer

    def sibling(self):
        return self.siblings.pop(0)

    def start(self, layout=0):
        self.is_running = True
        self.layouts.append(layout)
        return messages.Started(environment=virtual.ENVIRONMENT)

    def stop(self):
        self.is_running = False

    def __exit__(self, *_):
        self.stop()

    def of(self, function):
        """Return the arguments of each call of a function; of a visit the request itself."""
        calls = [arguments for name, arguments in self.asked if name == function]
        return [SimpleNamespace(**each) if "cell" in each else each["visit"] for each in calls]

    def spend(self, seconds):
        self.clock.now_s += seconds

    def ask(self, function, _result, /, **arguments):
        self.asked.append((function, arguments))
        return self.change(function, arguments, getattr(self, function)(**arguments))

    def sample_blocks(self, visit):
        if self.failing in dict(visit.arms):
            return Failed(arm=self.failing, status=Status.error, message="no")
        samples = {}
        for slot, (arm, _) in enumerate(visit.arms):
            one = Sample(PROBE_SAMPLE_S if arm == PROBE else self.claimed_s, slot=slot)
            one = one if arm == PROBE else msgspec.structs.replace(one, num_calls=10)
            samples[arm] = (one,) * visit.num_blocks
            self.spend(visit.num_blocks * (one.value if arm == PROBE else 10 * self.call_s))
        return visit.finished(samples, 1.0)

    def prepare_calls(self, num_calls, **_):
        self.num_calls = num_calls
        self.spend(1.0)

    def make_calls(self, **_):
        self.spend(self.call_s * self.num_calls)

    def hand_in(self, numbers, **_):
        assert all(0 <= number < self.num_calls for number in numbers)
        self.spend(1.0)
        return messages.HandedIn(exchange="", tensors={})

    def judge_output(self, cell, **_):
        return Failed(arm=cell.arm, status=Status.disagrees, message=self.wrong) if self.wrong else None


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(worker_pool, "IDLE_S", 1e-6)

    def made(wrong="", **theirs):
        clock = Clock()
        shared = Scripted(clock, wrong=wrong)
        shared.siblings = [Scripted(clock, **theirs)]
        made = WorkerPool({"": shared}, lambda arm: "theirs" if arm == THEIRS else "", clock=clock)
        made.theirs = shared.siblings[0]
        made.start(3)
        return made

    return made


def visited(client, times=3, **settings):
    """Take visits, up to the first failure; return the last reply."""
    for _ in range(times):
        reply = client.ask("sample_blocks", VisitFinished, visit=msgspec.structs.replace(VISIT, **settings))
        if isinstance(reply, Failed):
            break
    return reply


def test_runners_heat_the_device_before_the_blocks_and_never_between_samples(client):
    both = client()
    visited(both, 1, sustained_s=3.0)
    for each in (both.clients[""], both.theirs):
        visits = each.of("sample_blocks")
        assert [visit.sustained_s for visit in visits] == [3.0] + [0.0] * (len(visits) - 1)
        assert {visit.sample_s for visit in visits} == {worker_pool.TURN_S}


def test_a_visit_has_only_as_many_blocks_as_its_limit_allows(client):
    """A block of both runners lasts 20 ms."""
    assert {len(taken.samples) for taken in visited(client(), 1, longest_s=0.05).arms} == {2}


def test_each_runner_takes_its_part_of_a_block_after_untimed_calls(client):
    both = client()
    reply = visited(both, 1)
    theirs, ours = {THEIRS}, {OURS}
    assert {taken.arm for taken in reply.arms} == theirs | ours | {PROBE}
    assert all(len(taken.samples) == 4 for taken in reply.arms)
    for block in range(4):
        slots = [s.slot for taken in reply.arms for s in taken.samples if s.block == block]
        assert len(set(slots)) == len(slots)
    for one, own in ((both.theirs, theirs), (both.clients[""], ours)):
        sampled = [each for each in one.of("sample_blocks") if each.num_blocks and each.known]
        assert [{arm for arm, _ in each.arms} for each in sampled] == 4 * [own | {PROBE}]
        assert all(each.settles for each in sampled)
    assert not any(THEIRS in dict(each.arms) for each in both.clients[""].of("sample_blocks"))


def test_all_runners_of_a_visit_choose_from_the_same_times_of_all_arms(client):
    """A first block measures unknown times, and is no part of the visit."""
    both = client(claimed_s=30e-3, call_s=30e-3)
    visited(both, 1)
    visits = [*both.theirs.of("sample_blocks"), *both.clients[""].of("sample_blocks")]
    assert [each.known for each in visits if each.num_blocks].count(()) == 2
    (known,) = {each.known for each in visits if each.num_blocks and each.known}
    assert dict(known) == {THEIRS: 30e-3, OURS: 1e-3}
    visited(both, 1, known=known)
    again = both.clients[""].of("sample_blocks")[-6:]
    assert [each.num_blocks for each in again] == [0, 1, 1, 1, 1, 0]
    assert {each.known for each in again} == {known}


def test_code_that_computes_between_its_requests_is_found_from_outside():
    busy = type("Busy", (), {"processor_s": property(lambda _: time.monotonic())})()
    with pytest.raises(FailedError) as raised:
        worker_pool._require_idle(busy, THEIRS)
    assert "between its calls it keeps using 1" in raised.value.failed.message


@pytest.mark.parametrize(
    "forge",
    [
        lambda own: msgspec.structs.replace(own, arm=OURS),  # an answer to another request
        lambda own: msgspec.structs.replace(own, samples=()),
        lambda own: msgspec.structs.replace(own, samples=2 * own.samples),
        lambda own: msgspec.structs.replace(own, samples=tuple(Sample(0.0) for _ in own.samples)),
        lambda own: msgspec.structs.replace(own, samples=tuple(Sample(1e-320) for _ in own.samples)),
        lambda own: msgspec.structs.replace(own, samples=tuple(Sample(1e-3, num_calls=0) for _ in own.samples)),
    ],
    ids=["of another arm", "none", "too many", "no time", "next to no time", "no calls"],
)
def test_a_foreign_process_that_answers_what_was_not_asked_ends_its_own_cell(client, forge):
    both = client()

    def forging(function, arguments, answer):
        is_sampled = function == "sample_blocks" and arguments["visit"].num_blocks
        return msgspec.structs.replace(answer, arms=tuple(map(forge, answer.arms))) if is_sampled else answer

    both.theirs.change = forging
    failed = visited(both, 1)
    assert (failed.arm, failed.status) == (THEIRS, Status.invalid)
    assert "its process sent other samples than requested" in failed.message


def test_a_foreign_process_decides_nothing_but_the_times_of_its_own_arms(client):
    both = client()

    def forging(function, _, answer):
        if function != "sample_blocks":
            return answer
        forged = Sample(7.0, epoch=9, visit=9)
        arms = [msgspec.structs.replace(own, samples=len(own.samples) * (forged,)) for own in answer.arms]
        return msgspec.structs.replace(answer, arms=tuple(arms), called_s=1e6, states=(DeviceState(slowed_by=8),))

    both.theirs.change = forging
    visit = visited(both, 1)
    assert {sample.value for sample in visit.samples(PROBE)} == {PROBE_SAMPLE_S}
    assert {(sample.epoch, sample.visit) for taken in visit.arms for sample in taken.samples} == {(0, 0)}
    assert visit.states == ()
    assert visit.called_s < 100


@pytest.mark.parametrize("blamed", [OURS, PROBE])
@pytest.mark.parametrize("when", ["before", "sampling", "after", "prepare_calls", "make_calls", "hand_in"])
def test_what_fails_in_a_foreign_process_fails_by_its_own_arm_whomever_it_blames(client, blamed, when):
    both = client()

    def failing(function, arguments, answer):
        visit = arguments.get("visit")
        now = (
            function if visit is None else "after" if not visit.num_blocks else "sampling" if visit.known else "before"
        )
        return Failed(arm=blamed, status=Status.error, message="it was not me") if now == when else answer

    both.theirs.change = failing
    failed = visited(both, 1, is_refereed=when in {"prepare_calls", "make_calls", "hand_in"})
    assert (failed.arm, failed.message) == (THEIRS, "it was not me")


def test_the_system_counts_how_long_a_process_waits():
    if not waits(os.getpid()):
        pytest.skip("this system does not count how long processes wait")
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        for each in busy:
            os.sched_setaffinity(each.pid, {min(os.sched_getaffinity(0))})
        deadline_s = time.monotonic() + 200
        while min(longest_wait_s({}, waits(each.pid)) for each in busy) < 0.02 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        assert all(longest_wait_s({}, waits(each.pid)) >= 0.02 for each in busy)
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert waits(busy[0].pid) == {}


def test_a_foreign_process_is_started_when_it_is_asked_and_ends_with_its_epoch(client):
    both = client()
    assert not both.theirs.layouts
    visited(both, 2)
    assert len(both.theirs.layouts) == 1
    both.start(4)
    visited(both, 1)
    assert len(set(both.theirs.layouts)) == 2
    both.theirs.stop()
    assert both.is_running


def test_code_from_a_file_or_another_package_is_foreign():
    assert not any(map(is_foreign, ("sdpa", "fused+compile", "a=sdpa")))
    assert all(map(is_foreign, ("x.py:f", "a=x.py:f+compile", "other")))


def paired(base, candidate):
    return WorkerPool({BASE: base, CANDIDATE: candidate}, lambda arm: arm.side)


X, Y = (Arm(implementation=name, side=CANDIDATE) for name in ("x", "y"))
Y_BASE = Arm(implementation="y", side=BASE)
SIDED = ((X, "x.py:f"), (PROBE, ""), (Y_BASE, "old/y.py:f"), (Y, "y.py:f"))
COMPARED = messages.SampleBlocks(workload=Workload(), arms=SIDED, epoch=1, number=3, num_blocks=4, seed=6)


def test_two_workers_take_each_block_in_turn_with_arms_that_mirror_one_another():
    base, candidate = (Scripted(Clock(), claimed_s=own) for own in (1.0, 2.0))
    reply = paired(base, candidate).ask("sample_blocks", VisitFinished, visit=COMPARED)
    bases, candidates = base.of("sample_blocks"), candidate.of("sample_blocks")
    samples = {taken.arm: taken.samples for taken in reply.arms}
    assert list(samples) == [arm for arm, _ in SIDED]
    values = {arm: {sample.value for sample in taken} for arm, taken in samples.items()}
    assert values == {X: {2.0}, Y: {2.0}, Y_BASE: {1.0}, PROBE: {PROBE_SAMPLE_S}}
    for visits in (bases, candidates):  # making ready and verifying are no part of a block
        assert [visit.num_blocks for visit in visits] == [1, 1, 1, 1, 1, 0]
        assert [visit.verifies for visit in visits] == [False] * 5 + [True]
    assert all(visit.settles for visit in (*bases, *candidates))
    old, new = "old/y.py:f", "y.py:f"
    assert bases[0].arms == ((Y_BASE, old), (PROBE, ""))
    assert candidates[0].arms == ((X, "x.py:f"), (Y, new), (PROBE, ""))
    for block in range(4):
        slots = sorted(s.slot for taken in samples.values() for s in taken if s.block == block)
        assert len(set(slots)) == len(slots) == len(samples)
    firsts = {samples[Y][block].slot < samples[Y_BASE][block].slot for block in range(4)}
    assert firsts == {True, False}
    assert reply.called_s == 12.0


def test_a_failure_of_either_worker_is_blamed_on_the_arm_in_question():
    def blamed(base=None, candidate=None):
        both = paired(Scripted(Clock(), failing=base), Scripted(Clock(), failing=candidate))
        return both.ask("sample_blocks", VisitFinished, visit=COMPARED).arm

    assert blamed(candidate=Y) == Y
    assert blamed(base=Y_BASE) == Y_BASE
    assert blamed(candidate=X) == X


def test_memory_layouts_are_dealt_to_the_sides_at_random():
    base, candidate = Scripted(Clock()), Scripted(Clock())
    both = paired(base, candidate)
    for epoch in range(20):
        both.start(epoch)
    assert len({*base.layouts, *candidate.layouts}) == 40


def test_a_baseline_may_be_foreign_too():
    """Both then run in separate processes."""
    clock = Clock()
    shared = Scripted(clock)
    shared.siblings = [Scripted(clock), Scripted(clock)]
    client = WorkerPool({"": shared}, lambda arm: arm.implementation, clock=clock)
    client.start(3)
    reply = visited(client)
    assert isinstance(reply, VisitFinished)
    assert {taken.arm for taken in reply.arms} == {arm for arm, _ in ARMS}
    assert all(len(taken.samples) == VISIT.num_blocks for taken in reply.arms)


def test_every_process_verifies_the_answers_of_its_own_arms(client):
    both = client()
    visited(both, 1, verifies=True)
    for each in (both.clients[""], both.theirs):
        assert [visit.verifies for visit in each.of("sample_blocks")][-1:] == [True]


def test_a_referee_reads_its_own_clock_around_the_calls_alone(client):
    """Code that claims a tenth of its time gains nothing; preparing and judging are no part of the time."""
    both = client(claimed_s=0.1e-3, call_s=1e-3)
    reply = visited(both, 2, is_refereed=True)
    assert {taken.arm for taken in reply.arms} == {THEIRS, OURS}
    for taken in reply.arms:
        assert [sample.value for sample in taken.samples] == pytest.approx([1e-3] * VISIT.num_blocks)
        assert all(sample.value * sample.num_calls >= worker_pool.REFEREED_S for sample in taken.samples)
    assert not both.theirs.of("sample_blocks")


def test_a_referee_is_unpredictable_and_judges_foreign_outputs_alone(client):
    both = client()
    visited(both, 10, is_refereed=True)
    prepared, handed = both.theirs.of("prepare_calls"), both.theirs.of("hand_in")
    assert len({each.seed for each in prepared}) == len(prepared)
    assert len({each.num_calls for each in prepared}) > 2
    assert len({each.numbers for each in handed}) > 2
    judged = both.clients[""].of("judge_output")
    assert [each.numbers for each in judged] == [each.numbers for each in handed]
    assert all(each.numbers for each in judged)
    assert {each.numbers for each in both.clients[""].of("hand_in")} == {()}


def test_a_referee_finds_a_wrong_answer_at_once_and_ends_its_process(client):
    both = client(wrong="while it was timed: wrong")
    failed = visited(both, 1, is_refereed=True)
    assert (failed.status, failed.arm) == (Status.disagrees, THEIRS)
    assert (both.theirs.is_running, both.is_running) == (False, True)


def test_each_number_of_threads_has_a_process_of_its_own():
    one, two = Scripted(Clock()), Scripted(Clock())
    both = ByThreads({1: one, 2: two})
    both.start(7)
    assert (one.layouts, two.layouts) == ([7], [])
    for number, worker in ((2, two), (1, one)):
        workload = msgspec.structs.replace(VISIT.workload, num_threads=number)
        both.ask("sample_blocks", VisitFinished, visit=msgspec.structs.replace(VISIT, workload=workload))
        assert [visit.workload.num_threads for visit in worker.of("sample_blocks")] == [number]
    assert two.layouts == [7]
    both.stop()
    assert not one.is_running
    assert not two.is_running
