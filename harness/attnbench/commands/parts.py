"""Parts of a sweep: `attnbench run --shard K/N` measures one, and `attnbench report RUN RUN ...` joins several."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench.cluster.shares import merged, part
from attnbench.plugins import name_of
from attnbench.storage import events
from attnbench.storage.events import SCHEMA, Plan
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


def join(runs: Sequence[Path], folder: Path) -> None:
    """Merge finished runs over different shapes, such as parts of `attnbench run --shard`, into one run in `folder`.

    Raises:
        ValueError: a run has not finished, two runs share a shape, or they differ in more than their shapes.
        DamagedError: a journal is damaged.
        OSError: the folder cannot be written.
    """
    parts = [list(read_events(journal_of(run))) for run in runs]
    plans = list[Plan]()
    for run, history in zip(runs, parts, strict=True):
        has_finished = isinstance(history[-1], events.RunFinished)
        if not has_finished:
            raise ValueError(f"{run} has not finished: continue it first (attnbench run --resume {run.name})")
        first = history[0]
        assert isinstance(first, events.RunStarted)
        plans.append(first.plan)
    common = [msgspec.structs.replace(plan, **MAY_DIFFER) for plan in plans]
    for run, plan, fixed in zip(runs, plans, common, strict=True):
        codes, expected = (
            {name_of(spec): one.digests.get(spec) for spec in one.specs.values()} for one in (plan, plans[0])
        )
        if fixed != common[0] or codes != expected:
            raise ValueError(f"{run} and {runs[0]} are no parts of one run: they differ in more than their shapes")
    places = Counter(workload.id for plan in plans for workload in plan.workloads)
    if twice := [name for name, number in places.items() if number > 1]:
        raise ValueError(f"several runs have {twice[0]}: attnbench gate compares two runs of the same shapes")
    left_out = defaultdict[str, dict[str, None]](dict)
    for plan in plans:
        for name, ids in plan.left_out.items():
            left_out[name] |= dict.fromkeys(ids)
    whole = msgspec.structs.replace(
        plans[0],
        workloads=tuple(workload for plan in plans for workload in plan.workloads),
        budget_s=sum(plan.budget_s for plan in plans),
        false_share=min(FALSE_SHARE, sum(plan.false_share for plan in plans)),
        left_out={name: tuple(ids) for name, ids in left_out.items()},
    )
    first = parts[0][0]
    assert isinstance(first, events.RunStarted)
    started = msgspec.structs.replace(first, schema=SCHEMA, run=folder.name, plan=whole)
    folder.mkdir(parents=True, exist_ok=True)
    measured = [(run.name, history) for run, history in zip(runs, parts, strict=True)]
    write(folder / JOURNAL, merged(started, measured, (), is_over=True))


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
