"""Ratios of two different things: T7 are they repeated, T8 does the interval cover them, T11 do order and names matter.

The ratio is the textbook form of attention over torch's SDPA, 8 heads of 256 tokens, one thread.
"""

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from attnbench.devices import Clock, device
from attnbench.devices.cpu import CpuClock
from attnbench.statistics.interference import InterferenceGauge
from attnbench.statistics.intervals import by_process, visit_numbers
from attnbench.statistics.verdict import Effect, effect
from attnbench.storage.records import PROBE, Arm
from attnbench.timing import blocks
from attnbench.timing.functions import HERE, FunctionComparison
from studies.acceptance import rivals, workloads
from studies.acceptance.engine import BLOCKS, OURS
from studies.acceptance.outcome import LABELS, Outcome, Row
from studies.acceptance.plan import COVERAGE, INVARIANCE_ERRORS, REPEAT_SD, REPEAT_SHARE_OF_RIVAL, Size

NUM_HEADS, LENGTH = 8, 256
VISITS_OF_SESSION = 4  # in each of its epochs, in T8
EPOCHS_OF_SESSION = 6
"""In T7."""
FEWEST_EPOCHS = 3
"""Of a session in T8."""
LETTERS = "aknz"
"""Names in T11."""
ROLES: dict[str, Callable[[], workloads.Call]] = {
    "base": lambda: workloads.sdpa(NUM_HEADS, LENGTH),
    "rival": lambda: workloads.textbook(NUM_HEADS, LENGTH),
    "copy": lambda: workloads.textbook(NUM_HEADS, LENGTH),
    "other": lambda: workloads.textbook(NUM_HEADS, LENGTH // 2),
}
"""Who bears them."""
SHARE_OF_SESSION = 12
"""In T8 a session has one epoch of so many: the reference is the mean of the others, whose own error
would else pass for a lack of coverage."""


def both() -> tuple[Callable[[], object], Callable[[], object]]:
    """SDPA, which is the baseline, and the textbook form."""
    return workloads.sdpa(NUM_HEADS, LENGTH), workloads.textbook(NUM_HEADS, LENGTH)


A, B = Arm(implementation="a"), Arm(implementation="b")


class Epoch:
    """A process that compares the textbook form with SDPA by visits, as a run does, whenever it is asked to."""

    def __init__(self, number: int) -> None:
        """Make both, the A/A control and the interference probe."""
        self.number, self.num_visits = number, 0
        self.a, self.b = both()
        arms = ((A, self.a), (A.as_control(), self.a), (B, self.b))
        self.calls = [blocks.TimedCall(arm=arm, call=call) for arm, call in arms]
        self.calls.append(blocks.TimedCall(arm=PROBE, call=device("cpu").interference_probe()))
        self.clock, self.gauge = CpuClock(), InterferenceGauge()

    def visit_for(self, seconds: float) -> list[Row]:
        """Visits of four blocks for so long: a row for each, with its log ratio."""
        rows: list[Row] = []
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            seed = random.Random(f"{self.number}/{self.num_visits}").getrandbits(53)
            at = blocks.Visit(epoch=self.number, number=self.num_visits, num_blocks=BLOCKS, seed=seed)
            taken = blocks.visit(self.calls, self.clock, at)
            self.gauge.add(HERE, taken[PROBE])
            discarded = self.gauge.discarded.get(HERE, set())
            found = visit_numbers([taken[B]], [taken[A], taken[A.as_control()]], discarded)
            place: Row = {"epoch": float(self.number), "visit": float(self.num_visits)}
            rows += [{**place, "log": log} for log in found.values()]
            self.num_visits += 1
        return rows


def repeat(number: int, size: Size) -> list[Row]:
    """T7: an epoch of a session, which is a fresh process: a sixth of our visits, in turns with a rival or none.

    Rivals are used as they are meant to be: A to its end, then B, in one process. A run of ours spreads its visits over
    six processes and all of the session. The time that each has of the session is the same.
    """
    session, epoch = divmod(number, EPOCHS_OF_SESSION)
    turns = random.Random(f"T7/{session}").sample(rivals.RIVALS, len(rivals.RIVALS))[epoch::EPOCHS_OF_SESSION]
    share_s = size.compare_s / EPOCHS_OF_SESSION / (len(turns) + 1)
    rows: list[Row] = []
    with workloads.ready(workloads.MILLISECOND):
        ours = Epoch(number)
        for tool in [None, *turns]:
            if tool is not None:
                timed = rivals.compare(tool, ours.a, ours.b, size.compare_s)
                at: Row = {"tool": tool.name, "wall_s": timed.wall_s}
                rows += [{**at, "statistic": name, "log": log} for name, log in timed.logs().items()]
            rows += [{"tool": OURS, "statistic": "paired ratio", **row} for row in ours.visit_for(share_s)]
    return [{"session": float(session), **row} for row in rows]


def ratio_of(visits: Any) -> Effect:  # noqa: ANN401 - a table
    """What visits, a row each, say together: one number for each process."""
    places = zip(visits["epoch"].astype(int), visits["visit"].astype(int), strict=True)
    numbers = by_process(dict(zip(places, visits["log"].tolist(), strict=True)))
    return effect([*numbers.values()], is_watched=False)


def repeatability(rows: list[Row], *, short: bool) -> Outcome:
    """The standard deviation of the log ratio over sessions."""
    table: Any = pd.DataFrame(rows)
    own = table[table["tool"] == OURS]
    logs = [
        {"tool": OURS, "statistic": "paired ratio", "session": session, "log": ratio_of(visits).log}
        for session, visits in own.groupby("session")
    ]
    alone = pd.Series([ratio_of(visits).log for _, visits in own.groupby(["session", "epoch"])])
    frame: Any = pd.concat([pd.DataFrame(logs), table[table["tool"] != OURS]])
    spread = frame.groupby(["tool", "statistic"], sort=False)["log"].std()
    mine, others = float(spread[OURS].iloc[0]), spread.drop(OURS, level=0)
    ratio, number = math.exp(float(frame[frame["tool"] == OURS]["log"].mean())), frame["session"].nunique()
    texts = {
        str(tool): ", ".join(f"{name} {each:.2%}" for (_, name), each in found.items())
        for tool, found in others.groupby(level=0, sort=False)
    }
    return Outcome(
        id=LABELS["repeatability"],
        title="repeatability of a true ratio, textbook against SDPA, over sessions",
        limit=f"standard deviation {REPEAT_SD:.1%} at most over 20 sessions, and a third of the best rival statistic's",
        found=f"{mine:.2%} over {number} sessions, ratio {ratio:.3f}; best rival {others.min():.2%} "
        f"({'/'.join(map(str, others.idxmin()))}); ours from one process alone, as a rival's, in a sixth of the time: "
        f"{alone.std():.2%}",
        passes=bool(mine <= REPEAT_SD and mine <= REPEAT_SHARE_OF_RIVAL * others.min()),
        is_short=short,
        rivals=texts,
        rows=tuple(rows),
    )


def visit_on(number: int, size: Size) -> list[Row]:
    """T8: one epoch, which is a fresh process: visits until its time is over."""
    with workloads.ready(workloads.MILLISECOND):
        return Epoch(number).visit_for(size.compare_s)


CONFIDENCE = 0.95


def coverage_of_sessions(rows: list[Row], num_sessions: int, *, is_alike: bool = False) -> Any:  # noqa: ANN401 - a table
    """Sessions drawn from the visits, and whether the interval of each covers what the other epochs say.

    A session has a few of the epochs and four visits in each, in time order and its own; the reference is the mean over
    all visits of the epochs that it has no part in, or where `is_alike` what the same estimate says of them: it draws
    in visits that lie far out, which a mean does not.
    """
    draws = np.random.default_rng(0)
    table: Any = pd.DataFrame(rows)
    epochs = {int(epoch): each["log"].to_numpy() for epoch, each in table.groupby("epoch")}
    free = {epoch: list(draws.permutation(len(logs))) for epoch, logs in epochs.items()}
    found = []
    for session in range(num_sessions):
        able = [epoch for epoch, left in free.items() if len(left) >= VISITS_OF_SESSION]
        number = max(FEWEST_EPOCHS, len(epochs) // SHARE_OF_SESSION)
        if len(able) < number:
            break
        own = sorted(int(epoch) for epoch in draws.choice(able, number, replace=False))
        taken = [(epoch, int(free[epoch].pop())) for epoch in own for _ in range(VISITS_OF_SESSION)]
        logs = [epochs[epoch][visit] for epoch, visit in taken]
        places = np.array(taken).T
        estimate = ratio_of(pd.DataFrame({"epoch": places[0], "visit": places[1], "log": logs}))
        if is_alike:
            truth = ratio_of(table[~table["epoch"].isin(own)]).log
        else:
            truth = float(np.mean([np.mean(logs) for epoch, logs in epochs.items() if epoch not in own]))
        error, half = estimate.log - truth, estimate.half_width(1 - CONFIDENCE) or math.inf
        found.append({"session": session, "error": error, "half_width": half, "covers": abs(error) <= half})
    return pd.DataFrame(found)


def coverage_error(rows: list[Row], num_sessions: int, num_draws: int = 40) -> float:
    """How far the coverage would lie from what it is, with as many other processes: a bootstrap over epochs."""
    draws = np.random.default_rng(1)
    table: Any = pd.DataFrame(rows)
    epochs = [each for _, each in table.groupby("epoch")]
    found = []
    for _ in range(num_draws):
        chosen = draws.integers(len(epochs), size=len(epochs))
        anew = pd.concat([epochs[old].assign(epoch=float(new)) for new, old in enumerate(chosen)])
        found.append(coverage_of_sessions(anew.to_dict("records"), num_sessions)["covers"].mean())
    return float(np.std(found, ddof=1))


def coverage(rows: list[Row], aa_rows: list[Row], num_sessions: int, *, short: bool) -> Outcome:
    """Coverage of a true ratio; and of the ratio 1 in the comparisons of T1, each in one short stretch."""
    sessions = coverage_of_sessions(rows, num_sessions)
    covered = float(sessions["covers"].mean())
    alike = coverage_of_sessions(rows, num_sessions, is_alike=True)["covers"].mean()
    epochs = pd.DataFrame(rows)["epoch"].nunique()
    beside = ""
    if aa_rows:
        own: Any = pd.DataFrame(aa_rows)
        own = own[own["tool"] == OURS]
        beside = f"; of the ratio 1 in T1: {(own['log'].abs() <= own['half_width']).mean():.1%} of {len(own)}"
    return Outcome(
        id=LABELS["coverage"],
        title="coverage of the 95 % interval against a long reference, textbook against SDPA",
        limit=f"{COVERAGE[0]:.0%} to {COVERAGE[1]:.0%}; the reference is 10 minutes of other processes (full form)",
        found=f"{covered:.1%} (standard error {coverage_error(rows, num_sessions):.1%}) of {len(sessions)} sessions "
        f"from {epochs} processes, median half width "
        f"{sessions['half_width'].median():.2%}; {alike:.1%} of what the same estimate says of the reference{beside}",
        passes=COVERAGE[0] <= covered <= COVERAGE[1],
        is_short=short,
        rows=tuple({**row, "covers": float(row["covers"])} for row in sessions.to_dict("records")),
    )


def permute(number: int, size: Size) -> list[Row]:
    """T11: the textbook form against SDPA, next to two others; each session in another order and under other names.

    All sessions go on by turns, in a new random order in each round, so that the machine's drift is all sessions' own.
    """
    with workloads.ready(workloads.MILLISECOND):
        draws, clock = random.Random(f"T11/{number}"), CpuClock()
        sessions = [_Permuted.draw(draws, clock, seed) for seed in range(size.num_repeats)]
        start = time.perf_counter()
        while time.perf_counter() - start < size.compare_s * size.num_repeats:
            for session in draws.sample(sessions, len(sessions)):
                session.comparison.visit()
    return [session.row(role) for session in sessions for role in ("rival", "copy")]


@dataclass(frozen=True, kw_only=True)
class _Permuted:
    """A session with names and an order of its own."""

    comparison: FunctionComparison
    names: dict[str, str]  # by role
    order: list[str]  # of the roles

    @classmethod
    def draw(cls, draws: random.Random, clock: Clock, seed: int) -> "_Permuted":
        """One by chance, whose calls and inputs are made in its order."""
        names = dict(zip(ROLES, draws.sample(LETTERS, len(ROLES)), strict=True))
        order = draws.sample(list(ROLES), len(ROLES))
        shown = {names[role]: ROLES[role]() for role in order}
        comparison = FunctionComparison(shown, names["base"], clock=clock, seed=seed)
        return cls(comparison=comparison, names=names, order=order)

    def row(self, role: str) -> Row:
        """What it says of that role, and where that stood."""
        self.comparison.judge()
        effect = self.comparison.judgements[self.names[role]].effect
        return {
            "role": role,
            "log": effect.log,
            "standard_error": effect.error or math.inf,
            "place": float(self.order.index(role) - self.order.index("base")),
            "letter": float(LETTERS.index(self.names[role]) - LETTERS.index(self.names["base"])),
        }


def order_and_names(rows: list[Row], *, short: bool) -> Outcome:
    """The shift from standing before the baseline to standing after it, in the order and in the alphabet."""
    frame: Any = pd.DataFrame(rows)
    error = float(frame["standard_error"].median())
    shifts = {}
    for what in ("place", "letter"):
        after = frame[what] > 0
        shifts[what] = abs(float(frame[after]["log"].mean() - frame[~after]["log"].mean()))
    number = len(frame) // frame["role"].nunique()
    return Outcome(
        id=LABELS["order_and_names"],
        title="order and names of what is compared",
        limit="standing after the baseline or before it shifts the ratio by one visit-level standard error at most, "
        "over 20 permutations",
        found=f"order {shifts['place']:.3%}, names {shifts['letter']:.3%}, standard error {error:.3%}, "
        f"{number} permutations",
        passes=math.isfinite(error) and max(shifts.values()) <= INVARIANCE_ERRORS * error,
        is_short=short,
        rows=tuple(rows),
    )
