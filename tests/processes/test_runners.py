"""Separate runners for untrusted code: requests to each, the witness clock, and the blame."""

import os
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.devices.cpu import Cpu
from attnbench.devices.waiting import longest_wait_s, waits
from attnbench.plugins import is_foreign
from attnbench.processes import messages, runners
from attnbench.processes.execution import Timing, execute
from attnbench.processes.messages import Failed, FailedError
from attnbench.processes.planning import build_plan
from attnbench.processes.runners import NUM_HANDED, Runners
from attnbench.storage.events import VisitFinished
from attnbench.storage.fold import State
from attnbench.storage.records import BASE, CANDIDATE, PROBE, Arm, DeviceState, Sample, Status
from attnbench.timing.blocks import PROBE_SAMPLE_S
from attnbench.workloads.workload import Workload
from studies.simulated import virtual

OURS, THEIRS = Arm(implementation="sdpa"), Arm(implementation="theirs")
ARMS = ((THEIRS, "x.py:f"), (OURS.as_control(), "sdpa"), (PROBE, ""), (OURS, "sdpa"))
VISIT = messages.SampleBlocks(
    workload=Workload(seq_len=64), arms=ARMS, epoch=0, number=0, num_blocks=4, seed=6, verifies=False
)


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


class Scripted(AbstractContextManager):
    """A worker whose samples claim `claimed_s` for each call, but take `sampled_s` (`fresh_s` on fresh inputs).

    Of all that time the worker waits `delay` for a processor. `answers` replaces the answer to a function.
    """

    def __init__(self, clock, claimed_s=1e-3, sampled_s=1e-3, fresh_s=1e-3, delay=0.0, wrong="", failing=None):
        self.clock, self.claimed_s, self.sampled_s, self.fresh_s = clock, claimed_s, sampled_s, fresh_s
        self.failing, self.wrong, self.delay, self.waits = failing, wrong, delay, {"1": 0.0}
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
        self.waits = {"1": self.waits["1"] + self.delay * seconds}

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
            self.spend(visit.num_blocks * (one.value if arm == PROBE else 10 * self.sampled_s))
        return visit.finished(samples, 1.0)

    def prepare_witness(self, num_calls, **_):
        self.num_calls = num_calls

    def witness(self, first, last, **_):
        self.spend(self.fresh_s * (last - first))

    def hand_in(self, numbers, **_):
        assert all(0 <= number < self.num_calls for number in numbers)
        return messages.HandedIn(exchange="", tensors={})

    def judge_output(self, cell, **_):
        return Failed(arm=cell.arm, status=Status.disagrees, message=self.wrong) if self.wrong else None


@pytest.fixture
def client(monkeypatch):
    monkeypatch.setattr(runners, "IDLE_S", 1e-6)

    def made(wrong="", load=0.0, **theirs):
        clock = Clock()
        shared = Scripted(clock, wrong=wrong, delay=load)
        shared.siblings = [Scripted(clock, **theirs)]
        made = Runners({"": shared}, lambda arm: "theirs" if arm == THEIRS else "", clock=clock)
        made.theirs, made.state = shared.siblings[0], State()
        made.start(3)
        return made

    return made


def visited(client, times=3, **settings):
    """Take visits that a journal keeps, up to the first failure; return the last reply."""
    for _ in range(times):
        reply = client.ask("sample_blocks", VisitFinished, visit=msgspec.structs.replace(VISIT, **settings))
        if isinstance(reply, Failed):
            break
        client.state.apply(reply)
        client.evidence = client.state.evidence
    return reply


def test_runners_heat_the_device_before_the_blocks_and_never_between_samples(client):
    both = client()
    visited(both, 1, sustained_s=3.0)
    for each in (both.clients[""], both.theirs):
        visits = each.of("sample_blocks")
        assert [visit.sustained_s for visit in visits] == [3.0] + [0.0] * (len(visits) - 1)
        assert all(visit.has_long_samples for visit in visits[1:])


def test_a_visit_has_only_as_many_blocks_as_its_limit_allows(client):
    """A block of both runners lasts 40 ms."""
    assert {len(taken.samples) for taken in visited(client(), 1, longest_s=0.09).arms} == {2}


def test_each_runner_takes_its_part_of_a_block_in_a_request_that_begins_with_untimed_calls(client):
    both = client()
    reply = visited(both, 1)
    theirs, ours = {THEIRS, THEIRS.as_control()}, {OURS, OURS.as_control()}
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
    (prepared,), (handed,) = both.theirs.of("prepare_witness"), both.theirs.of("hand_in")
    made = [number for each in both.theirs.of("witness") for number in range(each.first, each.last)]
    assert made == [*range(prepared.num_calls)]
    assert len(set(handed.numbers)) == NUM_HANDED
    (judged,) = both.clients[""].of("judge_output")
    assert judged.numbers == handed.numbers


def test_all_runners_of_a_visit_choose_from_the_same_times_of_all_arms(client):
    """A first block measures unknown times, and is no part of the visit."""
    both = client(claimed_s=30e-3, sampled_s=30e-3, fresh_s=30e-3)
    visited(both, 1)
    visits = [*both.theirs.of("sample_blocks"), *both.clients[""].of("sample_blocks")]
    assert [each.known for each in visits if each.num_blocks].count(()) == 2
    (known,) = {each.known for each in visits if each.num_blocks and each.known}
    assert dict(known) == {
        THEIRS: 30e-3, THEIRS.as_control(): 30e-3, OURS: 1e-3, OURS.as_control(): 1e-3,
    }  # fmt: skip
    visited(both, 1, known=known)
    again = both.clients[""].of("sample_blocks")[-6:]
    assert [each.num_blocks for each in again] == [0, 1, 1, 1, 1, 0]
    assert {each.known for each in again} == {known}


def test_foreign_code_verifies_nothing_in_its_own_process(client):
    both = client()
    visited(both, 1, verifies=True)
    assert not any(each.verifies for each in both.theirs.of("sample_blocks"))
    assert any(each.verifies for each in both.clients[""].of("sample_blocks"))


def test_neither_the_number_of_calls_nor_which_is_judged_can_be_known_before(client):
    both = client()
    visited(both, 40)
    prepared, handed = both.theirs.of("prepare_witness"), both.theirs.of("hand_in")
    assert len({each.num_calls for each in prepared}) > 2
    assert len({each.numbers for each in handed}) > 2
    assert len({each.seed for each in prepared}) == 40


@pytest.mark.parametrize("honest", [{}, {"fresh_s": 1.1e-3}, {"fresh_s": 0.5e-3}])
def test_who_takes_about_as_long_by_both_clocks_keeps_its_times(client, honest):
    assert isinstance(visited(client(**honest), 12), VisitFinished)


@pytest.mark.parametrize(
    ("direction", "factor", "is_found"),
    [("inference", 1.5, True), ("forward_backward", 1.8, False), ("forward_backward", 2.5, True)],
)
def test_a_backward_pass_on_fresh_inputs_may_take_longer(client, direction, factor, is_found):
    """An honest function with gradients had no time in 2 of 32 short runs, though the machine was idle."""
    workload = msgspec.structs.replace(VISIT.workload, direction=direction)
    reply = visited(client(fresh_s=factor * 1e-3), 16, workload=workload)
    assert isinstance(reply, Failed) is is_found


@pytest.mark.parametrize(
    "cheat",
    [{"claimed_s": 0.2e-3}, {"claimed_s": 0.2e-3, "sampled_s": 0.2e-3}],
    ids=["a clock that is slowed down", "stored answers"],
)
def test_time_that_is_hidden_and_work_that_is_skipped_make_a_cell_invalid(client, cheat):
    both = client(**cheat)
    assert isinstance(visited(both, 2), VisitFinished)
    failed = visited(both, 1)
    assert (failed.status, failed.arm) == (Status.invalid, THEIRS)
    assert "x slower than in its samples" in failed.message


def test_only_timed_requests_show_that_a_machine_is_busy(client):
    both = client(claimed_s=0.2e-3)
    shared = both.clients[""]

    def waiting(function, _, answer):
        shared.waits = {"1": shared.waits["1"] + (function in {"prepare_witness", "hand_in"})}
        return answer

    shared.change = waiting
    assert visited(both, 3).status is Status.invalid


SHAPES = {
    "T=128": ({"seq_len": 128}, 0.25e-3, 0.1e-3),
    "T=512": ({"seq_len": 512}, 2e-3, 1e-3),
    "decoding": ({"seq_len": 1, "kv_len": 4096}, 1.6e-3, 0.4e-3),
    "grouped heads": ({"seq_len": 1, "kv_len": 4096, "num_kv_heads": 2}, 1.6e-3, 0.1e-3),
}


@pytest.mark.parametrize(("axes", "call_s", "claimed_s"), SHAPES.values(), ids=SHAPES)
def test_memory_that_is_not_cached_excuses_no_more_than_a_trusted_arm_shows(client, axes, call_s, claimed_s):
    workload, cold_s = Workload(**axes), 0.3e-3
    for is_honest in (True, False):
        extra_s = cold_s * workload.num_heads / workload.num_kv_heads
        own_s = call_s if is_honest else claimed_s
        both = client(claimed_s=own_s, sampled_s=own_s, fresh_s=call_s + extra_s)
        shared = both.clients[""]
        shared.claimed_s, shared.sampled_s, shared.fresh_s = call_s, call_s, call_s + cold_s
        assert isinstance(visited(both, 16, workload=workload), VisitFinished if is_honest else Failed)


def test_a_resumed_run_remembers_the_witness_samples_of_its_journal(client):
    first, second = client(claimed_s=0.2e-3), client(claimed_s=0.2e-3)
    visited(first, 2)
    second.state, second.evidence = first.state, first.state.evidence
    assert visited(second, 1).status is Status.invalid


def test_code_that_computes_between_its_requests_is_found_from_outside():
    busy = type("Busy", (), {"processor_s": property(lambda _: time.monotonic())})()
    with pytest.raises(FailedError) as raised:
        runners._require_idle(busy, THEIRS)
    assert "between its calls it goes on using 1" in raised.value.failed.message


def test_a_wrong_answer_while_it_is_timed_fails_at_once_and_its_process_ends(client):
    both = client(wrong="while it was timed: wrong")
    failed = visited(both, 1)
    assert (failed.status, failed.arm) == (Status.disagrees, THEIRS)
    assert (both.theirs.is_running, both.is_running) == (False, True)


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
    assert "its process answers what was not asked" in failed.message


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


@pytest.mark.parametrize("blamed", [OURS, PROBE, OURS.as_control()])
@pytest.mark.parametrize("when", ["before", "sampling", "after", "prepare_witness", "witness", "hand_in"])
def test_what_fails_in_a_foreign_process_fails_by_its_own_arm_whomever_it_blames(client, blamed, when):
    both = client()

    def failing(function, arguments, answer):
        visit = arguments.get("visit")
        now = (
            function if visit is None else "after" if not visit.num_blocks else "sampling" if visit.known else "before"
        )
        return Failed(arm=blamed, status=Status.error, message="it was not me") if now == when else answer

    both.theirs.change = failing
    failed = visited(both, 1)
    assert (failed.arm, failed.message) == (THEIRS, "it was not me")


def test_work_that_is_put_off_to_the_next_request_counts_where_few_calls_fit(client, monkeypatch):
    monkeypatch.setattr(runners, "WITNESS_BYTES", 1)
    both, late_s = client(fresh_s=0.0), [0.0]

    def late(function, _, answer):
        both.theirs.spend(late_s.pop())
        late_s.append(20e-3 * (function == "witness"))
        return answer

    both.theirs.change = late
    assert visited(both, 20).status is Status.invalid


def test_witnesses_that_are_disturbed_cost_nothing(client):
    both = client()
    for number in range(9):
        both.theirs.fresh_s = 9e-3 if number % 2 else 1e-3
        assert isinstance(visited(both, 1), VisitFinished)


SHORT = {"claimed_s": 1e-3, "sampled_s": 3e-3, "fresh_s": 3e-3}
"""Half of the time is lost between the calls, and the other half inside of them."""


def test_an_honest_call_that_waits_for_a_processor_is_doubtful_and_no_finding(client):
    both = client(load=0.5, delay=0.7, **SHORT)
    assert not visited(both, 2).doubts
    for _ in range(9):
        visit = visited(both, 1)
        assert isinstance(visit, VisitFinished)
        assert visit.doubts.keys() == {"theirs"}
    assert "x slower than" in visit.doubts["theirs"]


@pytest.mark.parametrize("waits", [{}, {"delay": 0.7}], ids=["as it computes", "as its own threads crowd one another"])
def test_on_a_quiet_machine_no_excuse_counts(client, waits):
    assert visited(client(**SHORT, **waits), 3).status is Status.invalid


def test_load_does_not_excuse_what_it_cannot_explain(client):
    cheat = client(load=0.5, claimed_s=0.01e-3, sampled_s=0.01e-3)
    assert visited(cheat, 3).status is Status.invalid


def test_off_the_host_only_long_calls_are_compared_and_answers_are_judged(client, monkeypatch):
    monkeypatch.setattr(Cpu, "is_host", False)
    both = client(claimed_s=0.2e-3)
    visit = visited(both, 6)
    assert isinstance(visit, VisitFinished)
    assert not visit.doubts
    assert both.clients[""].of("judge_output")
    assert isinstance(visited(client(claimed_s=2e-3, fresh_s=8e-3), 6), VisitFinished)  # launches may take longer
    assert visited(client(claimed_s=0.1e-3, fresh_s=8e-3), 6).status is Status.invalid


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
    return Runners({BASE: base, CANDIDATE: candidate}, lambda arm: arm.side)


X, Y = (Arm(implementation=name, side=CANDIDATE) for name in ("x", "y"))
Y_BASE = Arm(implementation="y", side=BASE)
SIDED = ((X, "x.py:f"), (Y_BASE.as_control(), "old/y.py:f"), (PROBE, ""), (Y_BASE, "old/y.py:f"), (Y, "y.py:f"))
COMPARED = messages.SampleBlocks(workload=Workload(), arms=SIDED, epoch=1, number=3, num_blocks=4, seed=6)


def test_two_workers_take_each_block_in_turn_with_arms_that_mirror_one_another():
    base, candidate = (Scripted(Clock(), claimed_s=own) for own in (1.0, 2.0))
    reply = paired(base, candidate).ask("sample_blocks", VisitFinished, visit=COMPARED)
    bases, candidates = base.of("sample_blocks"), candidate.of("sample_blocks")
    samples = {taken.arm: taken.samples for taken in reply.arms}
    assert list(samples) == [*[arm for arm, _ in SIDED], X.as_control(), Y.as_control()]
    assert {arm: {s.value for s in taken} for arm, taken in samples.items()} == {
        X: {2.0}, Y: {2.0}, Y_BASE: {1.0}, Y_BASE.as_control(): {1.0}, PROBE: {PROBE_SAMPLE_S},
        X.as_control(): {2.0}, Y.as_control(): {2.0},
    }  # fmt: skip
    for visits in (bases, candidates):  # making ready and verifying are no part of a block
        assert [visit.num_blocks for visit in visits] == [1, 1, 1, 1, 1, 0]
        assert [visit.verifies for visit in visits] == [False] * 5 + [True]
    assert all(visit.settles for visit in (*bases, *candidates))
    old, new = "old/y.py:f", "y.py:f"
    assert bases[0].arms == ((Y_BASE.as_control(), old), (Y_BASE, old), (PROBE, ""))
    mirrored = ((X, "x.py:f"), (Y, new), (X.as_control(), "x.py:f"), (Y.as_control(), new), (PROBE, ""))
    assert candidates[0].arms == mirrored
    for block in range(4):
        slots = sorted(s.slot for taken in samples.values() for s in taken if s.block == block)
        assert len(set(slots)) == len(slots) == len(samples)
    firsts = {samples[Y][block].slot < samples[Y_BASE][block].slot for block in range(4)}
    assert firsts == {True, False}
    assert reply.called_s == 12.0


def test_a_failure_of_either_worker_is_laid_at_the_door_of_the_arm_that_was_asked_for():
    def blamed(base=None, candidate=None):
        both = paired(Scripted(Clock(), failing=base), Scripted(Clock(), failing=candidate))
        return both.ask("sample_blocks", VisitFinished, visit=COMPARED).arm

    assert blamed(candidate=Y.as_control()) == Y
    assert blamed(base=Y_BASE.as_control()) == Y_BASE.as_control()
    assert blamed(candidate=X.as_control()) == X


def test_memory_layouts_are_dealt_to_the_sides_at_random():
    base, candidate = Scripted(Clock()), Scripted(Clock())
    both = paired(base, candidate)
    for epoch in range(20):
        both.start(epoch)
    assert len({*base.layouts, *candidate.layouts}) == 40


MINE = """
import torch.nn.functional as F

KEPT = {}

def honest(query, key, value, mask):
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

def keeps(query, key, value, mask):
    where = hash(tuple(each.detach().numpy().tobytes() for each in (query, key, value)))
    if where not in KEPT:
        KEPT.clear()
        KEPT[where] = honest(query, key, value, mask)
    return KEPT[where].clone()
"""


@pytest.mark.long
def test_kept_answers_get_no_time_to_trust_and_cost_nobody_else(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    shape = ("scope=attention", "seq_len=256", "mask=none", "dtype=float32", "direction=inference", "batch_size=1")
    files = tuple(f"{tmp_path / 'mine.py'}:{name}" for name in ("honest", "keeps"))
    asked = build_plan(sweep="quick", settings=shape, is_exact=True, implementations=files, budget_s=3.0)
    execute(msgspec.structs.replace(asked, metrics=("latency",)), tmp_path / "run", lambda _: None)
    results = read(tmp_path / "run")
    records = {record.implementation: record for record in results.records}
    assert {records[name].status for name in ("sdpa", "honest")} == {Status.ok}
    kept = records["keeps"]
    is_refused = kept.status is Status.invalid and "x slower than in its samples" in kept.message
    assert is_refused or kept.key in results.doubts  # doubtful if load explains some of it


@pytest.mark.parametrize(
    ("call_s", "is_alone", "number", "num_blocks"),
    [
        *[(1e-6, False, 1, 8), (25e-3, False, 1, 4), (1e-3, True, 1, 4), (1.0, True, 1, 2)],
        *[(25e-3, False, 15, 4), (25e-3, False, 16, 15), (25e-3, False, 62, 32), (25e-3, False, 64, 4)],
    ],
)
def test_a_visit_of_a_fresh_process_has_more_blocks_where_they_are_short(call_s, is_alone, number, num_blocks):
    """It has as many as fit into the time to start processes, with the untimed calls before each part.

    A comparison that is open for long has as many as fit into its share of the budget, so that none of it is left over.
    """
    workload = Workload(seq_len=64)
    taken = {arm: [Sample(call_s)] for arm in (OURS, THEIRS)}
    plan_ = SimpleNamespace(num_blocks=2, budget_s=60.0, is_alone=lambda arm: is_alone and arm == THEIRS)
    session = SimpleNamespace(specs={OURS: "", THEIRS: ""}, elapsed_s=12.0)
    state = SimpleNamespace(samples={workload.id: taken}, num_visits={workload.id: number})
    stage = SimpleNamespace(plan=plan_, session=session, state=state, places={workload.id: 0})
    assert Timing._num_blocks(stage, workload) == num_blocks


def test_a_baseline_may_be_foreign_too():
    """Both then run in separate processes, with one control, and without a trusted witness for comparison."""
    clock = Clock()
    shared = Scripted(clock)
    shared.siblings = [Scripted(clock), Scripted(clock)]
    client = Runners({"": shared}, lambda arm: arm.implementation, clock=clock)
    client.start(3)
    client.state = State()
    reply = visited(client)
    assert isinstance(reply, VisitFinished)
    assert {taken.arm for taken in reply.arms} == {arm for arm, _ in ARMS} | {THEIRS.as_control()}
    assert all(len(taken.samples) == VISIT.num_blocks for taken in reply.arms)
