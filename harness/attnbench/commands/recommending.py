"""What `fastest` and `crossover` say, and what the same gives from Python: the answer first, then its grounds."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import typer

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.recommendation import Limits, Recommendation, points, recommend
from attnbench.analysis.results import Results
from attnbench.commands import VERBOSITY, ExitCode, running
from attnbench.commands.terminal import print_table, print_troubles, say
from attnbench.processes import invariance
from attnbench.reports import cells, recommended
from attnbench.storage.invariance_events import Asked
from attnbench.storage.records import FALSE_SHARE, Verdict
from attnbench.units import duration, percent

SIZES = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
MOST_CERTIFIED = 3
"""Of those that are not invariant to the batch, so many are tried before there is no recommendation."""


def bytes_of(text: str) -> int:
    """A size as typed, in bytes: 512MiB, 8GiB, 8G, 1000000; "" is 0.

    Raises:
        ValueError: it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if text and found is None:
        raise ValueError(
            f"--memory {text} is no size: give a number of bytes, or one with a unit, as in 512MiB or 8GiB"
        )
    return int(float(found[1]) * 2 ** SIZES[found[2].upper()]) if found else 0


def choose(results: Results, limits: Limits, *, is_batch_invariant: bool = False) -> list[Recommendation]:
    """The recommendations; with `is_batch_invariant` whoever is not is excluded, and the next one tried."""
    found = recommend(results, limits)
    for _ in range(MOST_CERTIFIED if is_batch_invariant else 0):
        broken = {name: reason for each in found for name, reason in _not_invariant(results, each).items()}
        if not broken:
            break
        limits = replace(limits, without={**limits.without, **broken})
        found = recommend(results, limits)
    return found


def _not_invariant(results: Results, found: Recommendation) -> dict[str, str]:
    """The choice with the reason, where its answer depends on the batch; empty where it is invariant."""
    specs = {arm.implementation: spec for arm, spec in results.plan.specs.items()}
    if not found.choice:
        return {}
    shape = invariance.shapes((found.workload,))[0]
    asked = Asked(spec=specs[found.choice], workload=shape, baseline=results.plan.baseline, budget_s=0.0, seed=0)
    running.note(f"trying whether {found.choice} is invariant to the batch")
    certificate = invariance.certify(asked, results.plan.timeout_s, lambda _: None)
    if certificate.holds:
        return {}
    why = certificate.failed or ", ".join(law.law for law in certificate.broken) or "nothing could be tried"
    return {found.choice: f"not batch-invariant: {why}"}


def print_recommendations(results: Results, found: Sequence[Recommendation]) -> None:
    """What must be known first; then for each workload the answer, where it changes, the figures, what was excluded."""
    print_troubles(results)
    head = "doubtful: " if doubts(results) else ""
    titles = cells.titles(results)
    for each in found:
        if len(found) > 1:
            say(f"{titles[each.workload.id]}, T={cells.length(each.workload.axes())}", "bold")
        say(f"{head}{recommended.answer(each)}", "bold")
        if text := recommended.of_changes(each):
            say(f"{head}{text}")
        if VERBOSITY.is_quiet:
            continue
        if each.seconds:
            say("")
            print_table(("implementation", "time of a call", "to the choice", "peak memory"), recommended.figures(each))
        for line in recommended.of_excluded(each, is_verbose=VERBOSITY.is_verbose):
            say(line, "dim")
        say("")
    if VERBOSITY.is_quiet:
        return
    floors = [each.standing.floor.largest_log for each in found if each.standing and each.standing.floor]
    floor = max((each for each in floors if each is not None), default=None)
    alike = "" if floor is None else f" Identical code seems up to {percent(floor)} apart here."
    say(f"That another is slower is false in at most {percent(FALSE_SHARE)} of sessions.{alike}", "dim")
    took = "" if results.elapsed_s is None else f" It took {duration(results.elapsed_s)}."
    say(f"For this machine, these shapes and threads.{took} All of it: attnbench report {results.folder}", "dim")


def conclude(results: Results, found: Sequence[Recommendation]) -> NoReturn:
    """Exit as the answer deserves: one that is not clear, or doubtful, is inconclusive; a wrong answer is a finding."""
    if any(record.is_wrong for record in results.records):
        raise typer.Exit(ExitCode.finding)
    is_settled = all(
        each.choice and all(each.verdict(name) is Verdict.equivalent for name in _others(each)) for each in found
    )
    raise typer.Exit(ExitCode.passed if is_settled and not doubts(results) else ExitCode.inconclusive)


def _others(found: Recommendation) -> list[str]:
    leader = found.standing.leader if found.standing is not None else ""
    return [name for name in found.equals if name != leader]


def print_crossings(results: Results) -> None:
    """For each ladder and every two the answer, and what is known at each value."""
    print_troubles(results)
    titles = cells.titles(results)
    head = "doubtful: " if doubts(results) else ""
    found = recommended.crossings(results)
    for ladder, both, changes in found:
        if len(results.plan.ladders) > 1:
            say(titles[ladder.workloads[0]], "bold")
        say(f"{head}{recommended.of_crossing(results, ladder, both, changes)}", "bold")
        known = points(results, ladder, *both)
        if known and not VERBOSITY.is_quiet:
            words = {-1: f"{both[0]} is faster", 1: f"{both[1]} is faster", 0: "not decided"}
            rows = [
                (str(value), f"{math.exp(each.log):.3f}x", words[each.sign], str(each.num_blocks))
                for value, each in sorted(known.items())
            ]
            print_table((ladder.axis, f"{both[0]} to {both[1]}", "verdict", "blocks"), rows)
    if not VERBOSITY.is_quiet:
        say(f"Such an interval is wrong in at most {percent(FALSE_SHARE)} of searches where times cross once.", "dim")
        say(f"All of it: attnbench report {results.folder}", "dim")


def learn(results: Results, path: Path) -> None:
    """Learn a policy from what a run measured, write it, and say what it is worth.

    Raises:
        ValueError: the run has too little to learn from, or the file cannot be written.
    """
    from attnbench.analysis.policy import learn as learned

    policy = learned([results], smallest_effect=results.plan.smallest_effect)
    policy.save(path)
    regret = policy.regret
    chosen = Counter[str]()
    for kind in policy.kinds:
        chosen.update(kind.chosen)
    chosen[policy.otherwise] += policy.evidence.num_workloads - chosen.total()
    known = ", ".join(f"{name} at {number}" for name, number in chosen.most_common() if number)
    mean = f"{percent(regret.mean)} slower than the best in the mean and {percent(regret.worst)} at worst"
    own = f"{results.plan.baseline} alone: {percent(regret.sdpa_mean)} and {percent(regret.sdpa_worst)}"
    say(f"Policy: {known} of {policy.evidence.num_workloads} workloads.", "bold")
    say(f"On workloads that it had not seen it is {mean} ({own}).")
    say(f"It is in {path}; attnbench.attention follows it (ATTNBENCH_POLICY={path}).", "dim")
