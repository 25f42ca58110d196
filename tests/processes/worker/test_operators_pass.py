"""The operators pass in a real run: a broken promise costs only the cell's status, and it runs once."""

import msgspec
import pytest

from attnbench.analysis.breakdown import backend_used
from attnbench.analysis.results import Results, read
from attnbench.processes import execution
from attnbench.storage.events import CellChecked, CellProfiled, Plan
from attnbench.storage.fold import State
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import Arm, Operator, Operators, Status
from attnbench.workloads.workload import Workload
from studies.simulated import virtual

pytestmark = pytest.mark.usefixtures("forked_workers")

SMALL = Workload(seq_len=8, num_heads=2, head_dim=4, direction="inference")
PROMISES = """
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from attnbench.contract import Attention, Implementation

class Careless(Attention):
    def attend(self, query, key, value, mask):  # flash takes no mask of three dimensions
        everything = torch.ones(query.shape[1], query.shape[2], key.shape[2], dtype=torch.bool)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=everything)

class Held(Careless):
    def attend(self, query, key, value, mask):
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().attend(query, key, value, mask)

careless = Implementation(build=Careless, source="", backend="flash")
unpromised = Implementation(build=Careless, source="")
held = Implementation(build=Held, source="", backend="flash")
"""


def run(plan: Plan, folder) -> Results:
    execution.execute(plan, folder, lambda _: None, stages=("check", "operators"))
    return read(folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("run")
    (folder / "promises.py").write_text(PROMISES)
    specs = tuple(f"{folder / 'promises.py'}:{name}" for name in ("careless", "unpromised", "held"))
    plan = virtual.plan(1, ("sdpa", "sdpa_flash", "sdpa_math", *specs), budget_s=0.0)
    return run(msgspec.structs.replace(plan, workloads=(SMALL,), call_limit_s=1.0), folder)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("careless", "the flash backend was asked for and math ran"),
        ("held", "asked for and cannot run: Please use the following attn mask shapes: 2d"),
    ],
)
def test_who_breaks_a_promise_gets_a_status_with_the_reason(results, name, words) -> None:
    (found,) = [each for each in results.records if each.implementation == name]
    assert found.status is Status.fallback
    assert words in found.message
    assert found.is_finding


@pytest.mark.parametrize(
    ("name", "backend"), [("sdpa", "flash"), ("sdpa_flash", "flash"), ("sdpa_math", "math"), ("unpromised", "math")]
)
def test_who_keeps_it_or_made_none_is_ok_and_says_what_ran(results, name, backend) -> None:
    (found,) = [each for each in results.records if each.implementation == name]
    assert found.status is Status.ok
    assert backend_used(found.operators) == backend
    assert all(one.num_calls > 0 and one.self_s >= 0 for one in found.operators.calls)


def test_a_run_that_goes_on_does_not_look_again(results, tmp_path) -> None:
    (tmp_path / JOURNAL).write_bytes((results.folder / JOURNAL).read_bytes())
    again = run(results.plan, tmp_path)
    assert [one.status for one in again.records] == [one.status for one in results.records]
    seen = [event for event in events(tmp_path / JOURNAL) if isinstance(event, CellProfiled)]
    assert len(seen) == len({event.implementation for event in seen}) == 5


def test_a_fallback_is_in_the_event_itself_so_that_a_kill_cannot_part_the_two() -> None:
    state = State()
    kernel = Operator(name="aten::bmm", num_calls=1, self_s=1.0)
    state.apply(CellChecked(workload="w", implementation="i", status=Status.ok))
    seen = Operators(calls=(kernel,), requested="flash", observed="math")
    state.apply(CellProfiled(workload="w", implementation="i", operators=seen))
    assert state.live("w", [Arm(implementation="i")]) == []
    assert list(state.status.values()) == [Status.fallback]
