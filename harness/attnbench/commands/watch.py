"""Check again whenever a file is saved: the option --watch of `attnbench check`."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

import typer

from attnbench import plugins
from attnbench.analysis.conclusion import Conclusion
from attnbench.commands import ExitCode, running
from attnbench.commands.frame import say_conclusion
from attnbench.processes.worker_client import Template
from attnbench.units import sanitize_line

POLL_S = 0.1  # seconds between two looks at the files
ENDS = "Ctrl-C ends it"
Stamps = dict[Path, tuple[int, int]]
"""The time of the last change in nanoseconds, and the size in bytes, by file; a missing file is left out."""


def watch(named: Iterable[str], check: Callable[[], Conclusion | ExitCode], templates: Iterable[Template]) -> NoReturn:
    """Call `check` now and after each save of a named file, or of a module in its folder that it imports.

    Before each new check, the templates (the processes that start workers) forget results of the old code. If a check
    raises ValueError or OSError, as for a file with a syntax error, print the message, and wait for the next save.

    Raises:
        ValueError: no named implementation is in a file.
        KeyboardInterrupt: the user ended the command.
    """
    names = list(named)
    if not (files := plugins.sources(names)):
        raise ValueError("--watch needs an implementation in a file: attnbench check mine.py:attention --watch")
    while True:
        files = plugins.sources(names) or files
        seen = stamps(files)  # before the check, so that a save during it counts
        _print_check(check)
        running.print_note(f"watching {', '.join(sorted({file.name for file in files}))}: {ENDS}")
        changed = wait_for_save(files, seen)
        running.print_note(f"\n{time.strftime('%H:%M:%S')} {sanitize_line(changed.name)} was saved")
        for each in templates:
            each.forget_code()


def _print_check(check: Callable[[], Conclusion | ExitCode]) -> None:
    """Call `check` once, and print the conclusion that it returns or the error that it raises.

    Raises:
        KeyboardInterrupt: the check was interrupted.
    """
    try:
        ended = check()
    except (ValueError, OSError) as error:  # an editor may replace a file
        typer.echo(sanitize_line(f"error: {error}"), err=True)
        return
    if not isinstance(ended, Conclusion):
        raise KeyboardInterrupt
    say_conclusion(ended)


def stamps(files: Iterable[Path]) -> Stamps:
    """Return the time of the last change and the size of each file that exists."""
    found = {}
    for file in files:
        try:
            facts = file.stat()
        except OSError:  # an editor may replace a file
            continue
        found[file] = facts.st_mtime_ns, facts.st_size
    return found


def wait_for_save(files: Iterable[Path], seen: Stamps) -> Path:
    """Wait until a file differs from its stamp in `seen` and all files stop changing; return a changed file."""
    files, before = list(files), seen
    while True:
        now = stamps(files)
        changed = [file for file, stamp in now.items() if stamp != seen.get(file)]
        if changed and now == before:
            return changed[0]
        before = now
        time.sleep(POLL_S)
