"""The cells of a run with their derived values, and columns that format these for screens, tables, charts and JSON."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnbench.analysis.breakdown import backend_used
from attnbench.analysis.comparisons import LARGEST_DETECTABLE, Comparison, comparisons, paired_times, reference
from attnbench.analysis.conclusion import Mark, factor, mark_of
from attnbench.analysis.first_calls import break_evens
from attnbench.analysis.recommendation import PEAK_MEMORY
from attnbench.analysis.results import Results
from attnbench.analysis.sanity import warnings_of
from attnbench.analysis.table import MetricColumn, metric_columns, metrics_of
from attnbench.analysis.warned import Warned
from attnbench.reports import titles
from attnbench.statistics.break_even import BreakEven
from attnbench.statistics.intervals import Estimate, median, median_estimate
from attnbench.storage.records import LATENCY, Key, Record, Status, Verdict
from attnbench.storage.samples import Samples
from attnbench.units import MISSING, SCALES, grouped, multiple, percent, sanitize_line, show, span
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload

SURELY = 2.0
"""An undecided implementation without an interval may be faster only if its time is below this multiple of the
baseline's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Cell:
    """One implementation on one workload, with its record, its comparison with the baseline, and its warnings."""

    record: Record
    comparison: Comparison | None  # with the baseline, or with the implementation that replaces it
    is_baseline: bool  # whether this is the baseline, or the implementation that replaces it
    seconds: float | None  # of a call: the baseline's median times the ratio; None if wrong, failed or not timed
    substitute: str  # the implementation that replaces a baseline without a time; "" if the baseline has one
    matmul_rate: float | None  # FLOP/s of the run's fastest matrix product on the cell's hardware
    warnings: tuple[Warned, ...]
    copy_rate: float | None = None  # bytes/s of a copy of as many bytes as a batch's keys and values
    break_even: BreakEven | None = None  # when its first call has paid off; None: unknown, or this is the baseline
    is_gathered: bool = False  # the keys are gathered from their pages before the call, outside of its time

    @property
    def workload(self) -> Workload:
        """The workload of the cell."""
        return self.record.workload

    @property
    def name(self) -> str:
        """The implementation or, if two states of the code are compared, "base" or "candidate"."""
        return self.record.side or sanitize_line(self.record.implementation) or MISSING

    @cached_property
    def mark(self) -> Mark | None:
        """The result of the cell as a mark; None if it is unsupported, or was predicted to exceed a limit."""
        if self.comparison is None:
            return mark_of(self.record)
        return mark_of(self.record, self.comparison.verdict, is_doubtful=self.comparison.is_doubtful)

    @property
    def ratio(self) -> float | None:
        """The cell's time divided by the baseline's: 1 for the baseline itself, None if the two were not compared."""
        alone = 1.0 if self.is_baseline and self.seconds is not None else None
        return alone if self.comparison is None else self.comparison.ratio

    @property
    def ratio_ends(self) -> tuple[float | None, float | None]:
        """Lower and upper end of the interval of the ratio; both are None if there is no interval."""
        return (None, None) if self.comparison is None else (self.comparison.low, self.comparison.high)

    @property
    def speedup(self) -> float:
        """The baseline's time divided by the cell's: above 1 the cell is faster. 1 if the two were not compared."""
        return 1 / self.ratio if self.ratio else 1.0

    @property
    def factor(self) -> float:
        """The speedup or, if the cell is slower, the inverse of the speedup: 1 or more."""
        return max(self.speedup, 1 / self.speedup)

    @property
    def may_be_faster(self) -> bool:
        """Whether the cell is doubtful, or is undecided and may be faster by more than the margin.

        False if its time leaves out the gathering of keys, or if it has no interval and its ratio is at least SURELY.
        """
        if self.is_gathered:
            return False
        if self.comparison is None or self.mark is not Mark.undecided:
            return self.mark is Mark.doubtful
        if self.comparison.low is None:
            return self.comparison.ratio < SURELY
        return self.comparison.low < 1 / (1 + self.comparison.margin)

    @cached_property
    def estimate(self) -> Estimate | None:
        """The median of the cell's own samples with its interval, in seconds; None if the cell was not timed."""
        samples = self.record.samples(LATENCY)
        return median_estimate(samples) if samples else None

    @property
    def ends(self) -> tuple[float | None, float | None]:
        """The 95 % interval of the cell's own median, scaled so that the median becomes `seconds`.

        The median differs from `seconds`, because it comes from all samples of the cell, and `seconds` from the blocks
        that the cell shares with the baseline.
        """
        if self.estimate is None or self.seconds is None:
            return None, None
        moved = self.seconds / self.estimate.point
        low, high = self.estimate.low, self.estimate.high
        return None if low is None else moved * low, None if high is None else moved * high

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The median of every metric except times, by name."""
        return {one.metric: median(Samples.of(one.samples).value) for one in metrics_of(self.record)}

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of a call beyond its inputs, in bytes; None if it was not measured."""
        return self.metrics.get(PEAK_MEMORY)

    @property
    def rate(self) -> float | None:
        """Useful FLOPs, those of visible pairs of query and key, per second; None without a time."""
        return None if self.estimate is None else counts.useful_flops(self.workload) / self.estimate.point

    @property
    def cache_rate(self) -> float | None:
        """Bytes of keys and values that a batch of requests has to read, per second; None without a batch or a time."""
        is_timed = self.estimate is not None and bool(self.workload.requests)
        return counts.cache_bytes(self.workload) / self.estimate.point if is_timed and self.estimate else None

    @property
    def token_rate(self) -> float | None:
        """New tokens per second, for a batch of requests; None without a batch or a time."""
        return self.workload.seq_len / self.estimate.point if self.workload.requests and self.estimate else None

    @property
    def error(self) -> float | None:
        """The largest error / tolerance; None if an error is not finite, or nothing was compared."""
        return None if self.record.agreement is None else self.record.agreement.error_ratio


@lru_cache(maxsize=1)
def all_cells(results: Results) -> dict[Key, Cell]:
    """Return all cells of a run by key, in the order of its records. The cells of the latest run are cached."""
    by_key, times_s = {each.key: each for each in comparisons(results)}, paired_times(results)
    cells = {}
    for record in results.records:
        ceilings = results.ceilings.get((record.host, record.workload.place))
        samples = record.samples(LATENCY)
        cautions = warnings_of(record, median_estimate(samples) if samples else None)
        first = reference(results, record.key)
        cells[record.key] = Cell(
            record=record,
            comparison=by_key.get(record.key),
            is_baseline=record.arm == first,
            seconds=None if mark_of(record) in {Mark.wrong, Mark.failed} else times_s.get(record.key),
            substitute="" if results.plan.is_reference(first) else str(first),
            matmul_rate=None if ceilings is None or ceilings.matmul is None else ceilings.matmul.rate,
            copy_rate=_copy_rate(results, record),
            warnings=(*cautions, *results.warnings.get(record.key, ())),
            break_even=break_evens(results).get(record.key),
            is_gathered=results.is_gathered(record),
        )
    return cells


def gathered_line(names: Iterable[str]) -> str:
    """Say for which implementations the keys were gathered; "" if there are none."""
    dense = ", ".join(dict.fromkeys(names))
    return f"{dense}: the keys were gathered before the call, outside of its time." if dense else ""


def _copy_rate(results: Results, record: Record) -> float | None:
    """Return the bytes/s of a copy as large as the keys and values of a batch; None if it was not measured."""
    ceilings = results.ceilings.get((record.host, record.workload.place))
    if ceilings is None or not record.workload.requests:
        return None
    copy = ceilings.copy(counts.cache_bytes(record.workload), is_cold=results.plan.cache == "cold")
    return None if copy is None else copy.rate


def absent_implementations(results: Results) -> dict[str, str]:
    """Return the implementations that are unsupported in all their cells, each with its first reason.

    The dict is empty if no implementation is supported. It is also empty if the run compares two states of the code, so
    that a loss of support stays visible.
    """
    supported = {record.implementation for record in results.records if record.status is not Status.unsupported}
    if results.plan.sides is not None or not supported:
        return {}
    reasons = {record.implementation: record.message for record in reversed(results.records)}
    names = dict.fromkeys(record.implementation for record in results.records)
    return {name: reasons[name] for name in names if name not in supported}


def present_cells(results: Results) -> list[Cell]:
    """Return the cells of a run without the cells of `absent_implementations`."""
    hidden = absent_implementations(results)
    return [cell for cell in all_cells(results).values() if cell.record.implementation not in hidden]


def groups(results: Results) -> dict[str, list[Cell]]:
    """Group `present_cells` by workload title, in the order of the plan; sort each group by length, then by time."""

    def place(cell: Cell) -> tuple[float, ...]:
        return cell.workload.seq_len, cell.workload.kv_len, cell.seconds or math.inf

    by_title = grouped(present_cells(results), lambda cell: titles.title(cell.workload.axes()))
    return {title: sorted(members, key=place) for title, members in by_title.items()}


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column in tables of cells."""

    heading: str
    text: Callable[[Cell], str]  # never returns an empty text
    explanation: str = ""  # the legend's text about the column
    number: Callable[[Cell], float | None] | None = None  # for sorting rows; None: sort by text


def texts(cell: Cell, columns: Sequence[Column]) -> list[str]:
    """Return the row of a cell in a table: its text for each column."""
    return [column.text(cell) for column in columns]


def columns(results: Results) -> list[Column]:
    """Return the columns of a run's tables, including one for each measured metric."""
    paid = [PAID] * bool(break_evens(results))
    of_batches = OF_BATCHES if any(each.requests for each in results.plan.workloads) else ()
    return [*FIRST, *map(_metric, metric_columns(results)), *of_batches, *paid, *LAST]


def legend(shown_columns: Iterable[Column]) -> str:
    """Explain the columns, with one sentence for each column that has an explanation."""
    explained = [column for column in shown_columns if column.explanation]
    return " ".join(f"{column.heading[:1].upper()}{column.heading[1:]}: {column.explanation}." for column in explained)


def status(cell: Cell) -> str:
    """Format the status of a cell: "ok", or "timeout (predicted)"."""
    return f"{cell.record.status} (predicted)" if cell.record.is_predicted else str(cell.record.status)


def verdict(cell: Cell) -> str:
    """Format the verdict on the time of a cell; for a cell that is not ok, return WRONG or its status.

    For faster and slower, the text has the factor and its interval; for equal, the margin; for undecided, the smallest
    detectable difference or, if that is too large, the reason.
    """
    found = cell.comparison
    if cell.record.status is not Status.ok:
        return str(Mark.wrong) if cell.mark is Mark.wrong else status(cell)
    if found is None:
        return MISSING if cell.seconds is None else "baseline" if cell.is_baseline else "no baseline"
    if cell.mark is Mark.doubtful:
        return "doubtful"
    kernel = ", same kernel" if found.is_same_kernel else ""
    if found.verdict is Verdict.equivalent:
        return f"equal within {percent(found.margin)}{kernel}"
    if found.verdict is not Verdict.undecided:
        return f"{factor(found.ratio, found.low, found.high, cell.substitute)}{kernel}"
    is_known = found.detectable is not None and found.detectable <= LARGEST_DETECTABLE
    why = f"{percent(found.detectable or 0.0)} would show" if is_known else str(found.reason)
    return f"undecided ({why}){kernel}"


def _error(cell: Cell) -> str:
    if cell.error is not None:
        return multiple(cell.error)
    agreement = cell.record.agreement
    return "not finite" if agreement is not None and any(True for _ in agreement.tensors()) else MISSING


def notes(cell: Cell) -> str:
    """Return the warnings about a cell, or else the reason why its status is not ok."""
    diagnosis = "" if cell.record.agreement is None else cell.record.agreement.diagnosis
    reason = sanitize_line("; ".join(cell.warnings) or cell.record.message or diagnosis)
    return reason or (MISSING if cell.record.status is Status.ok else "no reason was recorded")


def _rate(cell: Cell) -> str:
    share = "" if not cell.matmul_rate or not cell.rate else f" ({percent(cell.rate / cell.matmul_rate)})"
    return show(cell.rate, "flops/s") + share


def _cache_rate(cell: Cell) -> str:
    share = "" if not cell.copy_rate or not cell.cache_rate else f" ({percent(cell.cache_rate / cell.copy_rate)})"
    return show(cell.cache_rate, "bytes/s") + share


def _metric(measured: MetricColumn) -> Column:
    explanation = measured.explanation or "a metric that is not installed here"

    def number(cell: Cell) -> float | None:
        return cell.metrics.get(measured.metric)

    def text(cell: Cell) -> str:
        value = number(cell)
        if value is None or measured.unit in SCALES:
            return show(value, measured.unit)
        return f"{value:,.6g} {'' if measured.unit in measured.heading else measured.unit}".rstrip()

    return Column(heading=measured.heading, text=text, explanation=explanation, number=number)


FIRST = (
    Column(
        heading="length",
        text=lambda cell: titles.length(cell.workload.axes()),
        number=lambda cell: float(cell.workload.kv_len),
    ),
    Column(heading="implementation", text=lambda cell: sanitize_line(str(cell.record.arm)) or MISSING),
    Column(
        heading="time per call",
        text=lambda cell: MISSING if cell.seconds is None else span(cell.seconds, *cell.ends, "s"),
        explanation="the baseline's median times the measured ratio; in brackets the 95 % interval of this "
        "implementation's own median",
        number=lambda cell: cell.seconds,
    ),
    Column(
        heading="verdict",
        text=verdict,
        explanation="the time relative to the baseline's in the same blocks; in brackets the interval of the factor "
        "or, if undecided, the smallest difference that would show",
        number=lambda cell: cell.ratio,
    ),
    Column(
        heading="ran",
        text=lambda cell: (
            MISSING if cell.record.operators is None else sanitize_line(backend_used(cell.record.operators))
        ),
        explanation="the backend of PyTorch's SDPA, or else the operator with the most time",
    ),
)
OF_BATCHES = (
    Column(
        heading="keys and values",
        text=_cache_rate,
        explanation="bytes of keys and values that a batch must read per second, in brackets as a share of a copy of "
        "as many bytes in this run",
        number=lambda cell: cell.cache_rate,
    ),
    Column(
        heading="tokens",
        text=lambda cell: show(cell.token_rate, "tokens/s"),
        explanation="new tokens of the batch per second, in one layer",
        number=lambda cell: cell.token_rate,
    ),
)
PAID = Column(
    heading="has paid after",
    text=lambda cell: MISSING if cell.break_even is None else cell.break_even.words,
    explanation="calls until a faster implementation has made up for its longer first call",
    number=lambda cell: None if cell.break_even is None else cell.break_even.calls,
)
LAST = (
    Column(
        heading="FLOP/s",
        text=_rate,
        explanation="useful FLOPs (of visible pairs) per second, in brackets as a share of the fastest matrix product "
        "of this run",
        number=lambda cell: cell.rate,
    ),
    Column(
        heading="error",
        text=_error,
        explanation="the largest error / tolerance over all compared tensors; above 1 it is imprecise (still timed) or "
        "WRONG (not timed)",
        number=lambda cell: cell.error,
    ),
    Column(heading="notes", text=notes),
)
"""FIRST: the columns to the left of the metrics. LAST: the columns to their right."""
