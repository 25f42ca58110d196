"""The commands of `attnbench`: every module that defines COMMAND is a command with the name of its file.

The other modules contain shared parts. Heavy modules (torch, pandas, matplotlib) are imported inside functions, so that
--help stays quick.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from attnbench.devices import platforms

platforms.require()

HELPERS = ("frame", "options", "repro", "running", "terminal", "watch")
"""Modules of this package that are not commands; importing them is slow."""


@dataclass(frozen=True)
class Command:
    """A function whose signature and docstring define a command (frame.py); `order` // 100 is its group in help."""

    function: Callable[..., Any]
    order: int


@dataclass(kw_only=True)
class Output:
    """What commands print: text or JSON.

    If `is_quiet`, they omit progress, tables and notes; if `is_verbose`, they also show each step, and every cell.
    """

    is_json: bool = False
    is_quiet: bool = False
    is_verbose: bool = False


OUTPUT = Output()  # set by --json, --quiet and --verbose


class ExitCode(IntEnum):
    """The exit code of a command."""

    passed = 0
    finding = 1
    wrong_usage = 2
    inconclusive = 3
    invalid = 4
    internal = 70  # EX_SOFTWARE of sysexits.h
    interrupted = 130


EXIT_CODES = {
    ExitCode.passed: "pass",
    ExitCode.finding: "a finding (disagreement, failed cell, regression)",
    ExitCode.wrong_usage: "wrong usage",
    ExitCode.inconclusive: "inconclusive: too little could be checked or judged",
    ExitCode.invalid: "an invalid session",
    ExitCode.internal: "an error in attnbench itself",
    ExitCode.interrupted: "interrupted (143 by SIGTERM, 129 by SIGHUP)",
}
"""Meanings of exit codes, for --help."""
RETIRED = {
    "check --empty-rows": "attnbench check --reject empty_rows",
    "check --hidden-nan": "attnbench check --reject hidden_nan",
    "list -i": "attnbench check FILE.py says what its implementations cover",
    "run --dry-run": "attnbench list sweeps has the sizes of sweeps, and --budget 0 ends a run after the check",
    "history --smallest": "attnbench history always reports changes of level above 2 %",
    "baseline": 'attnbench gate --accept --reason "..." stores the baseline',
    "calibrate": "attnbench run predicts the cost of a cell from shorter lengths by itself",
    "cluster": "attnbench doctor --cluster ADDRESS examines the hosts",
    "crossover": "attnbench fastest A B --along AXIS finds the size from which the other is faster",
    "demo": "follow the README, or docs/guide.md",
    "export": "attnbench report --format NAME writes a run for another tool",
    "salvage": "attnbench report RUN --salvage keeps the intact parts",
}
"""Removed commands and options, and their replacements."""
