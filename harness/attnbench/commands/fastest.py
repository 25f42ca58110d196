"""`attnbench fastest`: one recommendation for these shapes on this machine."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, ResultsFolder, Resume, TimingOptions

OPTIONS = TimingOptions(sweep="fastest")
AGAIN = {"names", "--implementation", "--memory", "--deterministic", "--batch-invariant", "--policy"}
"""What may stand next to --resume: what is executed, and what is asked of what was measured."""


def fastest(
    *,
    options: TimingOptions = OPTIONS,
    seq_len: Annotated[int | None, typer.Option(min=1, metavar="T", help="The same as --set seq_len=T.")] = None,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Only what needs no more beyond its inputs, as in 512MiB or 8GiB.")
    ] = "",
    is_deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Only what gives the same answer to the same input.")
    ] = False,
    with_gradients: Annotated[
        bool, typer.Option("--gradients", help="A forward and a backward pass: --set direction=forward_backward.")
    ] = False,
    is_batch_invariant: Annotated[
        bool,
        typer.Option("--batch-invariant", help="Only what answers the same to the last bit whatever else is computed."),
    ] = False,
    searches: Annotated[
        bool, typer.Option("--changes/--no-changes", help="Look for the length from which on the answer changes.")
    ] = True,
    policy: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Learn a policy from all workloads, and write it here.")
    ] = None,
    results: ResultsFolder = Path("results"),
    resume: Resume = None,
    as_json: AsJson = False,
) -> None:
    """Recommend an implementation for these shapes on this machine: which, by how much, how sure, and what it needs.

    The answer takes a minute at most. With --policy, a sweep's answers are learned as a policy (attnbench.attention).
    """
    from attnbench.analysis.recommendation import Limits
    from attnbench.commands import recommending, running
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import plan_to_choose
    from attnbench.reports import recommended

    limits = Limits(memory_bytes=recommending.bytes_of(memory), is_deterministic=is_deterministic)
    if resume is not None:
        folder, planned = running.to_resume(options.context, resume, results, AGAIN)
        if planned.command != "fastest":
            raise ValueError(f"{resume} does not look for the fastest: go on with {planned.resume_command(resume)}")
        running.require_named(planned, planned.implementations, options.named)
    else:
        settings = [*(options.settings or ())]
        settings += [f"seq_len={seq_len}"] if seq_len else []
        settings += ["direction=forward_backward"] if with_gradients else []
        _require_once(options.settings or (), settings)
        selection = replace(options, settings=settings).selection()
        planned = plan_to_choose(selection, searches=searches and policy is None)
        folder = new_folder(results, planned.sweep)
    if policy is not None:
        recommending.require_learnable(planned, policy)
    measured = running.execute(planned, folder, kept=running.kept(planned, folder), named=options.named)
    found = recommending.choose(measured, limits, is_batch_invariant=is_batch_invariant)
    learned = None
    try:
        learned = recommending.learn(measured, policy) if policy is not None else None
    finally:  # where nothing can be learned, what was measured is said all the same
        if as_json:
            of_policy = {} if learned is None else {"policy": recommending.policy_facts(*learned)}
            typer.echo(json.dumps(recommended.facts(measured, found) | of_policy, indent=2))
        else:
            recommending.print_recommendations(measured, found, learned)
    recommending.conclude(measured, found)


def _require_once(typed: Sequence[str], settings: Sequence[str]) -> None:
    """Check that what an option stands for was not set to something else, too.

    Raises:
        ValueError: it was.
    """
    from attnbench.workloads.sweep import parse_settings

    before, names = parse_settings(typed), {"seq_len": "--seq-len", "direction": "--gradients"}
    for axis, values in parse_settings(settings[len(typed) :]).items():
        if before.get(axis, values) != values:
            given = f"{names[axis]} and --set {axis}={','.join(before[axis])}"
            raise ValueError(f"{given} contradict each other: {names[axis]} is --set {axis}={values[0]}; give one")


COMMAND = Command(
    function=fastest,
    order=15,
    examples=(
        "attnbench fastest --model smollm2-135m --phase prefill --seq-len 1024",
        "attnbench fastest --set seq_len=1024 --set mask=causal --gradients",
        "attnbench fastest mine.py:mine sdpa --set seq_len=256 --memory 512MiB",
        "attnbench fastest --sweep quick --policy results/policy.json",
    ),
)
