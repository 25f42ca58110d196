"""A run resumes only with its original code and environment; harness failures blame no implementation."""

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.processes import execution
from attnbench.processes.planning import build_plan
from attnbench.processes.worker_client import ProcessClient, Template
from attnbench.storage.events import ALLOCATORS, Plan
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import Status

pytestmark = pytest.mark.usefixtures("forked_workers")

SOURCE = """
def mine(query, key, value):
    return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
"""
SMALL = ("seq_len=8", "batch_size=1", "num_heads=2", "head_dim=8", "dtype=float32", "mask=none", "scope=attention")
SMALL += ("direction=inference",)


def planned(spec: str, **changes) -> Plan:
    made = build_plan(sweep="quick", settings=SMALL, is_exact=True, implementations=[spec], budget_s=0.0)
    return msgspec.structs.replace(made, **changes)


def test_a_run_whose_code_has_changed_is_not_gone_on_with(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    wanted = planned(f"{file}:mine")
    folder = tmp_path / "run"
    execution.execute(wanted, folder, lambda _: None, stages=("check",))
    assert {record.status for record in read(folder).records} == {Status.ok}
    before = (folder / JOURNAL).read_bytes()
    file.write_text("def mine(query, key, value):\n    return value\n")
    with pytest.raises(ValueError, match="has changed since the run began"):
        execution.execute(wanted, folder, lambda _: None)
    assert (folder / JOURNAL).read_bytes() == before


IMPOSSIBLE = {"budget_s": float("inf"), "call_limit_s": float("nan"), "num_blocks": 0}


@pytest.mark.parametrize(("field", "value"), IMPOSSIBLE.items())
def test_a_plan_that_no_journal_could_hold_is_refused(field, value):
    with pytest.raises(ValueError, match="is not allowed"):
        msgspec.structs.replace(planned("fused"), **{field: value}).__post_init__()


def test_the_allocator_is_reported_before_the_worker_starts(tmp_path):
    reported = tmp_path / "log"
    with ProcessClient(Template(reported, ALLOCATORS["retain"]), 60.0) as worker:
        environment = worker.start().environment
    assert environment.settings["MALLOC_MMAP_MAX_"] == "0"
    with ProcessClient(Template(reported, ALLOCATORS["system"]), 60.0) as worker:
        assert "MALLOC_MMAP_MAX_" not in worker.start().environment.settings
