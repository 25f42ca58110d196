"""`attnbench fastest`: recommend an implementation for these shapes, or find the size from which another is faster."""

import math
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import structs

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.conclusion import Conclusion, factor
from attnbench.analysis.policy import learn
from attnbench.analysis.recommendation import Recommendation, recommend
from attnbench.analysis.results import Results
from attnbench.api import read_first_calls
from attnbench.commands import OUTPUT, Command, running
from attnbench.commands.options import TimingOptions
from attnbench.commands.terminal import print_table, print_troubles
from attnbench.console import say
from attnbench.processes.execution import new_folder
from attnbench.processes.planning import plan_to_choose, plan_to_search
from attnbench.reports import exit_status, recommended, summary, titles, verdict
from attnbench.storage.events import Plan
from attnbench.storage.files import writing_to
from attnbench.units import percent

OPTIONS = TimingOptions(sweep="fastest")
AGAIN = {"--memory", "--deterministic", "--policy"}  # options that go with --resume, but not with --along


def fastest(
    *,
    options: TimingOptions = OPTIONS,
    memory: float = 0.0,
    is_deterministic: bool = False,
    along: str = "",
    low: int = 0,
    high: int = 0,
    policy: Path | None = None,
    results: Path = Path("results"),
    resume: str | None = None,
) -> Conclusion:
    """Recommend an implementation for these shapes on this machine, with its lead, certainty and memory.

    The answer takes a minute at most. With --along, it is the size at which the faster of two implementations changes.
    With --policy, a sweep's answers are learned as a policy: a table of winners.

    Options:
        memory (SIZE): Exclude implementations that need more memory beyond their inputs, as in 512MiB or 8GiB.
        is_deterministic: Exclude implementations whose answer to the same input varies.
        along (AXIS): Find the size at which the faster one of each pair of the named implementations changes: length
            (query and key), seq_len, kv_len, num_heads, batch_size or head_dim.
        low (--from N): First size of --along. 0: depends on the axis.
        high (--to N): Last size of --along. 0: depends on the axis.
        policy (FILE): Learn a policy from all workloads, and write it here.

    Examples:
        attnbench fastest --model smollm2-135m --set seq_len=1024
        attnbench fastest mine.py:mine sdpa --set seq_len=256 --memory 512MiB
        attnbench fastest fused sdpa --along length --from 32 --to 2048
        attnbench fastest --sweep quick --policy results/policy.json
    """
    if along and (ignored := sorted(AGAIN & options.typed)):
        raise ValueError(f"--along does not go with {', '.join(ignored)}: leave one of them out")
    if (low or high) and not along:
        raise ValueError("--from and --to bound --along AXIS: give that, too, as in --along length")
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "fastest", AGAIN)
    else:
        planned = _search_plan(options, along, low, high) if along else plan_to_choose(options.plan())
        folder = new_folder(results, f"along-{along}" if along else planned.sweep)
    if policy is not None:
        _require_writable(policy)  # before measuring
    hint = running.how_to_resume(planned, folder)
    limits: dict[str, Any] = {"memory_bytes": int(memory), "is_deterministic": is_deterministic}
    then = partial(read_first_calls, **limits) if "choose" in planned.stages else None
    measured = running.execute(planned, folder, hint=hint, show_partial=running.print_partial, then=then)
    if "choose" not in planned.stages:
        end = exit_status.of_search(measured)
        running.print_report(measured, end, lambda: print_crossings(measured), found=())
        return end
    choices = recommend(measured, **limits)
    learned: verdict.Policy | None = None
    try:
        learned = None if policy is None else _learn_policy(measured, policy)
    finally:  # even if no policy can be learned, print the measurements
        end, show = exit_status.of_choice(measured, choices), print_recommendations
        running.print_report(measured, end, lambda: show(measured, choices, learned), found=choices, policy=learned)
    return end


def _search_plan(options: TimingOptions, along: str, low: int, high: int) -> Plan:
    """Plan a search along an axis; times are relative to the last named implementation, or to sdpa."""
    asked = options.plan(baseline=options.named[-1] if options.named else "sdpa")
    return plan_to_search(asked, options.named, along, low, high)


def _require_writable(policy: Path) -> None:
    if policy.is_dir():
        raise ValueError(f"--policy {policy} is a folder: name a file, as in {policy / 'policy.json'}")
    with writing_to(policy.parent, "--policy"):
        pass


def _learn_policy(measured: Results, file: Path) -> verdict.Policy:
    """Learn a policy from a run, write it to a file, and return its summary."""
    table = learn(measured)
    table.save(file)
    return verdict.Policy(
        file=str(file),
        chosen=dict(Counter(row.winner for row in table.rows).most_common()),
        workloads=len(table.rows),
        regret=structs.asdict(table.regret) if len(table.rows) > 1 else None,  # undefined for one shape
        seconds=table.evidence.seconds,
    )


def print_recommendations(results: Results, choices: Sequence[Recommendation], learned: verdict.Policy | None) -> None:
    """Print warnings, the learned policy, and for each workload the answer, times, and exclusions."""
    print_troubles(results)
    if learned is not None:
        _answer(results, _policy_sentence(learned))
    names = titles.names(results)
    for each in choices:
        if len(choices) > 1:
            say(names[each.workload.id], "bold")
        _answer(results, recommended.answer(each))
        if OUTPUT.is_quiet:
            continue
        if each.seconds:
            print_table(
                ("implementation", "time of a call", "than the choice", "peak memory"), recommended.figures(each)
            )
        for line in recommended.of_excluded(each, is_verbose=OUTPUT.is_verbose):
            say(line, "dim")
        say("")
    _print_foot(results)


def print_crossings(results: Results) -> None:
    """Print where each pair of implementations crosses over, and the ratio of their times at each size.

    Undecided ratios are marked; --quiet leaves out the tables of ratios.
    """
    print_troubles(results)
    for crossing in recommended.crossings(results):
        if len(results.plan.ladders) > 1:
            say(titles.names(results)[crossing.workload], "bold")
        _answer(results, crossing.answer)
        if crossing.points and not OUTPUT.is_quiet:
            rows = [
                (str(value), factor(math.exp(each.log)), "" if each.sign else "undecided", str(each.num_processes))
                for value, each in crossing.points.items()
            ]
            print_table((crossing.axis, "{} next to {}".format(*crossing.implementations), "", "processes"), rows)
    _print_foot(results)


def _answer(results: Results, text: str) -> None:
    say(f"{'doubtful: ' if doubts(results) else ''}{text}", "bold")


def _print_foot(results: Results) -> None:
    if not OUTPUT.is_quiet:
        say(" ".join(f"{line.rstrip('.')}." for line in summary.machine(results)), "dim")
        say(f"Full report: attnbench report {results.folder}", "dim")


def _policy_sentence(policy: verdict.Policy) -> str:
    """Summarise a policy: its choices, their leave-one-out regret, the regret of always choosing sdpa, and its file."""
    chosen = ", ".join(f"{name} at {count}" for name, count in policy.chosen.items())
    text = f"Policy: {chosen} of {policy.workloads} shape{'s' * (policy.workloads > 1)}"
    if regret := policy.regret:
        text += f"; on average, calls chosen by the nearest other shape are {percent(regret['mean'])} slower than the "
        text += f"fastest ({percent(regret['sdpa_mean'])} if sdpa is always chosen)"
    return f"{text}. The table is in {policy.file}."


COMMAND = Command(fastest, order=10)
