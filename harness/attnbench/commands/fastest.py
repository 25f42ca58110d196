"""`attnbench fastest`: one recommendation for these shapes on this machine, or where two change places."""

from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions

OPTIONS = TimingOptions(sweep="fastest")
AGAIN = {"--memory", "--deterministic", "--policy"}
"""Options that --resume allows."""


def fastest(
    *,
    options: TimingOptions = OPTIONS,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Only what needs no more beyond its inputs, as in 512MiB or 8GiB.")
    ] = "",
    is_deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only what gives the same answer to the same input.")
    ] = False,
    along: Annotated[
        str,
        typer.Option(
            metavar="AXIS",
            help="Find where each two of the named change places: along length (query and key), seq_len, kv_len, "
            "num_heads, batch_size or head_dim.",
        ),
    ] = "",
    low: Annotated[int, typer.Option("--from", min=0, metavar="N", help="Where --along begins. 0: by the axis.")] = 0,
    high: Annotated[int, typer.Option("--to", min=0, metavar="N", help="Where --along ends. 0: by the axis.")] = 0,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Learn a policy from all workloads, and write it here.")
    ] = None,
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Recommend an implementation for these shapes on this machine: which, by how much, how sure, and what it needs.

    The answer takes a minute at most. With --along, it is the size at which two implementations change places. With
    --policy, a sweep's answers are learned as a policy: a table of winners.
    """
    from attnbench.analysis.policy import learn
    from attnbench.analysis.recommendation import recommend
    from attnbench.commands import recommending, running
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import plan_to_choose, plan_to_search
    from attnbench.reports import endings

    memory_bytes = recommending.bytes_of(memory)
    if resume is not None:
        folder, planned = running.to_resume(options, resume, results, "fastest", AGAIN)
    else:
        if along:
            others = {"--memory": memory, "--deterministic": is_deterministic, "--policy": policy}
            if ignored := [name for name, value in others.items() if value]:
                raise ValueError(f"--along does not go with {', '.join(ignored)}: leave one of them out")
            baseline = options.named[-1] if options.named else "sdpa"
            planned = plan_to_search(options.plan(baseline=baseline), options.named, along, low, high)
        elif low or high:
            raise ValueError("--from and --to bound --along AXIS: give that, too, as in --along length")
        else:
            planned = plan_to_choose(options.plan())
        folder = new_folder(results, f"along-{along}" if along else planned.sweep)
    if policy is not None:
        recommending.require_learnable(planned, policy)
    measured = running.execute(planned, folder, kept=running.kept(planned, folder), named=options.named)
    if "choose" not in planned.stages:
        if as_json:
            running.print_report(measured, endings.of_search(measured), found=())
        else:
            recommending.print_crossings(measured)
        running.finish(endings.of_search(measured), is_silent=as_json)
    found = recommend(measured, memory_bytes=memory_bytes, is_deterministic=is_deterministic)
    learned = None
    try:
        if policy is not None:
            learned = policy, learn(measured)
            learned[1].save(policy)
    finally:  # even if no policy can be learned, print the measurements
        if as_json:
            of_policy = None if learned is None else recommending.policy_facts(*learned)
            running.print_report(measured, endings.of_choice(measured, found), found=found, policy=of_policy)
        else:
            recommending.print_recommendations(measured, found, learned)
    running.finish(endings.of_choice(measured, found), is_silent=as_json)


COMMAND = Command(
    function=fastest,
    order=15,
    examples=(
        "attnbench fastest --model smollm2-135m --set seq_len=1024",
        "attnbench fastest --set seq_len=1024 --set mask=causal --set direction=forward_backward",
        "attnbench fastest mine.py:mine sdpa --set seq_len=256 --memory 512MiB",
        "attnbench fastest fused sdpa --along length --from 32 --to 2048",
        "attnbench fastest mine.py:mine sdpa --along num_heads --set seq_len=128",
        "attnbench fastest --sweep quick --policy results/policy.json",
    ),
)
