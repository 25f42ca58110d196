"""`attnbench fastest`: one recommendation for these shapes on this machine, or where two change places."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnbench.commands import Command
from attnbench.commands.options import TimingOptions

if TYPE_CHECKING:
    from attnbench.storage.events import Plan

OPTIONS = TimingOptions(sweep="fastest")
AGAIN = {"--memory", "--deterministic", "--policy"}
"""Options that --resume allows."""


def fastest(
    *,
    options: TimingOptions = OPTIONS,
    memory: str = "",
    is_deterministic: bool = False,
    along: str = "",
    low: int = 0,
    high: int = 0,
    policy: Path | None = None,
    results: Path = Path("results"),
    resume: str | None = None,
) -> object:
    """Recommend an implementation for these shapes on this machine: which, by how much, how sure, and what it needs.

    The answer takes a minute at most. With --along, it is the size at which two implementations change places. With
    --policy, a sweep's answers are learned as a policy: a table of winners.

    Options:
        memory (SIZE): Only what needs no more beyond its inputs, as in 512MiB or 8GiB.
        is_deterministic: Only what gives the same answer to the same input.
        along (AXIS): Find where each two of the named change places: along length (query and key), seq_len, kv_len,
            num_heads, batch_size or head_dim.
        low (--from N): Where --along begins. 0: by the axis.
        high (--to N): Where --along ends. 0: by the axis.
        policy (FILE): Learn a policy from all workloads, and write it here.

    Examples:
        attnbench fastest --model smollm2-135m --set seq_len=1024
        attnbench fastest --set seq_len=1024 --set mask=causal --set direction=forward_backward
        attnbench fastest mine.py:mine sdpa --set seq_len=256 --memory 512MiB
        attnbench fastest fused sdpa --along length --from 32 --to 2048
        attnbench fastest mine.py:mine sdpa --along num_heads --set seq_len=128
        attnbench fastest --sweep quick --policy results/policy.json
    """
    from attnbench.analysis.policy import learn
    from attnbench.analysis.recommendation import Limits, recommend
    from attnbench.commands import recommending, running
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import plan_to_choose
    from attnbench.reports import endings

    limits = Limits(memory_bytes=recommending.bytes_of(memory), is_deterministic=is_deterministic)
    if along and (ignored := sorted(AGAIN & options.typed)):
        raise ValueError(f"--along does not go with {', '.join(ignored)}: leave one of them out")
    if (low or high) and not along:
        raise ValueError("--from and --to bound --along AXIS: give that, too, as in --along length")
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "fastest", AGAIN)
    else:
        planned = _along(options, along, low, high) if along else plan_to_choose(options.plan())
        folder = new_folder(results, f"along-{along}" if along else planned.sweep)
    if policy is not None:
        recommending.require_learnable(planned, policy)
    hint = running.how_to_resume(planned, folder)
    measured = running.execute(planned, folder, hint=hint, named=options.named)
    if "choose" not in planned.stages:
        end = endings.of_search(measured)
        running.print_report(measured, end, lambda: recommending.print_crossings(measured), found=())
        return end
    choices = recommend(measured, limits)
    learned: dict[str, Any] = {}
    try:
        if policy is not None:
            table = learn(measured, smallest_effect=measured.plan.smallest_effect)
            table.save(policy)
            learned = recommending.policy_facts(policy, table)
    finally:  # even if no policy can be learned, print the measurements
        end, show = endings.of_choice(measured, choices), recommending.print_recommendations
        running.print_report(measured, end, lambda: show(measured, choices, learned), found=choices, policy=learned)
    return end


def _along(options: TimingOptions, axis: str, low: int, high: int) -> "Plan":
    """The plan of a search along an axis; times are relative to the last of the named."""
    from attnbench.processes.planning import plan_to_search

    baseline = options.named[-1] if options.named else "sdpa"
    return plan_to_search(options.plan(baseline=baseline), options.named, axis, low, high)


COMMAND = Command(fastest, order=15)
