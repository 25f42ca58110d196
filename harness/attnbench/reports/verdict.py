"""The verdict for programs: the JSON that `attnbench check`, `run`, `compare` and `fastest` print with --json.

All four print a `Report`; docs/verdict.schema.json is its JSON schema. A wrong answer never has a time.
"""

import itertools
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from attnbench.analysis.comparisons import doubts, num_processes, whole_session_judgement
from attnbench.analysis.conclusion import Conclusion, Ending
from attnbench.analysis.gate.certain import changed
from attnbench.analysis.judgements import Judgement, judgements, verdict_of
from attnbench.analysis.recommendation import PEAK_MEMORY, Lead, Recommendation
from attnbench.analysis.results import Results
from attnbench.analysis.warned import Warn, Warned
from attnbench.reports import answers, cells, recommended, summary
from attnbench.statistics.break_even import BreakEven
from attnbench.statistics.verdict import Judgement as Judged
from attnbench.storage.records import BASE, CheckVerdict, Status, Verdict
from attnbench.units import sanitize_line

SCHEMA = 1
"""Version of the schema: it is raised if a field is removed or changes its meaning, not if one is added."""
WORST_FIRST = (Verdict.slower, Verdict.undecided, Verdict.equivalent, Verdict.faster)


class Warning(msgspec.Struct, frozen=True, kw_only=True):  # noqa: A001 - its name in the schema
    """A reason to distrust a time or an answer; `attnbench explain NAME` says what to do."""

    name: Warn
    text: str


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """A time relative to the baseline: `speedup` above 1 is faster. Only a decided verdict counts."""

    baseline: str
    speedup: float
    low: float | None  # the interval of the speedup; null with too few processes
    high: float | None
    verdict: Verdict
    is_decided: bool
    is_doubtful: bool = False  # other work may have changed the times
    reason: str = ""  # why the verdict is undecided
    num_processes: int = 0
    detectable_slowdown: float | None = None  # a slowdown that 80 % of such sessions would detect; 0.05 is 5 %


class CellVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The results of one implementation on one workload."""

    workload: str
    axes: dict[str, Any]
    implementation: str
    side: str = ""  # base or candidate, if two states of the code are compared
    host: str = ""
    status: Status
    verdict: CheckVerdict
    is_predicted: bool = False  # not tried, since it was predicted to exceed a limit
    message: str = ""
    mistakes: tuple[str, ...] = ()  # known mistakes that explain a wrong answer
    broken_rules: tuple[str, ...] = ()
    error_ratio: float | None = None  # largest error / tolerance; null if it is not finite or nothing was compared
    seconds: float | None = None  # of a call; null if the answer is neither right nor imprecise, or was not timed
    speed: Speed | None = None
    break_even: BreakEven | None = None  # against the baseline, if first calls were measured
    peak_memory_bytes: float | None = None  # of a call, beyond its inputs
    metrics: dict[str, float] = {}  # metric name -> value; `attnbench list metrics` gives names and units
    warnings: tuple[Warning, ...] = ()


class Implementation(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict on one implementation over all cells. `is_right` is also true if the verdict is imprecise."""

    is_right: bool  # right or imprecise; after `check` only if `is_enough`
    verdict: CheckVerdict
    sentence: str
    num_compared: int  # cells whose answer was compared
    num_planned: int
    is_enough: bool  # enough cells were compared for a verdict without reservation, and none failed
    never_tried: tuple[str, ...] = ()  # features that no compared cell had
    conventions: tuple[str, ...] = ()  # accepted differences from SDPA's behaviour, in words
    notes: dict[str, str] = {}
    mistakes: tuple[str, ...] = ()
    broken_rules: tuple[str, ...] = ()
    worst_error_ratio: float | None = None
    speed: Speed | None = None  # of the cell with the worst verdict, in the order of WORST_FIRST; null if wrong


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """The recommended implementation for one workload."""

    workload: str
    axes: dict[str, Any]
    choice: str | None
    is_clear: bool  # `fastest`: everything else is slower; `run`: nothing undecided may be faster than the baseline
    answer: str
    equals: tuple[str, ...] = ()  # `fastest`: equal to the choice, or undecided; `run`: others that may be faster
    runner_up: str | None = None
    reference: str = ""  # `fastest`: PyTorch's own choice; `run`: the baseline
    seconds: dict[str, float] = {}  # of a call, by implementation
    peak_memory_bytes: dict[str, float] = {}  # of a call beyond its inputs, by implementation
    slower_by: dict[str, Lead] = {}  # by implementation
    excluded: dict[str, str] = {}  # reasons, by implementation
    first_call_seconds: dict[str, float] = {}  # by implementation
    break_even: BreakEven | None = None  # of the choice against the reference


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A learned policy, and the cost of its choices on shapes that were left out."""

    file: str
    chosen: dict[str, int]  # number of shapes by chosen implementation
    workloads: int  # number of shapes
    regret: dict[str, float] | None  # fields of workloads.policy.Regret; null for a single shape
    seconds: float  # time that the run took


class Next(msgspec.Struct, frozen=True, kw_only=True):
    """A command to run next, and why."""

    command: str
    why: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of a command: correctness and its coverage, speed, memory, warnings, and what to run next."""

    schema: int = SCHEMA
    command: str
    exit_code: int
    ending: Ending
    sentence: str
    run: str
    folder: str  # "" after a check, which stores nothing
    seed: int
    margin: float  # differences below this share count as equal
    allocator: str
    num_processes: int
    machine: str  # fingerprint; times of two fingerprints are not comparable
    versions: dict[str, str]
    implementations: dict[str, Implementation]
    not_judged: dict[str, str] = {}  # specs that could not be loaded, with the reasons
    cells: tuple[CellVerdict, ...]
    counts: dict[str, int]  # cells by status
    choices: tuple[Choice, ...] = ()
    crossings: tuple[recommended.Crossing, ...] = ()
    policy: Policy | None = None
    together: Speed | None = None  # compare: all cells in one verdict
    changed: tuple[str, ...] = ()  # compare: differences in results, not in time
    warnings: tuple[Warning, ...] = ()
    next: tuple[Next, ...] = ()


def report(  # noqa: PLR0913 - parts that only one command has
    results: Results,
    conclusion: Conclusion,
    exit_code: int,
    words: Sequence[str],
    *,
    found: Sequence[Recommendation] | None = None,
    not_judged: Mapping[str, str] | None = None,
    policy: Policy | None = None,
) -> Report:
    """Build the report of a command; `words` is its command line without the name of the program.

    `found` are the recommendations of `fastest`; if it is None, the choices follow from the verdicts of the run.
    """
    environment = next(iter(results.environments.values()), None)
    found_cells, together = tuple(_cells(results)), whole_session_judgement(results)
    recommendations = (Choice(**each.facts(), answer=recommended.answer(each)) for each in found or ())
    implementations = {each.implementation: _implementation(each, results, found_cells) for each in judgements(results)}
    return Report(
        command=words[0],
        exit_code=exit_code,
        ending=conclusion.ending,
        sentence=conclusion.sentence,
        run=results.run,
        folder="" if words[0] == "check" else str(results.folder),
        seed=results.plan.seed,
        margin=results.plan.smallest_effect,
        allocator=results.plan.allocator,
        num_processes=num_processes(results),
        machine="" if environment is None else environment.fingerprint,
        versions={} if environment is None else environment.versions,
        implementations=implementations,
        not_judged=dict(not_judged or {}),
        cells=found_cells,
        counts=Counter(str(each.status) for each in found_cells),
        choices=tuple(_choices(results) if found is None else recommendations),
        crossings=tuple(recommended.crossings(results)),
        policy=policy,
        together=None if together is None else _speed(together, BASE),
        changed=tuple(changed(results)) if results.plan.sides is not None else (),
        warnings=_warnings(summary.troubles(results)) if results.plan.metrics else (),
        next=tuple(_next(results, implementations, words)),
    )


def _warnings(lines: Sequence[Warned]) -> tuple[Warning, ...]:
    return tuple(Warning(name=line.name, text=sanitize_line(line)) for line in lines)


def _speed(judged: Judged, baseline: str) -> Speed:
    return Speed(
        baseline=baseline,
        speedup=1 / judged.ratio,
        low=None if judged.high is None else 1 / judged.high,
        high=None if judged.low is None else 1 / judged.low,
        verdict=judged.verdict,
        is_decided=judged.verdict is not Verdict.undecided and not judged.is_doubtful,
        is_doubtful=judged.is_doubtful,
        reason=str(judged.reason or ""),
        num_processes=judged.effect.num_processes,
        detectable_slowdown=judged.detectable,
    )


def _cells(results: Results) -> Iterator[CellVerdict]:
    for cell in cells.all_cells(results).values():
        record, agreement = cell.record, cell.record.agreement
        yield CellVerdict(
            workload=record.workload.id,
            axes=record.workload.axes(),
            implementation=record.implementation,
            side=record.side,
            host=record.host,
            status=record.status,
            verdict=verdict_of(record),
            is_predicted=record.is_predicted,
            message=record.message,
            mistakes=() if agreement is None else agreement.mistakes,
            broken_rules=() if agreement is None else tuple(rule.rule for rule in agreement.broken_rules),
            error_ratio=cell.error,
            seconds=cell.seconds,
            speed=None if cell.comparison is None else _speed(cell.comparison, cell.comparison.baseline),
            break_even=cell.break_even,
            peak_memory_bytes=cell.peak_bytes,
            metrics={name: value for name, value in cell.metrics.items() if name != PEAK_MEMORY},
            warnings=_warnings(cell.warnings) if results.plan.metrics else (),
        )


def _implementation(judged: Judgement, results: Results, every: Sequence[CellVerdict]) -> Implementation:
    """Summarise the results of an implementation; with two states of the code, only the results of the candidate."""
    judged = replace(judged, records=tuple(record for record in judged.records if record.side != BASE))
    own = [each for each in every if each.implementation == judged.implementation and each.side != BASE]
    speeds = [each.speed for each in own if each.speed is not None]
    worst = min(speeds, key=lambda speed: (WORST_FIRST.index(speed.verdict), speed.speedup), default=None)
    is_fine = judged.verdict in {CheckVerdict.right, CheckVerdict.imprecise}
    return Implementation(
        is_right=is_fine and (judged.is_enough or bool(results.plan.metrics)),
        verdict=judged.verdict,
        sentence=sanitize_line(judged.sentence),
        num_compared=len(judged.compared),
        num_planned=len(judged.planned),
        is_enough=judged.is_enough,
        never_tried=judged.never_tried,
        conventions=judged.conventions,
        notes=dict(judged.notes),
        mistakes=tuple(dict.fromkeys(name for each in own for name in each.mistakes)),
        broken_rules=tuple(dict.fromkeys(name for each in own for name in each.broken_rules)),
        worst_error_ratio=judged.worst,
        speed=None if judged.verdict is CheckVerdict.wrong else worst,
    )


def _choices(results: Results) -> Iterator[Choice]:
    """Yield a choice for each compared shape: the fastest implementation by the verdicts.

    If two states of the code are compared, there is none.
    """
    if results.plan.sides is not None:
        return
    for shape in answers.shapes(results):
        if shape.base is None or not shape.compared:
            continue
        if shape.best is None:
            answer = "no recommendation: times are doubtful"
            yield Choice(
                workload=shape.workload.id, axes=shape.workload.axes(), choice=None, is_clear=False, answer=answer
            )
            continue
        alike = [cell.name for cell in shape.others if cell is not shape.best and cell.may_be_faster]
        what = "the fastest" if shape.faster else "nothing is faster"
        yield Choice(
            workload=shape.workload.id,
            axes=shape.workload.axes(),
            choice=shape.best.name,
            is_clear=not shape.is_open,
            answer=f"{shape.best.name}: {what}" + f"; {', '.join(alike)} may be faster" * bool(alike),
            equals=tuple(alike),
            reference=shape.base.name,
            seconds={cell.name: cell.seconds for cell in shape.cells if cell.seconds is not None},
            peak_memory_bytes={cell.name: cell.peak_bytes for cell in shape.cells if cell.peak_bytes is not None},
        )


def _next(results: Results, implementations: Mapping[str, Implementation], words: Sequence[str]) -> Iterator[Next]:
    """Yield commands that answer open questions, the most urgent first."""
    is_gone = results.plan.sides is not None and bool(results.plan.sides.candidate.commit)  # a deleted checkout
    specs = {arm.implementation: shlex.quote(spec) for arm, spec in results.plan.specs.items()}
    pairs = itertools.pairwise(words)
    same = "".join(f" --set {shlex.quote(value)}" for word, value in pairs if word == "--set")
    for name, each in implementations.items():
        spec = specs.get(name, name)
        if each.verdict is CheckVerdict.wrong:
            if "--repro" not in words and not is_gone:
                why = f"{name} is wrong: writes a script that shows this with torch alone"
                yield Next(command=f"attnbench check {spec}{same} --repro repro", why=why)
            for mistake in each.mistakes:
                yield Next(command=f"attnbench explain {mistake}", why="explains the mistake and what to do")
        elif words[0] == "check" and each.is_right:
            yield Next(command=f"attnbench run {spec}{same} --json", why=f"{name} is right: how fast is it?")
        elif words[0] == "check":
            yield Next(command=f"attnbench inspect {spec}", why=f"{name}: {each.sentence}")
    speeds = {name: each.speed for name, each in implementations.items() if each.speed is not None}
    if any(speed.is_doubtful for speed in speeds.values()) or doubts(results):
        again = shlex.join(["attnbench", *words])
        yield Next(command=again, why="times are doubtful: run it again on a quiet machine")
        return
    for name, speed in speeds.items():
        if speed.verdict is Verdict.undecided:
            longer = re.sub(r" --budget[= ]\S+", "", shlex.join(["attnbench", *words]))
            command = f"{longer} --budget {2 * results.plan.budget_s:g}"
            yield Next(command=command, why=f"{name} is undecided: {speed.reason}")
        elif speed.verdict is Verdict.slower and not is_gone:
            command = f"attnbench profile {specs.get(name, name)}{same}"
            yield Next(command=command, why=f"{name} is slower: where does the time go?")
