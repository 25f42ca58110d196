"""The operators pass in a real run: failures cost only the cell's status, it ends before timing, and runs once."""

from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.breakdown import ran
from attnbench.analysis.results import Results, read
from attnbench.processes import execution
from attnbench.storage.events import CellChecked, CellProfiled, Plan
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import Arm, Operator, Operators, Status
from attnbench.workloads.workload import Workload
from studies.simulated import virtual

pytestmark = pytest.mark.usefixtures("forked_workers")

PROMISES = Path(__file__).parent / "promises.py"
NAMES = ("careless", "unpromised", "held")
SMALL = Workload(seq_len=8, num_heads=2, head_dim=4, direction="inference")


def planned(**changes) -> Plan:
    made = virtual.plan(1, ("sdpa", "sdpa_flash", "sdpa_math"), budget_s=0.0)
    specs = tuple(f"{PROMISES}:{name}" for name in NAMES)
    usual = {"workloads": (SMALL,), "implementations": (*made.implementations, *specs), "call_limit_s": 1.0}
    return msgspec.structs.replace(made, **{**usual, **changes})


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("run")
    execution.execute(planned(), folder, lambda _: None, stages=("check", "operators"))
    return read(folder)


def record(results: Results, name: str):
    (found,) = [one for one in results.records if one.implementation == name]
    return found


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("careless", Status.fallback, "the flash backend was asked for and math ran"),
        ("held", Status.fallback, "asked for and cannot run: Please use the following attn mask shapes: 2d"),
    ],
)
def test_who_breaks_a_promise_gets_a_status_with_the_reason(results, name, status, said) -> None:
    found = record(results, name)
    assert found.status is status
    assert said in found.message
    assert found.is_finding


@pytest.mark.parametrize(
    ("name", "backend"), [("sdpa", "flash"), ("sdpa_flash", "flash"), ("sdpa_math", "math"), ("unpromised", "math")]
)
def test_who_keeps_it_or_made_none_is_ok_and_says_what_ran(results, name, backend) -> None:
    found = record(results, name)
    assert found.status is Status.ok
    assert ran(found.operators) == backend
    assert all(one.num_calls > 0 and one.self_s >= 0 for one in found.operators.calls)


def test_a_run_that_goes_on_does_not_look_again(results, tmp_path) -> None:
    lines = (results.folder / JOURNAL).read_bytes()
    (tmp_path / JOURNAL).write_bytes(lines)
    execution.execute(planned(), tmp_path, lambda _: None, stages=("check", "operators"))
    assert [one.status for one in read(tmp_path).records] == [one.status for one in results.records]
    seen = [event for event in events(tmp_path / JOURNAL) if isinstance(event, CellProfiled)]
    assert len(seen) == len({event.implementation for event in seen}) == 5


def test_a_fallback_is_in_the_event_itself_so_that_a_kill_cannot_part_the_two() -> None:
    state = State()
    kernel = Operator(name="aten::bmm", num_calls=1, self_s=1.0)
    state.apply(CellChecked(workload="w", implementation="i", status=Status.ok))
    seen = Operators(calls=(kernel,), requested="flash", observed="math", reason="the mask is 3-D")
    state.apply(CellProfiled(workload="w", implementation="i", operators=seen))
    assert state.live("w", [Arm(implementation="i")]) == []
    assert list(state.status.values()) == [Status.fallback]
