"""Trials that send SIGKILL to one process of a run or to all of them, and trials of the signals that stop a run."""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from attnbench.analysis.results import read
from attnbench.storage.journal import JOURNAL, find_runs
from studies.torture.trial import TINY, Trial, TrialFolder, ended, note, wait_until, wrong_end

VICTIMS = ("group", "coordinator", "runner")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WHOLE_S = 6.0
"""Approximate duration of a tiny run."""


def kills(folder: Path, number: int, seed: int = 0) -> Iterator[Trial]:
    """Kill runs at random moments, and resume each."""
    draws = random.Random(seed)
    for place in range(number):
        victim, moment_s = VICTIMS[place % len(VICTIMS)], draws.uniform(0.3, WHOLE_S)
        yield killed(TrialFolder(folder / f"kill{place}"), victim, moment_s)


def killed(place: TrialFolder, victim: str, moment_s: float) -> Trial:
    """Kill `victim` in one run, and resume the run. If only a worker is killed, the run must first end by itself."""
    what = f"SIGKILL to the {victim} after {moment_s:.1f} s"
    process = place.start("run", *TINY)
    time.sleep(moment_s)
    before = lines(place)
    with contextlib.suppress(ProcessLookupError, psutil.Error):
        own = psutil.Process(process.pid)
        family = own.children(recursive=True)
        if victim == "group":
            for each in (own, *family):
                each.kill()
        elif victim == "coordinator":
            own.kill()
        elif family:
            family[-1].kill()
    code, printed = ended(process)
    due = (0, 1, 3) if victim == "runner" else (0, 1, 3, -signal.SIGKILL)
    died = wrong_end(code, printed, due)
    if not wait_until(lambda: not living(place)):
        died = died or f"processes are left: {', '.join(living(place))}"
    lost = "" if lines(place)[: len(before)] == before else "finished lines are gone"
    return concluded(place, Trial(subject="kills", what=what, died=died, lost=lost))


def signals(folder: Path, number: int, seed: int = 1) -> Iterator[Trial]:
    """Stop runs with each of SIGNALS in turn; in every second round, send each signal twice."""
    draws = random.Random(seed)
    for turn in range(number):
        asked, is_twice = SIGNALS[turn % len(SIGNALS)], bool(turn // len(SIGNALS) % 2)
        yield stopped(TrialFolder(folder / f"signal{turn}"), asked, draws.uniform(0.3, WHOLE_S), is_twice=is_twice)


def stopped(place: TrialFolder, asked: signal.Signals, moment_s: float, *, is_twice: bool) -> Trial:
    """Stop one run with the signal `asked`, and resume it.

    The stopped run must leave no process. If its exit code is that of the signal, it must leave no temporary file, and
    if its journal has a line, it must print one line that says how to go on.
    """
    what = f"{asked.name}{' twice' * is_twice} after {moment_s:.1f} s"
    process = place.start("run", *TINY)
    time.sleep(moment_s)
    for _ in range(1 + is_twice):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, asked)
        time.sleep(0.05)
    code, printed = ended(process)
    due = (0, 1, 3, 128 + asked, -asked)  # negative: the signal came before the command had installed its handlers
    died = wrong_end(code, printed, due)
    if not wait_until(lambda: not living(place)):
        died = died or f"processes are left: {', '.join(living(place))}"
    unclear = ""
    if code == 128 + asked:
        is_begun = bool(lines(place))
        ways = ("continue with: attnbench run --resume", "write its reports with: attnbench report")
        if is_begun and sum(map(printed.count, ways)) != 1:
            unclear = f"no line says how to go on: {note(printed)}"
        if place.left():
            unclear = unclear or f"temporary files are left: {', '.join(place.left())}"
    return concluded(place, Trial(subject="signals", what=what, died=died, unclear=unclear))


def concluded(place: TrialFolder, trial: Trial) -> Trial:
    """Resume the run of a trial to its end, and return the trial with the failures of the resumed run added."""
    runs = find_runs(place.folder / "results")
    if not runs or not lines(place) or trial.died:
        return trial
    before = lines(place)
    code, printed = place.run("run", "--resume", runs[0].name)
    died = wrong_end(code, printed, (0, 1, 3))
    results = None if died else read(runs[0])
    lost = trial.lost or ("" if lines(place)[: len(before)] == before else "going on has changed finished lines")
    if results is not None and (results.elapsed_s is None or len(results.records) != 2 * len(results.plan.workloads)):
        lost = lost or f"{len(results.records)} cells, and not all"
    return Trial(
        subject=trial.subject, what=trial.what, died=died and f"resumed: {died}", lost=lost, unclear=trial.unclear
    )


def lines(place: TrialFolder) -> list[bytes]:
    """Read the complete lines of the run's journal; [] if there is no run."""
    runs = find_runs(place.folder / "results")
    return (runs[0] / JOURNAL).read_bytes().split(b"\n")[:-1] if runs else []


def living(place: TrialFolder) -> list[str]:
    """List the processes of the trial that are still alive."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get("TMPDIR") == str(place.temporary) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {' '.join(process.cmdline()[-2:])}")
    return found
