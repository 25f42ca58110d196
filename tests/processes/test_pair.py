"""Two workers behind one interface: the requests to each, and the blame for failures."""

import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec
import pytest

from attnbench.processes.execution import client_for
from attnbench.processes.messages import Check, Failed, SampleBlocks, Started
from attnbench.processes.runners import Runners
from attnbench.storage.events import ArmSamples, Side, Sides, VisitFinished
from attnbench.storage.records import BASE, CANDIDATE, PROBE, Arm, Sample, Status
from attnbench.workloads.workload import Workload
from studies.simulated import virtual


def paired(base, candidate):
    return Runners({BASE: base, CANDIDATE: candidate}, lambda arm: arm.side)


class Scripted:
    """Answers each visit with a different sample for every arm, and records its requests."""

    def __init__(self, value=1.0, failing=None):
        self.value, self.failing = value, failing
        self.asked, self.layouts = [], []
        self.is_running, self.delayed_s = True, 0.0

    def stop(self):
        pass

    def start(self, layout=0):
        self.layouts.append(layout)
        return Started(environment=virtual.ENVIRONMENT)

    def ask(self, request):
        self.asked.append(request)
        if isinstance(request, Check):
            return Failed(status=Status.error, message="asked")
        arms = [arm for arm, _ in request.arms]
        if self.failing in arms:
            return Failed(arm=self.failing, status=Status.error, message="no")
        taken = [Sample(self.value, slot=0, visit=3)] * request.num_blocks
        placed = (tuple(msgspec.structs.replace(each, slot=slot) for each in taken) for slot in range(len(arms)))
        samples = (ArmSamples(arm=arm, samples=own) for arm, own in zip(arms, placed, strict=True))
        return VisitFinished(
            workload=request.workload.id,
            epoch=request.epoch,
            visit=request.number,
            arms=tuple(samples),
            called_s=1.0,
        )


X, Y = (Arm(implementation=name, side=CANDIDATE) for name in ("x", "y"))
Y_BASE = Arm(implementation="y", side=BASE)
ARMS = ((X, "x.py:f"), (Y_BASE.as_control(), "old/y.py:f"), (PROBE, ""), (Y_BASE, "old/y.py:f"), (Y, "y.py:f"))
VISIT = SampleBlocks(workload=Workload(), arms=ARMS, epoch=1, number=3, num_blocks=4, seed=6)


def test_two_workers_take_each_block_in_turn_with_arms_that_mirror_one_another():
    base, candidate = Scripted(1.0), Scripted(2.0)
    reply = paired(base, candidate).ask(VISIT)
    samples = {taken.arm: taken.samples for taken in reply.arms}
    assert list(samples) == [*[arm for arm, _ in ARMS], X.as_control(), Y.as_control()]
    assert {arm: {s.value for s in taken} for arm, taken in samples.items()} == {
        X: {2.0}, Y: {2.0}, Y_BASE: {1.0}, Y_BASE.as_control(): {1.0}, PROBE: {2.0},
        X.as_control(): {2.0}, Y.as_control(): {2.0},
    }  # fmt: skip
    for client in (base, candidate):  # making ready and verifying are no part of a block
        assert [request.num_blocks for request in client.asked] == [1, 1, 1, 1, 1, 0]
        assert [request.verifies for request in client.asked] == [False] * 5 + [True]
    assert all(request.settles for request in (*base.asked, *candidate.asked))
    old, new = "old/y.py:f", "y.py:f"
    assert base.asked[0].arms == ((Y_BASE.as_control(), old), (Y_BASE, old), (PROBE, ""))
    mirrored = ((X, "x.py:f"), (Y, new), (X.as_control(), "x.py:f"), (Y.as_control(), new), (PROBE, ""))
    assert candidate.asked[0].arms == mirrored
    for block in range(4):
        slots = sorted(s.slot for taken in samples.values() for s in taken if s.block == block)
        assert len(set(slots)) == len(slots) == len(samples)
    firsts = {samples[Y][block].slot < samples[Y_BASE][block].slot for block in range(4)}
    assert firsts == {True, False}
    assert reply.called_s == 12.0


def test_requests_go_to_the_worker_whose_side_it_is():
    base, candidate = Scripted(), Scripted()
    both = paired(base, candidate)
    limits = {"call_limit_s": 1.0, "memory_limit_bytes": 0, "seed": 0}
    for spec, side in (("a.py:f", BASE), ("b.py:f", CANDIDATE)):
        both.ask(Check(workload=Workload(), arm=Arm(implementation="y", side=side), spec=spec, **limits))
    assert [request.spec for request in base.asked] == ["a.py:f"]
    assert [request.spec for request in candidate.asked] == ["b.py:f"]


def test_a_failure_of_either_worker_is_laid_at_the_door_of_the_arm_that_was_asked_for():
    assert paired(Scripted(), Scripted(failing=Y.as_control())).ask(VISIT).arm == Y
    assert paired(Scripted(failing=Y_BASE.as_control()), Scripted()).ask(VISIT).arm == Y_BASE.as_control()
    assert paired(Scripted(), Scripted(failing=X.as_control())).ask(VISIT).arm == X


def test_memory_layouts_are_dealt_to_the_sides_at_random():
    base, candidate = Scripted(), Scripted()
    both = paired(base, candidate)
    for epoch in range(20):
        both.start(epoch)
    assert len({*base.layouts, *candidate.layouts}) == 40


@pytest.fixture
def workers(tmp_path):
    """Start the two workers of a plan with one file on each side; each side has the named files, all empty."""

    def made(implementation, *files):
        sides = []
        for whose in (BASE, CANDIDATE):
            for file in (implementation, *files):
                (tmp_path / whose / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / whose / file).touch()
            specs = {"x": f"{tmp_path / whose / implementation}:f"}
            sides.append(Side(given=whose, root=str(tmp_path / whose), implementations=specs))
        plan = msgspec.structs.replace(
            virtual.with_sides(virtual.plan(1, ("x",), budget_s=1.0), is_apart=True),
            sides=Sides(base=sides[0], candidate=sides[1], is_apart=True),
        )
        return client_for(plan, tmp_path / "run")

    return made


def found(client, name):
    """Return the file of a side that a process would import for a module; None for no file, or Python's own."""
    python = [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('platstdlib')}/lib-dynload"]
    spec = PathFinder.find_spec(name, [*python, *map(str, client.template.folders)])
    if spec is not None and spec.origin is not None and spec.origin.startswith(tuple(python)):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin).resolve()


@pytest.mark.parametrize("own", ["foo", "src/foo", "python/foo", "packages/foo/foo", "packages/foo/src/foo"])
def test_each_process_finds_the_package_of_its_own_side_wherever_it_lies(tmp_path, workers, own):
    inside = [f"{own}/{name}.py" for name in ("__init__", "ops", "types", "triton", "torch")]
    with workers(f"{own}/attn.py", *inside) as client:
        for whose, one in zip(("base", "candidate"), client.clients.values(), strict=True):
            assert found(one, "foo") == tmp_path / whose / own / "__init__.py"
            assert [found(one, name) for name in ("ops", "types", "triton", "torch")] == [None] * 4


def test_what_lies_beside_an_implementation_by_chance_does_not_hide_python(tmp_path, workers):
    chance = ["types.py", "kernels/random.py", "kernels/json/__init__.py"]
    with workers("kernels/attn.py", "helper.py", "kernels/beside.py", *chance) as client:
        for whose, one in zip(("base", "candidate"), client.clients.values(), strict=True):
            assert found(one, "helper") == tmp_path / whose / "helper.py"
            assert found(one, "beside") == tmp_path / whose / "kernels" / "beside.py"
            assert [found(one, name) for name in ("types", "random", "json")] == [None] * 3


def test_a_file_beside_an_implementation_takes_the_place_of_no_package_above_it(tmp_path, workers):
    with workers("bench/attn.py", "bench/foo.py", "foo/__init__.py") as client:
        assert found(client.clients[CANDIDATE], "foo") == tmp_path / "candidate" / "foo" / "__init__.py"
