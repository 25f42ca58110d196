"""The Python API: `check`, `compare`, `run`, `fastest` and `load` return an `Outcome`, the results of one run.

    import attnbench

    attnbench.check(mine, mask="causal")
    attnbench.compare(mine, "sdpa", seq_len=[128, 512], mask="causal", budget=30)

They work in scripts and in notebooks. A function that cannot be imported from a Python file is pickled for the
measuring processes.
"""

import base64
import math
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from html import escape
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from attnbench.analysis.comparisons import Comparison, comparisons
from attnbench.analysis.conclusion import factor
from attnbench.analysis.judgements import judgements
from attnbench.analysis.recommendation import Recommendation, recommend
from attnbench.analysis.results import Results, judge, read
from attnbench.analysis.table import load as table
from attnbench.analysis.table import samples
from attnbench.analysis.table import table as cells_of
from attnbench.console import watching
from attnbench.plugins import expand_spec, name_of, plugs, require_known
from attnbench.processes import execution
from attnbench.processes.planning import build_plan, condition_fields, draw_seed, plan_to_choose, rejected
from attnbench.reports import Picture, answers, recommended, screen, summary, titles, write_usual
from attnbench.reports.verdict import WORST_FIRST
from attnbench.storage.events import Plan
from attnbench.storage.journal import Unstored, find_run
from attnbench.storage.records import FALSE_SHARE, Arm, CheckVerdict, Verdict
from attnbench.units import quantity
from attnbench.workloads.sweep import SMALLEST_EFFECT

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["check", "compare", "fastest", "load", "outcome", "run", "samples", "table"]
T = TypeVar("T")
Given = str | Callable[..., Any]
"""An implementation. A string is a name, FILE.py:NAME, or FILE.py for all implementations in this file, as in commands.
Any other value is a function, a module class, or a result of `adapt`."""
BY_VALUE = '''"""Implementations from Python, by value."""

import base64

import cloudpickle

GIVEN = cloudpickle.loads(base64.b85decode({!r}))
'''


class Outcome:
    """The results of one run: verdicts, an answer in sentences, and every measurement.

    >>> stored_run = attnbench.load(stored)
    >>> stored_run.verdicts, round(stored_run.ratio, 1)
    ({'fused': 'slower'}, 1.5)
    """

    def __init__(
        self, results: Results, verdicts: Mapping[str, str], recommendations: Sequence[Recommendation] = ()
    ) -> None:
        """Store the results of a run, its verdicts by implementation name, and the recommendations of `fastest`."""
        self.results, self.verdicts, self.recommendations = results, dict(verdicts), list(recommendations)

    @property
    def folder(self) -> Path:
        """The folder of the run. After `check` it no longer exists."""
        return self.results.folder

    @property
    def verdict(self) -> str:
        """The verdict on the only implementation that was checked, or compared with the baseline.

        After a check it is `right`, `imprecise`, `approximate`, `WRONG` or `not judged`. The words `where tried` after
        `right` or `imprecise` mean that too few workloads could be compared for a verdict on the implementation as a
        whole. After a comparison it is `faster`, `slower`, `equivalent`, `undecided`, `WRONG` or `not compared`. Over
        several workloads it is the worst verdict; after a comparison, the first in the order WRONG, slower, undecided,
        equivalent, faster.

        Raises:
            ValueError: there is not exactly one verdict; use `verdicts`.
        """
        return _only([*self.verdicts.values()], "verdicts")

    @property
    def choice(self) -> str:
        """The name of the implementation that `fastest` recommends for a single shape; "" if none qualifies.

        Raises:
            ValueError: there is not exactly one shape; use `recommendations`.
        """
        return _only(self.recommendations, "recommendations").choice

    @property
    def comparisons(self) -> list[Comparison]:
        """The comparisons with the baseline, one for each implementation and workload: ratio, interval, verdict."""
        return comparisons(self.results)

    @property
    def comparison(self) -> Comparison:
        """The only comparison, with its ratio, interval and verdict.

        Raises:
            ValueError: there is none, or there are several; use `comparisons`.
        """
        return _only(self.comparisons, "comparisons")

    @property
    def ratio(self) -> float:
        """The implementation's time per call divided by the baseline's, in the only comparison; below 1 means faster.

        Raises:
            ValueError: there is no comparison, or there are several; use `comparisons`.
        """
        return self.comparison.ratio

    @property
    def undecided(self) -> list[str]:
        """A sentence for each undecided comparison: ratio, interval, reason, and the budget that may decide it."""
        open_ = [each for each in self.comparisons if each.reason]
        return [f"{self._sentence(each)}, undecided: {each.reason}{self._budget(each)}" for each in open_]

    def _budget(self, compared: Comparison) -> str:
        """Describe the budget that may decide a comparison, estimated from the processes so far; "" if unknown."""
        number, so_far_s = compared.num_needed, self.results.elapsed_s
        if number is None or so_far_s is None:
            return ""
        needed_s = math.ceil(so_far_s * number / compared.effect.num_measured)
        return f"; a budget of {needed_s} s ({number} processes) may decide it"

    def require_not_slower(self, undecided: Callable[[str], object] = warnings.warn) -> None:
        """Raise an error if an implementation is slower than the baseline on a workload, or was not compared on it.

        Otherwise, if some comparisons are undecided, `undecided` is called once, with a text that has a line for each
        of them. The default warns; `pytest.skip` skips the test, and `pytest.fail` fails it.

        Raises:
            AssertionError: an implementation is slower, or was not compared.
        """
        __tracebackhide__ = True  # pytest shows the line of the test instead of this function
        shapes, cells = titles.names(self.results), self.results.records
        bad = [self._sentence(each) for each in self.comparisons if each.verdict is Verdict.slower]
        compared = {(each.workload.id, each.implementation) for each in self.comparisons}
        ends = {(each.workload.id, each.implementation): f"{each.status}: {each.message}" for each in cells}
        missing = [key for key in product(shapes, self.verdicts) if key not in compared]
        bad += [f"{key[1]} on {shapes[key[0]]}: not compared ({ends.get(key, 'not reached')})" for key in missing]
        if bad:
            raise AssertionError("\n".join(bad))
        if self.undecided:
            undecided("\n".join(self.undecided))

    def _sentence(self, compared: Comparison) -> str:
        name = titles.names(self.results)[compared.workload.id]
        ratio = factor(compared.ratio, compared.low, compared.high, compared.baseline)
        return f"{compared.implementation} on {name}: {ratio}"

    @property
    def answer(self) -> list[str]:
        """The warnings of the run, a line for each wrong implementation, and the answer in sentences."""
        wrong = {record.implementation: record.message for record in reversed(self.results.records) if record.is_wrong}
        answer = list(map(recommended.answer, self.recommendations)) or summary.answer(self.results)
        return [*summary.troubles(self.results), *(f"{name}: {why}" for name, why in wrong.items()), *answer]

    def to_frame(self) -> "pd.DataFrame":
        """Return a data frame with one row for each implementation and workload; columns as in `attnbench.table`."""
        return cells_of(self.results).copy()

    def plot(self, kind: str = "ratio") -> Picture | None:
        """Draw a picture, which notebooks show; return None if there is nothing to draw.

        `kind` is ratio, latency, memory, or picture: time against length or, if that cannot be drawn, ratios.

        Raises:
            ValueError: there is no such kind.
        """
        reports = plugs("attnbench.reports", "REPORT")
        draw = {name.removesuffix("_plot"): each.draw for name, each in reports.items() if each.draw is not None}
        require_known("plot", [kind], draw)
        picture: Picture | None = draw[kind](self.results)
        return picture

    def __repr__(self) -> str:
        """Format the verdicts, the answer, and the time and verdict of each shape, as `attnbench run` prints them."""
        shapes, base = answers.shapes(self.results), titles.base(self.results.plan)
        head = ", ".join(f"{name}: {verdict}" for name, verdict in self.verdicts.items())
        rows = [line.text for line in screen.table(shapes, base)]
        return "\n".join([*([f"<{head}>"] if head else []), *self.answer, *rows])

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"


def _only(items: Sequence[T], name: str) -> T:
    if len(items) != 1:
        raise ValueError(f"there are {len(items)} {name}, not one: use `{name}`")
    return items[0]


def check(
    *given: Given,
    seed: int | None = None,
    timeout: float = 60.0,
    reject: Sequence[str] = (),
    **axes: Any,  # noqa: ANN401 - one value of an axis, or several
) -> Outcome:
    """Compare the outputs and gradients of implementations with the float64 oracle.

    Without axes, the workloads are those of the sweep `check`. An axis, as in `attnbench list axes`, gets a value or a
    list of values; with axes other than `device`, exactly the workloads of these axes are checked. `seed` is the seed
    of the inputs; by default it is drawn at random. A step of a check, such as one kind of inputs, is killed after
    `timeout` seconds. `reject` lists behaviours that count as wrong here, and are otherwise accepted or only noted,
    such as "empty_rows"; `attnbench check --help` has all their names.

    Raises:
        ValueError: there is no such implementation, axis or value; the message names the allowed ones.

    >>> attnbench.check("sdpa", seq_len=16, num_heads=2, mask="causal", scope="attention").verdict
    'right'
    """
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as name:
        specs = _specs(given, Path(name))
        more: dict[str, Any] = {"timeout_s": timeout, "metrics": (), "rejects": rejected(reject)}
        results = _executed("check", specs, Path(name), seed, axes, stages=("check",), with_baseline=False, **more)
    return Outcome(results, {each.implementation: each.word for each in judgements(results)})


def compare(  # noqa: PLR0913 - all have useful defaults
    *given: Given,
    baseline: Given | None = None,
    budget: float = 30.0,
    smallest_effect: float = SMALLEST_EFFECT,
    false_share: float = FALSE_SHARE,
    conditions: str = "",
    seed: int | None = None,
    results: str | Path = "results",
    **axes: Any,  # noqa: ANN401 - one value of an axis, or several
) -> Outcome:
    """Check implementations and time them against a baseline, repeatedly in random order, for up to `budget` seconds.

    By default, `baseline` is the last of several implementations, or `sdpa` if there is only one implementation. The
    run ends early once every comparison is decided. Times are equivalent if their relative difference is below
    `smallest_effect` (0.02 is 2 %). At most the share `false_share` of the verdicts faster and slower is expected to be
    false. `conditions` are those of `attnbench run --conditions`, such as "steady", which fixes how freed memory is
    handled. Axes are as in `check`. The run is stored below the folder `results`, where the commands find it.

    Raises:
        ValueError: there is no such implementation, axis or value; the message names the allowed ones.

    >>> found = attnbench.compare("fused", "sdpa", seq_len=16, num_heads=2, scope="attention", budget=1)
    >>> found.comparisons[0].implementation, found.comparisons[0].baseline
    ('fused', 'sdpa')
    """
    if baseline is None:
        given, baseline = (given[:-1], given[-1]) if len(given) > 1 else (given, "sdpa")
    folder = execution.new_folder(Path(results), "compare")
    specs, (reference,) = _specs(given, folder), _specs([baseline], folder, "base_")
    if len(specs) == 1 and name_of(specs[0]) == name_of(reference):
        specs = [f"{name_of(reference)} (candidate)={specs[0]}"]
    more: dict[str, Any] = {"budget_s": budget, "smallest_effect": smallest_effect, "false_share": false_share}
    more |= condition_fields(conditions)
    return outcome(_executed("quick", specs, folder, seed, axes, baseline=reference, **more))


def run(
    sweep: str = "quick",
    *given: Given,
    budget: float | None = None,
    seed: int | None = None,
    results: str | Path = "results",
    **axes: Any,  # noqa: ANN401 - one value of an axis, or several
) -> Outcome:
    """Run a sweep (a set of workloads, given by its name or as a TOML file), as `attnbench run` does.

    The axes select workloads of the sweep. By default, the implementations and the `budget` (in seconds) are those of
    the sweep. The run is stored below the folder `results`, together with its reports.

    Raises:
        ValueError: there is no such sweep, implementation, axis or value; the message names the allowed ones.

    >>> shape = {"seq_len": 512, "mask": "causal", "scope": "attention", "direction": "inference", "dtype": "float32"}
    >>> (attnbench.run("quick", "fused", budget=1, **shape).folder / "report.html").exists()
    True
    """
    folder = execution.new_folder(Path(results), Path(sweep).stem)
    found = _executed(sweep, _specs(given, folder), folder, seed, axes, is_exact=False, budget_s=budget)
    for failed in write_usual(found):
        warnings.warn(failed, stacklevel=2)
    return outcome(found)


def fastest(  # noqa: PLR0913 - all have useful defaults
    *given: Given,
    budget: float | None = None,
    memory: str = "",
    deterministic: bool = False,
    model: str = "",
    phase: str = "prefill",
    seed: int | None = None,
    results: str | Path = "results",
    **axes: Any,  # noqa: ANN401 - one value of an axis, or several
) -> Outcome:
    """Recommend an implementation for shapes on this machine within `budget` seconds, as `attnbench fastest` does.

    By default, the candidates are the implementations of attnbench, except a few that are slow or compile for each
    length. `memory`, such as "512MiB", is the most memory that a call may need beyond its inputs ("": no limit).
    `deterministic` excludes implementations whose output for the same input varies. `model` is a preset's name or the
    path of a config.json; `phase` is prefill, decode or training. direction="forward_backward" adds the backward pass.
    The run is stored below the folder `results`.

    Raises:
        ValueError: there is no such implementation, model, axis or value; the message names the allowed ones.

    >>> attnbench.fastest("fused", "sdpa", seq_len=16, num_heads=2, budget=1).choice in {"fused", "sdpa"}
    True
    """
    memory_bytes = int(quantity(memory, "size")) if memory else 0
    limits: dict[str, Any] = {"memory_bytes": memory_bytes, "is_deterministic": deterministic}
    folder, then = execution.new_folder(Path(results), "fastest"), partial(read_first_calls, **limits)
    more: dict[str, Any] = {"is_exact": bool(axes or model), "budget_s": budget, "model": model, "phase": phase}
    measured = _executed("fastest", _specs(given, folder), folder, seed, axes, adjust=plan_to_choose, then=then, **more)
    return Outcome(measured, {}, recommend(measured, **limits))


def read_first_calls(session: execution.Session, *, memory_bytes: int, is_deterministic: bool) -> None:
    """Measure the first calls of the baseline and of the choice at each shape where the choice is not the baseline."""
    results = judge(session.folder, session.state)
    cells = []
    for each in recommend(results, memory_bytes=memory_bytes, is_deterministic=is_deterministic):
        if each.choice != each.reference and {each.choice, each.reference} <= each.seconds.keys():
            cells += [(each.workload, Arm(implementation=name)) for name in (each.reference, each.choice)]
    execution.read_first_calls(session, cells)


def load(path: str | Path, results: str | Path = "results") -> Outcome:
    """Read a stored run by its folder, its journal, or its name below the folder `results`.

    Raises:
        ValueError: there is no such run, or it is damaged.

    >>> attnbench.load(stored).to_frame()[["implementation", "status"]].values.tolist()
    [['sdpa', 'ok'], ['fused', 'ok']]
    """
    is_there = Path(path).exists()
    return outcome(read(Path(path) if is_there else find_run(str(path), Path(results))))


def outcome(results: Results) -> Outcome:
    """Return the outcome of a run, with a verdict on each implementation but the baseline (see `Outcome.verdict`)."""
    names = [name for name in map(name_of, results.plan.implementations) if name != results.plan.baseline]
    verdicts = dict.fromkeys(names, "not compared")
    for verdict in reversed(WORST_FIRST):  # the worst verdict comes last and stays
        verdicts |= {each.implementation: str(verdict) for each in comparisons(results) if each.verdict is verdict}
    wrong = {each.implementation: str(CheckVerdict.wrong) for each in results.records if each.is_wrong}
    return Outcome(results, {name: (verdicts | wrong)[name] for name in names})


def _executed(  # noqa: PLR0913 - a run has all of these
    sweep: str,
    specs: Sequence[str],
    folder: Path,
    seed: int | None,
    axes: Mapping[str, Any],
    *,
    stages: Sequence[str] = execution.STAGES,
    adjust: Callable[[Plan], Plan] = lambda plan: plan,
    then: Callable[[execution.Session], object] | None = None,
    **more: Any,  # noqa: ANN401 - other parameters of build_plan
) -> Results:
    """Plan and execute a run, whose processes can import the same modules as this process; return its results."""
    several = {axis: value if isinstance(value, list | tuple | range) else [value] for axis, value in axes.items()}
    settings = [f"{axis}={','.join(map(str, values))}" for axis, values in several.items()]
    usual: dict[str, Any] = {"is_exact": True, "implementations": specs, "seed": draw_seed() if seed is None else seed}
    planned = adjust(build_plan(sweep=sweep, settings=settings, **(usual | more)))
    before = dict(os.environ)
    os.environ["PYTHONPATH"] = os.pathsep.join(each for each in sys.path if Path(each or "/nothing").is_dir())
    unstored = Unstored() if tuple(stages) == ("check",) else None
    lanes: AbstractContextManager[list[Any]] = nullcontext([])
    if unstored and execution.has_lanes(planned):
        lanes = execution.checking_templates(folder, planned.timeout_s)
    try:
        with watching() as watch, lanes as templates:
            execution.execute(planned, folder, watch, stages, then=then, templates=templates, unstored=unstored)
    finally:
        del os.environ["PYTHONPATH"]
        os.environ |= before
    return judge(folder, unstored.state) if unstored else read(folder)


def _specs(given: Iterable[Given], folder: Path, prefix: str = "") -> list[str]:
    """Return specs of implementations; an implementation that no file defines is pickled into a file in `folder`."""
    specs: list[str] = []
    values: dict[str, Any] = {}
    file = folder / f"{prefix}given.py"
    for each in given:
        if isinstance(each, str):
            specs += expand_spec(each)
        elif found := _in_a_file(each):
            specs.append(found)
        else:
            name = getattr(each, "__name__", type(each).__name__)
            name = name if name.isidentifier() else f"given_{len(values) + 1}"
            values[name if name not in values else f"{name}_{len(values) + 1}"] = each
            specs.append(f"{file}:{list(values)[-1]}")
    if values:
        import cloudpickle  # rarely needed

        folder.mkdir(parents=True, exist_ok=True)
        text = BY_VALUE.format(base64.b85encode(cloudpickle.dumps(values)).decode())
        names = "".join(f"{name} = GIVEN[{name!r}]\n" for name in values)
        file.write_text(text + names, encoding="utf-8")
    return specs


def _in_a_file(value: Any) -> str:  # noqa: ANN401 - any value
    """Return the spec FILE.py:NAME of a value; "" if it was defined in a notebook, a script or a function."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    name = getattr(value, "__qualname__", "")
    if module is None or module.__name__ == "__main__" or getattr(module, name, None) is not value:
        return ""
    file = getattr(module, "__file__", None)
    return f"{file}:{name}" if file and file.endswith(".py") else ""
