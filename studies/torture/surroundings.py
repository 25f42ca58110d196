"""Full or read-only disks, limits, two runs at once, and oddly configured machines."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from attnbench.analysis.results import read
from attnbench.storage.journal import JOURNAL, events, find_runs
from studies.torture.trial import TINY, Trial, TrialFolder, ended, note, wrong_end

ENOSPC = "No space left on device"
NOBODY = 65534


def all_of(folder: Path, whole: Path, *, short: bool = False) -> Iterator[Trial]:
    """Yield every trial of this module, fewer if `short` is true; `whole` is the folder of a finished run."""
    yield from disks(folder, whole)
    yield from together(folder, 1 if short else 10)
    for name, trial in (SURROUNDINGS | ({} if short else SLOW)).items():
        place = TrialFolder(folder / name.replace(" ", "_"))
        yield trial(name, place)


def disks(folder: Path, whole: Path) -> Iterator[Trial]:
    """Fill the disk during a run and while reports are written; try two results folders that cannot be written."""
    for what, kilobytes in (("a full disk, while a run is at work", 4), ("a full disk, as reports are written", 96)):
        place = TrialFolder(folder / f"disk{kilobytes}")
        small = place.folder / "small"
        small.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(small)]
        if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:  # noqa: S603
            yield Trial(subject="disks", what=what, skipped="a file system can be mounted by root alone")
            continue
        try:
            yield full(place, small, whole, what)
        finally:
            subprocess.run(["umount", str(small)], check=False)  # noqa: S603, S607
    place = TrialFolder(folder / "readonly")
    (place.folder / "file").write_text("in the way")
    for what, target in (("a folder that is a file", "file/below"), ("a folder that cannot be written", "/proc/here")):
        code, printed = place.run("run", *TINY, "--results", target)
        unclear = "" if "choose another folder with --results" in printed else note(printed)
        yield Trial(subject="disks", what=what, died=wrong_end(code, printed, (2,)), unclear=unclear)


def full(place: TrialFolder, small: Path, whole: Path, what: str) -> Trial:
    """Fill the disk `small` with a run or with reports; enlarge it, and resume the run or write the reports again."""
    if "reports" in what:
        run = small / "runs" / whole.name
        run.mkdir(parents=True)
        shutil.copyfile(whole / JOURNAL, run / JOURNAL)
        command = again = ["report", str(run)]
    else:
        command = ["run", *TINY, "--results", str(small)]
        again = []
    code, printed = place.run(*command)
    died = wrong_end(code, printed, (2,))
    unclear = "" if ENOSPC in printed and str(small) in printed and "attnbench" in printed else note(printed)
    empty = [file.name for file in small.rglob("*") if file.is_file() and not file.stat().st_size]
    lost = f"empty files: {', '.join(empty)}" if [each for each in empty if not each.endswith(".log")] else ""
    runs = find_runs(small)
    before = (runs[0] / JOURNAL).read_bytes().split(b"\n")[:-1] if runs else []
    subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)  # noqa: S603, S607
    again = again or ["run", "--resume", str(runs[0])] if runs else again
    if again and not died:
        code, printed = place.run(*again)
        died = wrong_end(code, printed, (0, 1, 3)) and f"with room again: {note(printed)}"
        if (runs[0] / JOURNAL).read_bytes().split(b"\n")[: len(before)] != before:
            lost = "finished lines are gone"
    return Trial(subject="disks", what=what, died=died, lost=lost, unclear=unclear)


def together(folder: Path, pairs: int) -> Iterator[Trial]:
    """Start two runs at once in one results folder, `pairs` times; then resume one run with two commands at once."""
    for pair in range(pairs):
        place = TrialFolder(folder / f"pair{pair}")
        both = [ended(process) for process in [place.start("run", *TINY), place.start("run", *TINY)]]
        died = next((wrong for code, printed in both if (wrong := wrong_end(code, printed, (0, 1, 3)))), "")
        missing = [each for run in find_runs(place.folder / "results") if (each := _missing(run))]
        lost = "; ".join(missing)
        yield Trial(subject="together", what="two runs at once", died=died, lost=lost)
    place = TrialFolder(folder / "twice")
    place.run("run", *TINY)
    (run,) = find_runs(place.folder / "results")
    lines = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    (run / JOURNAL).write_bytes(b"".join(lines[:3]))
    both = [
        ended(each) for each in [place.start("run", "--resume", run.name), place.start("run", "--resume", run.name)]
    ]
    codes = sorted(code if code is not None else -1 for code, _ in both)
    died = "" if codes in ([0, 2], [2, 3], [0, 0]) else f"exit codes {codes}"
    refused = [printed for code, printed in both if code == 2]  # noqa: PLR2004 - wrong usage
    unclear = "" if all("is being written by another process" in each for each in refused) else note(refused[0])
    what = "one run gone on with twice at once"
    yield Trial(subject="together", what=what, died=died, lost=_missing(run), unclear=unclear)


def _missing(run: Path) -> str:
    """Describe how many of the planned cells (implementations on workloads) a run has; return "" if it has all."""
    found = read(run)
    asked = len(found.plan.workloads) * len(found.plan.implementations)
    return "" if len(found.records) == asked else f"{len(found.records)} of {asked} cells"


def _run(name: str, place: TrialFolder, **variables: str) -> Trial:
    code, printed = place.run("run", *TINY, **variables)
    return _ended(name, place, code, printed)


def _ended(name: str, place: TrialFolder, code: int | None, printed: str) -> Trial:
    died = wrong_end(code, printed, (0, 1, 3))
    runs = find_runs(place.folder / "results")
    lost = "" if died or (runs and any(events(runs[0] / JOURNAL))) else "nothing is stored"
    return Trial(subject="surroundings", what=name, died=died, lost=lost)


def _limited(name: str, place: TrialFolder, limit: str, *, may_fail: bool = False) -> Trial:
    """Run under the `ulimit` command `limit`; if `may_fail` is true, an error without a traceback is accepted, too."""
    code, printed = ended(place.start("run", *TINY, limit=limit))
    if may_fail and code == 2 and "Traceback" not in printed:  # noqa: PLR2004 - wrong usage
        return Trial(subject="surroundings", what=name, unclear="" if "error: " in printed else note(printed))
    return _ended(name, place, code, printed)


def _ordinary_user(name: str, place: TrialFolder) -> Trial:
    if os.geteuid():
        return Trial(subject="surroundings", what=name, skipped="this is one")
    for folder in (place.folder, place.temporary):
        os.chown(folder, NOBODY, NOBODY)
    with contextlib.suppress(PermissionError):
        process = place.start("run", *TINY, user=NOBODY, variables={"HOME": str(place.folder)})
        return _ended(name, place, *ended(process))
    return Trial(subject="surroundings", what=name, skipped="it may not read this installation")


def _elsewhere(name: str, place: TrialFolder) -> Trial:
    """Run in a folder whose name has spaces, quotes, and letters of other alphabets."""
    return _run(name, TrialFolder(place.folder / "mit Leerzeichen 'und' \"mehr\" 注意 ελλ"))


def _clock_goes_back(name: str, place: TrialFolder) -> Trial:
    """Resume a run whose folder name has a date in the future, and then start another run."""
    place.run("run", *TINY)
    (run,) = find_runs(place.folder / "results")
    renamed = run.with_name(f"29991231T235959Z{run.name[16:]}")
    lines = (run / JOURNAL).read_bytes().splitlines(keepends=True)
    (run / JOURNAL).write_bytes(b"".join(lines[:3]))
    run.rename(renamed)
    code, printed = place.run("run", "--resume", renamed.name)
    if wrong := wrong_end(code, printed, (0, 1, 3)):
        return Trial(subject="surroundings", what=name, died=wrong)
    return _run(name, place)


SURROUNDINGS: dict[str, Callable[[str, TrialFolder], Trial]] = {
    "no HOME": lambda name, place: _run(name, place, HOME=""),
    "a locale that does not exist": lambda name, place: _run(name, place, LC_ALL="xx_YY.KOI8"),
    "the locale C without UTF-8": lambda name, place: _run(
        name, place, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0"
    ),
    "spaces, quotes and other scripts in the path": _elsewhere,
    "64 open files": lambda name, place: _limited(name, place, "ulimit -n 64"),
    "12 open files": lambda name, place: _limited(name, place, "ulimit -n 12", may_fail=True),
}
SLOW: dict[str, Callable[[str, TrialFolder], Trial]] = {
    "an ordinary user": _ordinary_user,
    "2 GiB of address space": lambda name, place: _limited(name, place, "ulimit -v 2097152", may_fail=True),
    "a clock that goes back": _clock_goes_back,
    "a narrow terminal": lambda name, place: _run(name, place, COLUMNS="20", TERM="dumb"),
    "no TERM": lambda name, place: _run(name, place, TERM=""),
    "files of 1 KiB at most": lambda name, place: _limited(name, place, "ulimit -f 1", may_fail=True),
}
