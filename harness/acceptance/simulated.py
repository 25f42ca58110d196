"""The acceptance tests whose truth is known because the machine is simulated: T3, T4, T9, T12 and T13.

Limits are those of the table in docs/method.md. Each test has a short form with fewer repetitions; `num_*` sets them.
"""

import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest.mock import patch

import numpy as np

from harness import compare, evidence, timing, virtual
from harness.acceptance.outcome import Outcome
from harness.events import Plan, VisitFinished, twin
from harness.interference import CANARY
from harness.messages import TakeVisit, Visited
from harness.records import Verdict, Workload
from harness.schedule import Key, Race, visit_seed
from harness.state import State
from harness.stats import Estimate, paired_ratio, pairs
from harness.store import Results
from harness.verdict import FALSE_SHARE, Judgement, decide, detectable, judge, margin
from harness.virtual import VirtualCrew
from harness.worlds import WORLDS, Array, World

LAYOUT = 0.002
"""What the memory layout of a process does to an arm, as a standard deviation of the log."""
BASELINE, RIVAL = "baseline", "rival"
CONFIDENCE = 0.99
CARRY_OF_LONG_CALLS = 0.1
"""Of a world's carry, so much of a call of 10 ms: it has no touch before it."""

# ------------------------------------------------------------------------------------------------- T3, false alarms
T3_LIMIT = 0.055
PEEKS = 2000
CHUNK = 250
SIZES = np.array([0.3, 0.3, 1.0, 0.1])
"""What each arm of a block leaves behind for the next, as a share of the most; the first two are the same code."""


def null_differences(world: World, draws: np.random.Generator, num_blocks: int, num_paths: int) -> Array:
    """Log ratios (blocks, paths) of two arms with the same code, among four arms in random slots of each block."""
    num_slots = len(SIZES)
    places = draws.random((num_blocks, num_slots, num_paths)).argsort(axis=1)  # of each arm
    before = np.roll(SIZES[places.argsort(axis=1)].reshape(-1, num_paths), 1, axis=0)
    logs = (world.mood(draws, num_blocks * num_slots, num_paths) + world.luck(draws, before.shape)).reshape(places.shape)
    logs = logs + CARRY_OF_LONG_CALLS * world.carry * before.reshape(places.shape)
    logs = logs + world.slot * np.arange(num_slots)[:, None]
    one, other = (np.take_along_axis(logs, places[:, [arm]], axis=1)[:, 0] for arm in (0, 1))
    difference: Array = one - other
    return difference


def most_likely(num_found: int, num_tried: int) -> float:
    """The upper 99 % limit of a share, after Clopper and Pearson."""
    from scipy.stats import beta  # here, because it takes longer to import than --help may take

    return 1.0 if num_found == num_tried else float(beta.ppf(CONFIDENCE, num_found + 1, num_tried - num_found))


def t3(*, short: bool = False, num_runs: int = 0, num_blocks: int = PEEKS, seed: int = 3) -> Outcome:
    """How often the same code is ever called different, with a look at each block."""
    num_runs = num_runs or (1000 if short else 10_000)
    rows: list[dict[str, float | str]] = []
    for number, world in enumerate(WORLDS.values()):
        draws = np.random.default_rng([seed, number])
        num_found = 0
        for start in range(0, num_runs, CHUNK):
            differences = null_differences(world, draws, num_blocks, min(CHUNK, num_runs - start))
            num_found += int((evidence.e_values(differences) >= 1 / FALSE_SHARE).any(axis=0).sum())
        upper = most_likely(num_found, num_runs)
        rows.append({"world": world.name, "share": num_found / num_runs, "upper": upper, "num_runs": num_runs})
    worst = max(rows, key=lambda row: row["upper"])
    return Outcome(
        id="T3",
        title=f"Simulated A/A, watched at each of {num_blocks} blocks",
        limit=f"upper {CONFIDENCE:.0%} limit of the share of false alarms <= {T3_LIMIT} in each world",
        found=f"at most {worst['upper']:.4f}, in {worst['world']} ({worst['share']:.2%} of {num_runs} runs)",
        passes=all(float(row["upper"]) <= T3_LIMIT for row in rows),
        is_short=num_runs < 10_000 or num_blocks < PEEKS,  # noqa: PLR2004 - of the table
        rows=tuple(rows),
    )


# -------------------------------------------------------------------------------------------------- whole virtual runs


def workloads(number: int) -> tuple[Workload, ...]:
    """Different workloads; what they are does not matter."""
    return tuple(Workload(seq_len=8 * (place + 1)) for place in range(number))


def plan(num_workloads: int, names: list[str], *, budget_s: float, seed: int) -> Plan:
    """A run that times; the first name is the baseline."""
    return Plan(
        sweep="simulated",
        workloads=workloads(num_workloads),
        implementations=tuple(names),
        baseline=names[0],
        metrics=("latency",),
        budget_s=budget_s,
        call_limit_s=60.0,
        timeout_s=60.0,
        memory_limit_bytes=0,
        num_epochs=3,
        seed=seed,
    )


class Witness(Race):
    """A race that remembers every comparison that it ever called faster or slower."""

    called: set[Key]

    def refresh(self, state: State, live: Mapping[str, list[str]]) -> None:  # type: ignore[override]
        """As a race does."""
        super().refresh(state, live)
        type(self).called |= {key for key in self.closed if self.judged[key].is_beyond}


class Uniform(Race):
    """No race: all arms of all workloads in rounds, until every verdict is found."""

    def next(self, state: State, live: Mapping[str, list[str]]) -> tuple[str, list[str]] | None:  # type: ignore[override]
        """The workload with the fewest visits, and all its arms."""
        self.refresh(state, live)
        if self.judged and self.closed >= set(self.judged):
            return None
        workload = min(live, key=lambda each: (state.num_visits[each], visit_seed(self.seed, each, state.num_visits[each])))
        return workload, [name for name in live[workload] if name != self.baseline]


def whole_run(asked: Plan, crew: VirtualCrew, race: type[Race] = Race) -> Results:
    """The run, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, patch.object(timing, "Race", race):
        return virtual.execute(asked, Path(folder) / "run", crew)


def t4(*, short: bool = False, num_runs: int = 0, num_workloads: int = 16, seed: int = 4) -> Outcome:
    """How many sessions call anything different where everything is the same code."""
    num_runs = num_runs or (8 if short else 100)
    rows: list[dict[str, float | str]] = []
    names = [BASELINE, "a", "b", "c", "d"]
    for number in range(num_runs):
        world = list(WORLDS.values())[number % len(WORLDS)]
        crew = VirtualCrew(world, _cost_of_null, seed=seed * 1000 + number, layout=LAYOUT)
        Witness.called = set()
        results = whole_run(plan(num_workloads, names, budget_s=60.0, seed=seed * 1000 + number), crew, Witness)
        verdicts = [found.verdict for found in compare.comparisons(results)]
        final = sum(verdict in {Verdict.faster, Verdict.slower} for verdict in verdicts)
        alarms = max(final, len(Witness.called))
        rows.append({"world": world.name, "alarms": alarms, "equivalent": verdicts.count(Verdict.equivalent)})
    num_found = sum(bool(row["alarms"]) for row in rows)
    return Outcome(
        id="T4",
        title=f"All-null sessions of {num_workloads * (len(names) - 1)} cells, with any alarm at any time",
        limit="<= 9 of 100 sessions",
        found=f"{num_found} of {num_runs} sessions",
        passes=num_found <= 0.09 * num_runs,
        is_short=num_runs < 100,  # noqa: PLR2004 - of the table
        rows=tuple(rows),
    )


def _cost_of_null(workload: Workload, _: str) -> float:
    return 1e-3 * (1 + workload.seq_len % 5)


# ------------------------------------------------------------------------------------------------ sessions of one cell


def session(world: World, ratio: float, *, num_visits: int, seed: int, base_s: float = 2e-3) -> State:
    """Some visits of one workload, in three processes: the baseline, its twin, a rival and the canary."""
    workload = workloads(1)[0]
    cost_s = {BASELINE: base_s, RIVAL: base_s * ratio}
    crew = VirtualCrew(world, lambda _, name: cost_s[name], seed=seed, layout=LAYOUT)
    state = State()
    arms = ((BASELINE, BASELINE), (twin(BASELINE), BASELINE), (RIVAL, RIVAL), (CANARY, ""))
    for number in range(num_visits):
        epoch = number * 3 // num_visits
        if number == 0 or epoch != (number - 1) * 3 // num_visits:
            crew.hello(epoch)
        draw = visit_seed(seed, workload.id, number)
        asked = TakeVisit(workload=workload, arms=arms, epoch=epoch, visit=number, num_blocks=4, seed=draw)
        taken = crew.ask(asked)
        assert isinstance(taken, Visited)
        state.apply(VisitFinished(workload=workload.id, epoch=epoch, visit=number, arms=taken.arms))
    return state


def _ratio(state: State, arm: str) -> Estimate:
    (workload, arms), = state.samples.items()
    found = paired_ratio(pairs(arms[arm], arms[BASELINE], state.gauge.void.get(workload, ())))
    assert found is not None
    return found


def _judged(state: State) -> Judgement:
    (workload, arms), = state.samples.items()
    found = pairs(arms[RIVAL], arms[BASELINE], state.gauge.void.get(workload, ()))
    judged = judge(found, margin(_ratio(state, twin(BASELINE))))
    assert judged is not None
    return judged


RATIOS = (0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.25, 2.0)
T9_ERRORS, T9_SHARE = 0.2, 1e-3


def t9(*, short: bool = False, num_runs: int = 0, num_visits: int = 15, seed: int = 9) -> Outcome:
    """How far the estimated ratio lies from the true one on average."""
    num_runs = num_runs or (24 if short else 400)
    rows: list[dict[str, float | str]] = []
    for number, world in enumerate(WORLDS.values()):
        for ratio in RATIOS:
            draw = _seeds(seed, number, ratio)
            found = [_ratio(session(world, ratio, num_visits=num_visits, seed=draw(i)), RIVAL) for i in range(num_runs)]
            errors = [math.log(each.point / ratio) for each in found]
            usual = float(np.mean([each.standard_error or 0.0 for each in found]))
            rows.append({"world": world.name, "ratio": ratio, "bias": float(np.mean(errors)), "standard_error": usual})
    judged = _pooled(rows) if short else rows
    share, errors_ = (max(abs(float(r["bias"])) / float(r[by]) for r in judged) for by in ("one", "standard_error"))
    return Outcome(id="T9", title="", limit="", found=f"{share} {errors_}", passes=False)


def _seeds(*parts: float) -> Callable[[int], int]:
    name = "/".join(map(str, parts))
    return lambda number: visit_seed(0, name, number)
