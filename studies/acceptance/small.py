"""A small slowdown: T18, sessions of at most a minute that look for 1 %, where less than half of it does not matter.

A session ends as soon as there is a verdict, and one of a thousand may be a false alarm: as where a test suite compares
many things. The rivals time identical code in the same seconds, A to its end and then B; their threshold is what never
alarms there.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from attnbench.storage.records import Verdict
from attnbench.timing import blocks
from attnbench.timing.functions import FunctionComparison
from studies.acceptance import engine, rivals, workloads
from studies.acceptance.engine import OURS, SlowedClock
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import SMALL_EFFECT, SMALL_FALSE_SHARE, SMALL_FOUND, SMALL_S, SMALL_SESSIONS, Size
from studies.simulated.machine import Machine, VirtualClock
from studies.simulated.virtual import PROBE_S
from studies.simulated.worlds import WORLDS, World

SAME, TIMER, WORK = "same", "timer scaling", "extra work"
SMALLEST_EFFECT = SMALL_EFFECT / 2
CALL_S = 2e-3
"""What a simulated call takes."""
SIMULATED_SESSIONS = 1000


def sessions(number: int, size: Size) -> list[Row]:
    """One session of identical code, one of a slowdown as long as there are to be more, and the rivals in some."""
    cell = workloads.cells(size.num_cells)[number % size.num_cells]
    kinds = [SAME, *([(TIMER, WORK)[number % 2]] if number < size.num_repeats else [])]
    rows: list[Row] = []
    for kind in kinds:
        with workloads.ready(cell) as call:
            a, b = workloads.copies(call)
            if kind == WORK:
                b = workloads.with_more(call, SMALL_EFFECT)
            clock = SlowedClock(b, 1 + SMALL_EFFECT) if kind == TIMER else None
            found = engine.compare(
                a,
                b,
                size.compare_s,
                stops=True,
                seed=number,
                clock=clock,
                smallest_effect=SMALLEST_EFFECT,
                false_share=SMALL_FALSE_SHARE,
            )
        rows.append({"cell": cell.id, "tool": OURS, "kind": kind, **found.row()})
    if number < size.num_rivals:
        with workloads.ready(workloads.MILLISECOND) as call:
            timed = [rivals.compare(tool, call, call, size.compare_s) for tool in rivals.RIVALS]
        rows += [
            {"tool": each.rival.name, "statistic": name, "kind": SAME, "log": log, "wall_s": each.wall_s}
            for each in timed
            for name, log in each.logs().items()
        ]
    return rows


def small_slowdown(rows: list[Row], *, short: bool) -> Outcome:
    """How many slowdowns of 1 % are called slower in time, and how many sessions of identical code call anything."""
    frame: Any = pd.DataFrame(rows)
    own = frame[frame["tool"] == OURS]
    same, slower = own[own["kind"] == SAME], own[own["kind"] != SAME]
    is_found, alarms = _is_found(slower), _num_alarms(same)
    kinds = ", ".join(
        f"{kind} {int(is_found[each.index].sum())} of {len(each)}, seen as {math.expm1(each['log'].median()):+.2%}"
        for kind, each in slower.groupby("kind", sort=False)
    )
    return Outcome(
        id=LABELS["small_slowdown"],
        title=f"A slowdown of {SMALL_EFFECT:.0%}, real sessions of at most {SMALL_S:g} s",
        limit=f"called slower in >= {SMALL_FOUND:.0%} of {SMALL_SESSIONS['slower']} sessions; nothing called in "
        f"{SMALL_SESSIONS['same']} of identical code",
        found=f"slower in {int(is_found.sum())} of {len(slower)} ({kinds}), median after "
        f"{slower['decided_s'].median():.1f} s, the last of them after {slower['decided_s'][is_found].max():.1f} s; "
        f"of identical code {alarms} of {len(same)} alarm, "
        f"{int((same['verdict'] == Verdict.equivalent).sum())} are called equivalent, RMS of the log ratio "
        f"{math.sqrt((same['log'] ** 2).mean()):.2%}",
        passes=bool(is_found.mean() >= SMALL_FOUND) and not alarms,
        is_short=short,
        rivals=_texts(frame[frame["tool"] != OURS]),
        rows=tuple(rows),
    )


def _is_found(slower: Any) -> Any:  # noqa: ANN401 - tables
    return (slower["verdict"] == Verdict.slower) & (slower["decided_s"] <= SMALL_S)


def _num_alarms(same: Any) -> int:  # noqa: ANN401 - a table
    return int(same["verdict"].isin([Verdict.faster, Verdict.slower]).sum())


def _texts(theirs: Any) -> dict[str, str]:  # noqa: ANN401 - a table
    """By tool, its best statistic, chosen afterwards: how far identical code seemed apart, and what it would find.

    Its threshold is the largest of these, which never alarms; a slowdown is each of them, and each of them turned.
    """
    texts = {}
    for tool, found in theirs.groupby("tool", sort=False):
        farthest = found["log"].abs().groupby(found["statistic"]).max()
        best = found[found["statistic"] == farthest.idxmin()]["log"].to_numpy()
        seen = np.concatenate([math.log1p(SMALL_EFFECT) + sign * best for sign in (1, -1)])
        share, apart = float((seen > farthest.min()).mean()), f"{math.expm1(farthest.min()):.2%}"
        texts[str(tool)] = f"{share:.0%} by {farthest.idxmin()} (identical code up to {apart} apart, n={len(best)})"
    return texts


def small_slowdown_simulated(*, short: bool = False, num_runs: int = 0, seed: int = 18) -> Outcome:
    """The same where the truth is known, one world after another."""
    num_runs = num_runs or (80 if short else SIMULATED_SESSIONS)
    rows: list[Row] = []
    for number in range(num_runs):
        world = list(WORLDS.values())[number % len(WORLDS)]
        for kind, ratio in ((SAME, 1.0), (TIMER, 1 + SMALL_EFFECT)):
            found = _simulated(world, ratio, seed * SIMULATED_SESSIONS**2 + 2 * number + (ratio > 1))
            verdict = found.judgements["b"].verdict
            decided_s = found.settled_s.get("b", math.inf)
            rows.append({"world": world.name, "kind": kind, "verdict": str(verdict), "decided_s": decided_s})
    frame: Any = pd.DataFrame(rows)
    slower, alarms = frame[frame["kind"] != SAME], _num_alarms(frame[frame["kind"] == SAME])
    is_found = _is_found(slower)
    shares = is_found.groupby(slower["world"], sort=False).mean()
    return Outcome(
        id=LABELS["small_slowdown_simulated"],
        title=f"A slowdown of {SMALL_EFFECT:.0%}, simulated sessions of at most {SMALL_S:g} s",
        limit=f"called slower in >= {SMALL_FOUND:.0%}; nothing called in {SIMULATED_SESSIONS} of identical code",
        found=f"slower in {int(is_found.sum())} of {len(slower)}, at least {shares.min():.0%} in each world, median "
        f"after {slower['decided_s'].median():.1f} s, 95 % within "
        f"{np.quantile(slower['decided_s'], 0.95, method='higher'):.1f} s; {alarms} of {num_runs} alarm",
        passes=bool(is_found.mean() >= SMALL_FOUND) and not alarms,
        is_short=num_runs < SIMULATED_SESSIONS,
        rows=tuple(rows),
    )


def _simulated(world: World, ratio: float, seed: int) -> FunctionComparison:
    machine = Machine(world, seed)
    clock = VirtualClock(machine)
    conditions = blocks.Conditions(
        on_turn=lambda _: machine.turn(),
        count_faults=lambda: 0,
        read_load=lambda: machine.load(clock.now()),
        read_waits=lambda: None,
    )
    compared = FunctionComparison(
        {"a": lambda: clock.spend(CALL_S), "b": lambda: clock.spend(CALL_S * ratio)},
        "a",
        smallest_effect=SMALLEST_EFFECT,
        false_share=SMALL_FALSE_SHARE,
        clock=clock,
        seed=seed,
        gauge_work=lambda: clock.spend(PROBE_S),
        conditions=conditions,
    )
    compared.run(SMALL_S)
    return compared
