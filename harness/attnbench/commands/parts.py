"""Parts of a sweep: `attnbench run --shard K/N` measures one, and `attnbench report RUN RUN ...` joins several."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench.cluster.shares import merged, part
from attnbench.plugins import name_of
from attnbench.storage import events
from attnbench.storage.events import SCHEMA, Plan
from attnbench.storage.files import writing_to
from attnbench.storage.journal import JOURNAL, journal_of, write
from attnbench.storage.journal import events as read_events
from attnbench.storage.records import FALSE_SHARE

MAY_DIFFER = {
    **dict.fromkeys(("sweep", "model"), ""),
    **dict.fromkeys(("workloads", "implementations", "mixes", "unasked", "ladders", "alone"), ()),
    **dict.fromkeys(("budget_s", "memory_limit_bytes", "seed"), 0),
    "digests": {},
    "left_out": {},
    "false_share": FALSE_SHARE,
}
"""Fields of a plan that runs over parts of it need not share, with a value for comparison."""


def join(runs: Sequence[Path]) -> Path:
    """Merge finished runs over different shapes, such as parts of `attnbench run --shard`, next to the first of them.

    Returns the folder of the new run.

    Raises:
        ValueError: a run has not finished, two runs share a shape, they differ in more than their shapes, or the folder
            cannot be written.
        DamagedError: a journal is damaged.
    """
    measured = [(run.name, list(read_events(journal_of(run)))) for run in runs]
    starts = [event for _, history in measured for event in history if isinstance(event, events.RunStarted)]
    plans = [started.plan for started in starts]
    for run, (_, history), plan in zip(runs, measured, plans, strict=True):
        has_finished = isinstance(history[-1], events.RunFinished)
        if not has_finished:
            raise ValueError(f"{run} has not finished: continue it first (attnbench run --resume {run.name})")
        if _common(plan) != _common(plans[0]):
            raise ValueError(f"{run} and {runs[0]} are no parts of one run: they differ in more than their shapes")
    workloads = tuple(workload for plan in plans for workload in plan.workloads)
    places = Counter(workload.id for workload in workloads)
    if twice := [name for name, number in places.items() if number > 1]:
        raise ValueError(f"several runs have {twice[0]}: attnbench gate compares two runs of the same shapes")
    left_out = defaultdict[str, dict[str, None]](dict)
    for plan in plans:
        for name, ids in plan.left_out.items():
            left_out[name] |= dict.fromkeys(ids)
    whole = msgspec.structs.replace(
        plans[0],
        workloads=workloads,
        budget_s=sum(plan.budget_s for plan in plans),
        false_share=min(FALSE_SHARE, sum(plan.false_share for plan in plans)),
        left_out={name: tuple(ids) for name, ids in left_out.items()},
    )
    folder = runs[0].with_name(f"{runs[0].name}-joined")
    started = msgspec.structs.replace(starts[0], schema=SCHEMA, run=folder.name, plan=whole)
    with writing_to(folder):
        write(folder / JOURNAL, merged(started, measured, (), is_over=True))
    return folder


def _common(plan: Plan) -> tuple[Plan, dict[str, str | None]]:
    """The fields that parts of a run share, and the digests of their implementations."""
    digests = {name_of(spec): plan.digests.get(spec) for spec in plan.specs.values()}
    return msgspec.structs.replace(plan, **MAY_DIFFER), digests


def shard(plan: Plan, text: str) -> Plan:
    """The part K/N of a plan, as in 2/8: the second of eight parts that several machines measure.

    Raises:
        ValueError: there is no such part.
    """
    place, _, number = text.partition("/")
    most = len(plan.workloads)
    if not (place.isdecimal() and number.isdecimal() and 1 <= int(place) <= int(number) <= most):
        allowed = f"give K/N with 1 <= K <= N <= {most}, the number of shapes, as in 1/{min(2, most)}"
        raise ValueError(f"--shard {text} is not allowed: {allowed}")
    return part(plan, int(place) - 1, int(number))
