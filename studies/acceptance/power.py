"""Slowdowns that are injected: T5 how many are found, T6 how soon. The rivals stand at the same false-alarm rate as we.

A rival's threshold is the 95 % quantile of |log ratio| over its own comparisons of identical code in the same budget,
all cells together (of few, the largest): it too alarms in 5 % of them. The same comparisons, with every time of B
multiplied by 1.05, are its slowdowns by timer scaling; each is counted twice, once with A and B exchanged, for it is
luck which of two identical things seemed slower. The best of its statistics counts, chosen afterwards. What we call
found is an e-value of 20 while B seems slower, however often one looks.
"""

import math
import random
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from attnbench.storage.records import Verdict
from attnbench.workloads.sweep import SMALLEST_EFFECT
from studies.acceptance import engine, rivals, workloads
from studies.acceptance.engine import OURS, SlowedClock
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import ALPHA, DECIDE_POWER, DECIDE_S, DECIDE_SHARE_OF_RIVAL, EFFECT, POWER_LIMITS, Size
from studies.acceptance.workloads import Cell

TIMER, WORK, HEAD = "timer scaling", "extra work", "extra head"
HEAD_CELL = Cell(workload="textbook, a head more", num_threads=1)
SMALLEST_SHARE = 0.5
"""Of a slowdown that is looked for: what is taken for no difference, which else is 2 %, as large as one of them."""


def inject(number: int, size: Size) -> list[Row]:
    """T5: every cell and kind of slowdown by ours, and some by the rivals."""
    rows: list[Row] = []
    for share, (_, budget_s) in POWER_LIMITS.items():
        cells = workloads.cells(size.num_cells)
        for cell in [*cells, *[HEAD_CELL] * size.num_repeats]:
            kinds = (HEAD,) if cell is HEAD_CELL else (TIMER, WORK)
            rows += [_ours(cell, kind, share, budget_s, 1000 * number + len(rows)) for kind in kinds]
    if number < size.num_rivals:
        rows += _theirs(number, size)
    return rows


def _ours(cell: Cell, kind: str, share: float, budget_s: float, seed: int) -> Row:
    at: Row = {"cell": cell.id, "tool": OURS, "injected": kind, "share": share, "budget_s": budget_s}
    clock, least = None, min(SMALLEST_EFFECT, SMALLEST_SHARE * share)
    with workloads.ready(workloads.MILLISECOND if cell is HEAD_CELL else cell) as call:
        if kind == HEAD:
            a, b = workloads.heads(share)
        elif kind == WORK:
            a, b = call, workloads.with_more(call, share)
        else:
            a, b = workloads.copies(call)
            clock = SlowedClock(b, 1 + share)
        found = engine.compare(a, b, budget_s, stops=True, seed=seed, clock=clock, smallest_effect=least)
    return {**at, **found.row()}


def _theirs(number: int, size: Size) -> list[Row]:
    """At 5 %: timer scaling on a few cells, and real work on one; at 2 %: timer scaling on one, in the full form."""
    rows: list[Row] = []
    draws = random.Random(f"T5/{number}")
    few = workloads.cells(size.num_cells)[number % 2 :: 3]
    plan = [(cell, TIMER, 0.05) for cell in few]
    if size.num_cells >= len(workloads.WORKLOADS):
        plan += [(workloads.MILLISECOND, WORK, 0.05), (HEAD_CELL, HEAD, 0.05), (workloads.MILLISECOND, TIMER, 0.02)]
    for cell, kind, share in plan:
        budget_s = POWER_LIMITS[share][1]
        with workloads.ready(workloads.MILLISECOND if cell is HEAD_CELL else cell) as call:
            a, b = call, call
            if kind == HEAD:
                a, b = workloads.heads(share)
            elif kind == WORK:
                b = workloads.with_more(call, share)
            for tool in draws.sample(rivals.RIVALS, len(rivals.RIVALS)):
                found = rivals.compare(tool, a, b, budget_s)
                rows += _rival_rows(found, cell, kind, share, budget_s)
    return rows


def _rival_rows(found: rivals.Timed, cell: Cell, kind: str, share: float, budget_s: float) -> Iterable[Row]:
    at: Row = {"cell": cell.id, "tool": found.rival.name, "injected": kind, "share": share, "budget_s": budget_s}
    at["wall_s"] = found.wall_s
    for name, log in found.logs().items():
        if kind == TIMER:
            yield {**at, "statistic": name, "same_log": log, "log": log + math.log1p(share)}
        else:
            yield {**at, "statistic": name, "log": log}


def power_of_rivals(frame: Any) -> Any:  # noqa: ANN401 - tables
    """By tool, statistic, share and budget: threshold at 5 % false alarms, and how many of the slowdowns pass it."""
    found = []
    by = ["tool", "statistic", "share", "budget_s"]
    for keys, each in frame[frame["tool"] != OURS].groupby(by, sort=False):
        same = each["same_log"].dropna()
        if same.empty:
            continue
        threshold = float(np.quantile(same.abs(), 1 - ALPHA, method="higher"))
        slow = pd.concat([each["log"], math.log1p(keys[2]) - same])
        power = float((slow > threshold).mean())
        alarms = float((same.abs() > threshold).mean())
        values = {"threshold": threshold, "power": power, "alarms": alarms, "n": len(each), "num_same": len(same)}
        found.append({**dict(zip(by, keys, strict=True)), **values})
    return pd.DataFrame(found, columns=[*by, "threshold", "power", "alarms", "n", "num_same"])


def power(rows: list[Row], *, short: bool) -> Outcome:
    """The share of slowdowns found in time, of each kind; one kind that is missed is a miss."""
    frame: Any = pd.DataFrame(rows)
    own = frame[frame["tool"] == OURS]
    passes, texts = True, []
    for share, (asked, budget_s) in POWER_LIMITS.items():
        each = own[own["share"] == share]
        found = each["decided_s"] <= budget_s
        kinds = found.groupby(each["injected"], sort=False).agg(["sum", "size", "mean"])
        seen = each.groupby("injected", sort=False)["log"].median()
        parts = ", ".join(
            f"{kind} {int(row['sum'])} of {int(row['size'])}, seen as {math.expm1(seen[kind]):+.1%}"
            for kind, row in kinds.iterrows()
        )
        slower = float((each["verdict"] == Verdict.slower).mean())
        texts.append(
            f"{share:.0%}: {found.mean():.0%} ({parts}), median after {each['decided_s'].median():.2f} s; "
            f"verdict slower {slower:.0%}"
        )
        passes = passes and bool((kinds["mean"] >= asked).all())
    limits = ", ".join(f">= {asked:.0%} at {share:.0%} in {s:g} s" for share, (asked, s) in POWER_LIMITS.items())
    return Outcome(
        id=LABELS["power"],
        title="power for injected slowdowns: timer scaling, extra work, a real extra head",
        limit=f"{limits}, of each kind; found is an e-value of 20 with the right sign; the smallest effect that "
        "matters is 2 %, and 1 % where 2 % is looked for",
        found="; ".join(texts),
        passes=passes,
        is_short=short,
        rivals=_texts(power_of_rivals(frame)),
        rows=tuple(rows),
    )


def _texts(powers: Any) -> dict[str, str]:  # noqa: ANN401 - a table
    """By tool, what its best statistic finds at equal false-alarm rate."""
    texts = {}
    for tool, found in powers.groupby("tool", sort=False):
        best = found.loc[found.groupby(["share", "budget_s"], sort=False)["power"].idxmax()]
        texts[str(tool)] = ", ".join(
            f"{row['share']:.0%} in {row['budget_s']:g} s: {row['power']:.0%} by {row['statistic']} "
            f"(threshold {row['threshold']:.1%}, n={row['n']})"
            for _, row in best.iterrows()
        )
    return texts


def decide(number: int, size: Size) -> list[Row]:
    """T6: ours until it has a verdict; the rivals in each budget of the ladder."""
    rows: list[Row] = []
    draws = random.Random(f"T6/{number}")
    longest_s = max(size.ladder_s)
    with workloads.ready(workloads.MILLISECOND) as call:
        turns: list[tuple[rivals.Rival | None, float]] = [(None, longest_s)] * size.num_repeats
        turns += [(tool, budget_s) for tool in rivals.RIVALS for budget_s in size.ladder_s]
        for turn, (tool, budget_s) in enumerate(draws.sample(turns, len(turns))):
            if tool is None:
                seed = 1000 * number + turn
                rows.append(_ours(workloads.MILLISECOND, TIMER, EFFECT, budget_s, seed))
            else:
                found = rivals.compare(tool, call, call, budget_s)
                rows += _rival_rows(found, workloads.MILLISECOND, TIMER, EFFECT, budget_s)
    return rows


def rival_times(frame: Any) -> Any:  # noqa: ANN401 - tables
    """By tool and statistic: the shortest budget in which it finds 95 % at 5 % false alarms; infinity: none tried."""
    powers = power_of_rivals(frame)
    good = powers.assign(seconds=powers["budget_s"].where(powers["power"] >= DECIDE_POWER, math.inf))
    by = good.groupby(["tool", "statistic"], sort=False, as_index=False)
    return by.agg(seconds=("seconds", "min"), fewest=("num_same", "min"), most=("num_same", "max"))


def time_to_verdict(rows: list[Row], *, short: bool) -> Outcome:
    """Our time to the verdict slower, against the budget in which a rival errs as seldom."""
    frame: Any = pd.DataFrame(rows)
    own = frame[frame["tool"] == OURS]
    right = own["decided_s"].where(own["verdict"] == Verdict.slower, math.inf)
    median, late = float(right.median()), float(np.quantile(right, DECIDE_POWER, method="higher"))
    times, longest_s = rival_times(frame), float(frame["budget_s"].max())
    best = min(float(times["seconds"].min()), longest_s)  # none: only that it needs longer than the longest is known
    texts = {}
    for tool, found in times.groupby("tool", sort=False):
        row = found.loc[found["seconds"].idxmin()]
        far = math.isinf(row["seconds"])
        seconds = f"over {longest_s:g} s" if far else f"{row['seconds']:g} s by {row['statistic']}"
        texts[str(tool)] = f"{seconds} (thresholds from {row['fewest']} to {row['most']} comparisons of identical code)"
    return Outcome(
        id=LABELS["time_to_verdict"],
        title="time to the right verdict, a millisecond operation slowed down by 5 %",
        limit=f"median {DECIDE_S:g} s at most; 95 % of the verdicts within a fifth of the time in which the best rival "
        f"finds 95 % at 5 % false alarms",
        found=f"median {median:.2f} s, 95 % within {late:.2f} s, {np.isfinite(right).mean():.0%} right, n={len(own)}; "
        f"best rival {best:g} s" + (" or more" if best == longest_s else ""),
        passes=median <= DECIDE_S and late <= DECIDE_SHARE_OF_RIVAL * best,
        is_short=short,
        rivals=texts,
        rows=tuple(rows),
    )
