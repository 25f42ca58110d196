"""Where runs lie: found by name, folder or age below the folder of results, and copied elsewhere."""

import shutil
from pathlib import Path

from attnbench.storage.journal import JOURNAL, PACKED, has_journal, journal_of


def find_runs(results: Path) -> list[Path]:
    """The run folders below `results`, oldest first: by name, which begins with the time."""
    return sorted(folder for folder in (results / "runs").glob("*") if has_journal(folder))


def find_run(name: str, results: Path) -> Path:
    """The folder of a run given by its name below `results`, its folder, or its journal.

    Raises:
        ValueError: there is none; the message names the newest runs that there are.
    """
    for candidate in (results / "runs" / name, Path(name)):
        if candidate.is_dir() and has_journal(candidate):
            return candidate
        if candidate.name in {JOURNAL, PACKED} and candidate.exists():
            return candidate.parent
    newest = [folder.name for folder in find_runs(results)[-5:]]
    none = f"{results / 'runs'} holds none; begin with attnbench run"
    known = f"the newest are {', '.join(newest)}"
    raise ValueError(f"there is no run {name}; {known if newest else none}")


def newest_run(results: Path) -> Path:
    """The newest run below `results`.

    Raises:
        ValueError: there is none.
    """
    found = find_runs(results)
    if not found:
        raise ValueError(f"{results / 'runs'} holds no runs: begin with attnbench run, or name another --results DIR")
    return found[-1]


def copy_journal(folder: Path, target: Path) -> None:
    """Copy a run's journal into another folder, which is made if need be.

    Raises:
        ValueError: the target cannot be written.
    """
    try:
        target.mkdir(parents=True, exist_ok=True)
        journal = journal_of(folder)
        shutil.copyfile(journal, target / journal.name)
    except OSError as error:
        raise ValueError(f"cannot write to {target}: {error.strerror}; choose another folder with --to") from None
