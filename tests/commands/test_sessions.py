"""Every command that reads a stored session, and every report, on sessions with all kinds of trouble."""

import json
from functools import cache
from pathlib import Path

import msgspec
import pytest

from attnbench.analysis import comparisons
from attnbench.analysis.results import Results, read
from attnbench.cluster.shares import merge, split
from attnbench.commands import OUTPUT, ExitCode, running, terminal
from attnbench.plugins import plugs
from attnbench.reports import cells, exit_status, summary
from attnbench.storage.events import Event, RunFinished, WorkerStarted
from attnbench.storage.journal import HOSTS, JOURNAL, events
from attnbench.storage.records import Counters, Status
from tests import journals
from tests.analysis.gate import scripts
from tests.analysis.gate.test_sides import measured, planned

REPORTS = plugs("attnbench.reports", "REPORT")


def of_hosts(folder: Path) -> Results:
    """A run over two hosts; the share of a third one is lost."""
    names = ("sdpa", "fused")
    plan = journals.write(folder / "plan", journals.workloads(seq_len=(16, 32, 64, 128)), names, num_epochs=1).plan
    started, shares = next(events(folder / "plan" / JOURNAL)), split(plan, 1)
    for host, share in zip("ab", shares, strict=False):
        journals.write(folder / "run" / HOSTS / host / share, shares[share].workloads, names, num_epochs=4)
    merge(folder / "run", started, shares, dict.fromkeys([*shares][2:], "no host is left"))
    return read(folder / "run")


def contended(event: Event) -> Event:
    """Let other programs and the hypervisor have most of the processors' time."""
    if isinstance(event, WorkerStarted | RunFinished):
        total_s = 100.0 * isinstance(event, RunFinished)
        load = Counters(
            began_s=1.0, total_s=total_s, idle_s=0.0, stolen_s=total_s / 4, own_s=total_s / 4, free_bytes=2**30
        )
        return msgspec.structs.replace(event, counters=load)
    return event


SESSIONS = {
    "doubtful": lambda folder: scripts.run(folder, scripts.disturbed),
    "sound": scripts.run,
    "contended": lambda folder: scripts.run(folder, contended),
    "noisy": lambda folder: scripts.run(folder, scripts.shaken),
    "unfinished": lambda folder: scripts.run(folder, scripts.killed),
    "hosts": of_hosts,
    "lost": lambda folder: scripts.run(folder, scripts.ends(Status.lost)),
    "all lost": lambda folder: scripts.run(folder, scripts.all_end(Status.lost)),
    "untimed": lambda folder: scripts.run(folder, scripts.untimed),
    "elsewhere": lambda folder: scripts.run(folder, scripts.elsewhere),
    "sides": lambda folder: measured(folder, planned("x", budget_s=20.0)),
    "sides, cut short": lambda folder: scripts.rewrite(SESSIONS["sides"](folder).folder, scripts.killed),
    "page faults": lambda folder: journals.write(folder, journals.workloads(seq_len=(128, 2048)), ("sdpa", "fused")),
}


@pytest.fixture(scope="module")
def sessions(tmp_path_factory):
    return cache(lambda name: SESSIONS[name](tmp_path_factory.mktemp("session")))


@pytest.fixture
def called(called):
    """Call a command; return its output. Its exit code must be one of an answer, or one of `more`."""

    def call(*arguments: object, more: frozenset[int] = frozenset()) -> str:
        ended = called(*arguments)
        assert ended.returncode in {0, 1, 3, 4} | more, ended.stderr
        return ended.stdout

    return call


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SESSIONS)
def test_every_report_presents_any_session(name, sessions, called, tmp_path):
    folder = sessions(name).folder
    for kind in REPORTS:
        text = called("report", folder, "--format", kind, "--json", "--to", tmp_path / REPORTS[kind].file)
        assert json.loads(text)["format"] == kind
    called("history", folder, more={ExitCode.wrong_usage})  # there may be nothing to follow


@pytest.mark.parametrize("name", SESSIONS)
def test_a_gate_judges_any_session_on_screen_in_files_and_as_json(name, sessions, called, tmp_path):
    session, base = sessions(name), sessions("sound")
    arguments = [session.folder] if session.plan.sides is not None else [base.folder, session.folder]
    called("gate", *arguments, "--to", tmp_path)
    assert json.loads(called("gate", *arguments, "--json")) == json.loads((tmp_path / "gate.json").read_text())


@pytest.mark.parametrize("name", SESSIONS)
def test_the_end_of_a_run_shows_any_session(name, sessions, capsys):
    results = sessions(name)
    end = exit_status.of_run(results) if results.plan.sides is None else exit_status.of_sides(results)
    for output in ("is_quiet", "is_verbose"):
        setattr(OUTPUT, output, True)
        running.print_report(results, end, lambda: terminal.print_results(results))
        assert capsys.readouterr().out
        setattr(OUTPUT, output, False)
    terminal.print_check(results, {})
    terminal.print_results(results)
    capsys.readouterr()
    OUTPUT.is_json = True
    running.print_report(results, end, lambda: pytest.fail("this is no JSON"))
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == ExitCode[end.ending.name]


def test_the_sessions_have_warnings_doubts_lost_cells_and_several_hosts(sessions):
    doubted = {name for name in SESSIONS if comparisons.doubts(sessions(name))}
    assert {"doubtful", "contended"} <= doubted
    assert summary.troubles(sessions("unfinished"))
    assert any(cell.warnings for cell in cells.all_cells(sessions("page faults")).values())
    assert all(any(each.status is Status.lost for each in sessions(name).records) for name in ("lost", "hosts"))
    assert sessions("hosts").hosts == ("a", "b")
