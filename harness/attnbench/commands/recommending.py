"""The output of `fastest` on the terminal: the answer first, then its basis."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.conclusion import factor
from attnbench.analysis.recommendation import Recommendation, points
from attnbench.analysis.results import Results
from attnbench.commands import VERBOSITY
from attnbench.commands.terminal import print_table, print_troubles, say
from attnbench.plugins import name_of
from attnbench.reports import recommended, story, titles
from attnbench.storage.events import Plan
from attnbench.storage.files import writing_to
from attnbench.units import percent

if TYPE_CHECKING:
    from attnbench.workloads.policy import Policy

SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def bytes_of(text: str) -> int:
    """Parse a size into bytes: 512MiB, 8GiB, 8G, 1000000; "" is 0.

    Raises:
        ValueError: it is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if text and found is None:
        raise ValueError(
            f"--memory {text} is no size: give a number of bytes, or one with a unit, as in 512MiB or 8GiB"
        )
    return int(float(found[1]) * 2 ** SIZES[found[2].upper()]) if found else 0


def print_recommendations(
    results: Results, choices: Sequence[Recommendation], learned: tuple[Path, "Policy"] | None = None
) -> None:
    """Print warnings, the `learned` policy, and for each workload the answer, times, and exclusions."""
    print_troubles(results)
    head = "doubtful: " if doubts(results) else ""
    if learned is not None:
        say(f"{head}{_policy_sentence(*learned)}", "bold")
    names = titles.names(results)
    for each in choices:
        if len(choices) > 1:
            say(names[each.workload.id], "bold")
        say(f"{head}{recommended.answer(each)}", "bold")
        if VERBOSITY.is_quiet:
            continue
        if each.seconds:
            say("")
            print_table(("implementation", "time of a call", "to the choice", "peak memory"), recommended.figures(each))
        for line in recommended.of_excluded(each, is_verbose=VERBOSITY.is_verbose):
            say(line, "dim")
        say("")
    _print_foot(results)


def print_crossings(results: Results) -> None:
    """Print the crossovers of each pair, and the verdict at each value."""
    print_troubles(results)
    head = "doubtful: " if doubts(results) else ""
    for ladder, pair, changes in recommended.crossings(results):
        if len(results.plan.ladders) > 1:
            say(titles.names(results)[ladder.workloads[0]], "bold")
        say(f"{head}{recommended.of_crossing(results, ladder, pair, changes)}", "bold")
        known = points(results, ladder, *pair)
        if known and not VERBOSITY.is_quiet:
            rows = [
                (str(value), factor(math.exp(each.log)), "" if each.sign else "undecided", str(each.num_processes))
                for value, each in sorted(known.items())
            ]
            print_table((ladder.axis, f"{pair[0]} next to {pair[1]}", "", "processes"), rows)
    _print_foot(results)


def _print_foot(results: Results) -> None:
    if not VERBOSITY.is_quiet:
        say(f"{' '.join(story.machine(results))} All of it: attnbench report {results.folder}", "dim")


def require_learnable(plan: Plan, path: Path) -> None:
    """Check before measuring that a policy can be learned from a plan, and written.

    Raises:
        ValueError: it cannot; the message says what to change.
    """
    from attnbench.analysis.policy import is_named
    from attnbench.workloads.policy import OTHERWISE, is_plain

    if path.is_dir():
        raise ValueError(f"--policy {path} is a folder: name a file, as in {path / 'policy.json'}")
    with writing_to(path.parent, "--policy"):
        pass
    if not {name_of(spec) for spec in plan.implementations if is_named(spec)} - {OTHERWISE}:
        raise ValueError(
            f"--policy chooses between {OTHERWISE} and others that have a name, and none is given: name some, or none, "
            "which is all (attnbench list)"
        )
    if not any(map(is_plain, plan.asked)):
        raise ValueError(
            "--policy is of attention alone, without dropout, sinks or a value_dim of its own, and no workload is such "
            "a one: give --set scope=attention"
        )


def policy_facts(path: Path, policy: "Policy") -> dict[str, Any]:
    """The policy for JSON; the regret is None if only one workload was measured."""
    costs = {name: getattr(policy.regret, name) for name in ("mean", "worst", "sdpa_mean", "sdpa_worst")}
    return {
        "file": str(path),
        "chosen": dict(Counter(row.winner for row in policy.rows)),
        "workloads": len(policy.rows),
        "regret": costs if len(policy.rows) > 1 else None,
        "seconds": policy.evidence.seconds,
    }


def _policy_sentence(path: Path, policy: "Policy") -> str:
    """The choices, their leave-one-out regret next to that of always sdpa, and the file."""
    counts, number = Counter(row.winner for row in policy.rows).most_common(), len(policy.rows)
    text = f"Policy: {', '.join(f'{name} at {count}' for name, count in counts)} of {number} shape{'s' * (number > 1)}"
    if number > 1:
        mean, alone = percent(policy.regret.mean), percent(policy.regret.sdpa_mean)
        text += "; chosen by the nearest other shape, calls are "
        text += f"{mean} slower than the best in the mean (sdpa alone: {alone})"
    return f"{text}. The table is {path}."
