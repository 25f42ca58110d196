"""A whole run with real workers: each liar costs its own cell only, and a killed run resumes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from attnbench.analysis.results import read
from attnbench.processes import execution
from attnbench.processes.messages import PRELOADED
from attnbench.storage.events import (
    ALLOCATORS,
    SCHEMA,
    CellChecked,
    CellMeasured,
    Plan,
    RunFinished,
    RunStarted,
    VisitFinished,
    WorkerStarted,
    now,
)
from attnbench.storage.journal import JOURNAL, Journal, events
from attnbench.storage.records import Status
from attnbench.workloads.workload import Workload
from tests import journals

pytestmark = pytest.mark.usefixtures("forked_workers")

ROOT = Path(__file__).parents[2]
PYTHON = sys.executable  # runs start processes of their own, and so do their workers
LIARS = Path(__file__).parents[1] / "liars.py"
NAMES = [
    "right", "wrong", "raising", "not_a_number", "crashing", "hanging", "greedy", "talking", "slow", "dying_later",
    "remembering", "lazy", "greedy_for_threads", "one_buffer", "multiples_of_32",
]  # fmt: skip


CAUSAL = Workload(seq_len=32, num_heads=2, head_dim=8, mask="causal", direction="inference")


def plan(workloads=(CAUSAL,), implementations=(*(f"{LIARS}:{name}" for name in NAMES), "sdpa"), **changes) -> Plan:
    fields = {"metrics": ("latency", "peak_memory"), "call_limit_s": 0.1, "timeout_s": 10.0}
    return journals.planned(workloads, implementations, **(fields | {"num_blocks": 2, "num_rounds": 2} | changes))


@pytest.fixture(scope="module")
def liars(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    counters = folder / "counters"
    counters.mkdir()
    os.environ["LIARS_COUNTERS"] = str(counters)
    seen = []
    try:
        execution.execute(plan(), folder / "results", seen.append)
        return read(folder / "results"), seen
    finally:
        del os.environ["LIARS_COUNTERS"]


def record(results, name):
    (found,) = [record for record in results.records if record.implementation == name]
    return found


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("wrong", Status.disagrees, "output is wrong"),
        ("raising", Status.error, "RuntimeError: I do not feel like it (liars.py, line"),
        ("not_a_number", Status.disagrees, "not finite"),
        ("crashing", Status.crashed, "SIGSEGV"),
        ("hanging", Status.timeout, "no end in sight after 10 s"),
        ("greedy", Status.out_of_memory, "can't allocate memory"),
        ("slow", Status.timeout, "for one call, over the limit of 100 ms"),
        ("dying_later", Status.crashed, "exited with code 3"),
        ("remembering", Status.disagrees, "an earlier call|is kept"),  # which depends on addresses
        ("lazy", Status.disagrees, "while it was timed: output is wrong"),
        ("greedy_for_threads", Status.error, "it changed number of threads"),
        ("one_buffer", Status.disagrees, "overwrote the output of an earlier one"),
    ],
)
def test_each_liar_gets_its_status_and_no_time(liars, name, status, said):
    found = record(liars[0], name)
    assert found.status is status
    assert any(words in found.message for words in said.split("|"))
    assert found.measurements == ()
    assert found.is_finding is (name != "slow")
    assert found.is_predicted is (name == "slow")


@pytest.mark.parametrize("name", ["right", "talking", "sdpa", "multiples_of_32"])
def test_the_honest_beside_them_are_measured(liars, name):
    found = record(liars[0], name)
    assert found.status is Status.ok
    assert found.agreement is not None
    assert found.agreement.agrees
    latency, memory = found.measurement("latency"), found.measurement("peak_memory")
    assert latency is not None
    assert memory is not None
    assert len({sample.epoch for sample in latency.samples}) == 2  # a visit in each of two processes
    assert len(latency.samples) >= 2 + 1  # of the next visit, which may be short, at least one
    assert all(sample.value > 0 for sample in latency.samples)
    assert memory.samples[0].value >= 2 * 32 * 8 * 4  # at least the output


def test_the_watcher_hears_every_stage_and_the_counts(liars):
    results, seen = liars
    assert list(dict.fromkeys(p.stage for p in seen)) == ["check", "kept", "observe", "ceilings", "time"]
    assert seen[-1].counts["ok"] >= 3
    assert results.elapsed_s is not None


def test_the_journal_tells_where_it_ran_but_not_on_whose_machine(liars):
    text = (liars[0].folder / JOURNAL).read_text()
    assert os.uname().nodename not in text.replace(str(LIARS), "")
    environment = liars[0].records[0].environment
    assert environment is not None
    assert environment.versions["torch"]
    assert len(environment.fingerprint) == 8


def script(folder: Path) -> list[str]:
    code = (
        "import sys; from pathlib import Path; from attnbench.analysis.results import read; "
        "from attnbench.processes import execution; "
        "folder = Path(sys.argv[1]); execution.execute(read(folder).plan, folder, lambda _: None)"
    )
    return [PYTHON, "-c", code, str(folder)]


def start(folder: Path, planned: Plan) -> None:
    with Journal(folder) as journal:
        journal.append(RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit="", plan=planned))


@pytest.mark.long
def test_a_run_killed_again_and_again_loses_no_finished_work_and_ends(tmp_path):
    planned = plan(
        implementations=("fused", "sdpa", "einsum"),
        workloads=tuple(Workload(seq_len=n, num_heads=2, head_dim=8, direction="inference") for n in (8, 16, 24)),
        budget_s=0.0,
    )
    folder = tmp_path / "killed"
    start(folder, planned)
    journal = folder / JOURNAL
    lines = journal.read_bytes()
    for least in (3, 8, 14):
        with subprocess.Popen(script(folder), cwd=ROOT, stderr=subprocess.DEVNULL) as process:
            deadline = time.monotonic() + 60
            while journal.read_bytes().count(b"\n") < least and time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
        grown = journal.read_bytes()
        assert grown.startswith(lines[: lines.rfind(b"\n") + 1])  # finished work is kept
        lines = grown
        with journal.open("ab") as file:
            file.write(b'{"type":"visit_fini')  # a partial last line does no harm
    execution.execute(planned, folder, lambda _: None)
    results = read(folder)
    assert {record.status for record in results.records} == {Status.ok}
    assert results.elapsed_s is not None
    history = list(events(journal))
    checked = [e.key for e in history if isinstance(e, CellChecked)]
    measured = [e.key for e in history if isinstance(e, CellMeasured)]
    assert len(checked) == len(set(checked)) == 9  # no work was done twice
    assert len(measured) == len(set(measured)) == 9
    assert sum(isinstance(e, WorkerStarted) for e in history) >= 3
    assert len(results.num_visits) == 3
    assert min(results.num_visits.values()) >= planned.num_rounds  # independent of the kills and the machine
    numbers = [(e.workload, e.visit) for e in history if isinstance(e, VisitFinished)]
    assert len(numbers) == len(set(numbers))
    execution.execute(planned, folder, lambda _: None)  # resuming a finished run adds no work
    assert read(folder).num_visits == results.num_visits
    assert sum(isinstance(e, RunFinished) for e in events(journal)) == 2


def test_each_kind_is_checked_in_full_once_and_other_sizes_by_the_normal_inputs(tmp_path):
    sizes = {"num_heads": 2, "head_dim": 8, "direction": "inference"}
    kinds = [{"mask": "causal"}, {"mask": "none"}]
    workloads = tuple(Workload(seq_len=length, **sizes, **kind) for kind in kinds for length in (16, 24))
    asked = plan(workloads, (f"{LIARS}:right", "sdpa"), metrics=("latency",))
    execution.execute(asked, tmp_path, lambda _: None, stages=("check",))
    checked = [each for each in events(tmp_path / JOURNAL) if isinstance(each, CellChecked)]
    probes = {(each.workload, each.implementation): len(each.agreement.probes) for each in checked}
    for first, second in (workloads[:2], workloads[2:]):
        for implementation in ("right", "sdpa"):
            assert probes[first.id, implementation] > 2
            assert probes[second.id, implementation] == 1


def test_a_fresh_process_has_what_takes_long_to_import_already(tmp_path):
    for names, preloaded in ((("sdpa",), None), (("transformers_sdpa", "sdpa"), "transformers.modeling_utils")):
        client = execution.client_for(plan(implementations=names, allocator="retain"), tmp_path)
        assert client.template.environment.get(PRELOADED) == preloaded
        assert ALLOCATORS["retain"].items() <= client.template.environment.items()
