"""The table that the summary, the page and the terminal share: one row for each cell, as raw values and as text."""

import math
from dataclasses import dataclass

from attnbench.analysis.breakdown import allocated_bytes, num_operators, ran, timed
from attnbench.analysis.cached import once
from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.rates import Rates, executed_ratio
from attnbench.analysis.results import Results
from attnbench.reports import words
from attnbench.reports.doubts import held_against
from attnbench.reports.explained import costs, explained
from attnbench.statistics.intervals import Estimate, median, median_estimate
from attnbench.storage.records import Arm, Comparison, Key, Operators, Record, Status, Verdict
from attnbench.units import MISSING, duration, scale_of, show, significant
from attnbench.workloads.counts import arithmetic_intensity, score_matrix_bytes
from attnbench.workloads.workload import Workload

COLUMNS = (
    *("length", "implementation", "status", "time per call", "ratio", "verdict", "why slower"),
    *("ran", "operators", "allocated", "memory", "products", "traffic", "intensity", "executed"),
    *("error", "notes"),
)
LEGEND = (
    "Time per call is the median, with its 95 % interval in brackets; ratio is the time divided by the baseline's in "
    "the same block: below 1 is faster. Memory is the peak of one call above its inputs, in brackets as multiples of "
    "the textbook's score matrix S. Why slower names the two largest parts of what a cell spends more than the "
    "fastest of its workload, kind by kind of operator (page faults are an estimate); ran is the backend of PyTorch's "
    "SDPA, or else the operator with the most time; allocated is all that one call asks for, freed or not. "
    "Products are useful FLOPs per second (of visible pairs), traffic is compulsory bytes per second (inputs read "
    "once, results written once), each in brackets as a share of the ceiling that this run measured; intensity is "
    "useful FLOPs for each compulsory byte; executed says how many FLOPs are computed for each useful one. Error is "
    "the largest error as a share of what is allowed: above 1 disagrees."
)
WORTH_TELLING = 1.0
"""Where even a factor of two would be missed, what would be seen is no number to read."""
HUGE = 1000.0


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell: raw values, and `cells`, the text under each of COLUMNS, never blank."""

    group: str
    workload: Workload
    arm: Arm
    status: Status
    is_predicted: bool
    is_baseline: bool
    message: str
    time: Estimate | None  # seconds per call
    cost_s: float  # the same, by which rows of a workload may be compared (explained.costs); 0.0 where it was not timed
    comparison: Comparison | None
    operators: Operators | None
    peak_memory_bytes: float | None
    error_ratio: float | None
    rates: Rates | None
    doubts: tuple[str, ...]
    cells: dict[str, str]

    @property
    def implementation(self) -> str:
        """The implementation as it is shown: `fused`, or of two sides `fused (base)` and `fused`."""
        return str(self.arm)

    @property
    def sort_key(self) -> tuple[int, int, float, float]:
        """By length, then fastest first: by ratio, since an arm decided early saw another mood of the machine."""
        length = self.workload.seq_len, self.workload.kv_len
        if self.time is None:
            return *length, math.inf, math.inf
        return *length, self.cost_s, self.time.point


@once
def rows(results: Results) -> list[Row]:
    """Every record as a row: groups in the order of the plan, inside a group by length and then fastest first."""
    compared = {each.key: each for each in comparisons(results)}
    costs_s = costs(results.records, results.plan.reference, compared)
    reasons = explained(results.records, costs_s)
    made = [_row(record, results, compared, reasons, costs_s) for record in results.records]
    order = {group: place for place, group in enumerate(dict.fromkeys(row.group for row in made))}
    return sorted(made, key=lambda row: (order[row.group], *row.sort_key))


def absent(results: Results) -> dict[str, str]:
    """Implementations that this run could not have, unsupported in each of their cells, and the first reason given.

    None where nothing else is left to show; nor of two sides, where what one of them has lost must be seen.
    """
    statuses: dict[str, set[Status]] = {}
    for record in results.records:
        statuses.setdefault(record.implementation, set()).add(record.status)
    names = {name for name, found in statuses.items() if found == {Status.unsupported}}
    if results.plan.sides is not None or len(names) == len(statuses):
        return {}
    told = ((record.implementation, record.message) for record in reversed(results.records))
    return {name: reason for name, reason in reversed(dict(told).items()) if name in names}


def shown(results: Results) -> list[Row]:
    """The rows of tables and pictures: all but those of implementations that this run could not have."""
    left_out = absent(results)
    return [row for row in rows(results) if row.implementation not in left_out]


def groups(results: Results) -> dict[str, list[Row]]:
    """What is shown by its group's title, titles in the order of the plan."""
    found: dict[str, list[Row]] = {}
    for row in shown(results):
        found.setdefault(row.group, []).append(row)
    return found


def span(point: float, low: float | None, high: float | None, unit: str = "") -> str:
    """A point and its interval in one unit, with as many digits as the interval is worth: "1.23 ms (1.20 to 1.27)"."""
    if low is None or high is None:
        return show(point, unit)
    divisor, symbol = scale_of(point, unit)
    lead = 1 + math.floor(math.log10(point / divisor))
    needed = 2 - math.ceil(math.log10((high - low) / 2 / point)) if high > low else 3
    decimals = max(0, min(max(needed, 3), 5) - lead)
    shown = [f"{value / divisor:.{decimals}f}" for value in (point, low, high)]
    return f"{shown[0]} {symbol}".rstrip() + f" ({shown[1]} to {shown[2]})"


def percent(share: float) -> str:
    """A share as a percentage: 0.0213 is "2.1 %"."""
    return f"{significant(100 * share, 2)} %"


def _row(
    record: Record,
    results: Results,
    compared: dict[Key, Comparison],
    reasons: dict[Key, str],
    costs_s: dict[Key, float],
) -> Row:
    latency = record.measurement("latency")
    memory = record.measurement("peak_memory")
    comparison = compared.get(record.key)
    time = median_estimate(latency.samples) if latency is not None and latency.samples else None
    peak = median(sample.value for sample in memory.samples) if memory is not None and memory.samples else None
    is_baseline = results.plan.is_reference(record.arm)
    strange = results.warnings.get(record.key, ())
    doubts = (*held_against(record, time, results.discarded.get(record.workload.id, ()), results.system_load), *strange)
    rated = None if time is None else results.rates(record.workload, time.point)
    texts = {
        "length": words.length(record.workload),
        "implementation": words.plain(str(record.arm)) or MISSING,
        "status": f"{record.status} (predicted)" if record.is_predicted else str(record.status),
        "time per call": MISSING if time is None else span(time.point, time.low, time.high, "s"),
        "ratio": _ratio(comparison, is_baseline=is_baseline and time is not None),
        "verdict": _verdict(comparison, is_baseline=is_baseline and time is not None, is_timed=time is not None),
        "why slower": reasons.get(record.key, MISSING),
        **_ran(record.operators),
        "memory": _memory(peak, record.workload),
        **_work(record, rated),
        "error": _error(record),
        "notes": "; ".join(doubts) or _reason(record),
    }
    return Row(
        group=words.title(record.workload),
        workload=record.workload,
        arm=record.arm,
        status=record.status,
        is_predicted=record.is_predicted,
        is_baseline=is_baseline,
        message=record.message,
        time=time,
        cost_s=costs_s.get(record.key, 0.0),
        comparison=comparison,
        operators=None if record.operators is None else timed(record.operators, latency),
        peak_memory_bytes=peak,
        error_ratio=None if record.agreement is None else record.agreement.error_ratio,
        rates=rated,
        doubts=doubts,
        cells=texts,
    )


def _reason(record: Record) -> str:
    told = record.message or (record.agreement.diagnosis if record.agreement is not None else "")
    return words.plain(told) or (MISSING if record.status is Status.ok else "no reason was recorded")


def _ratio(comparison: Comparison | None, *, is_baseline: bool) -> str:
    if comparison is None:
        return "1" if is_baseline else MISSING
    return span(comparison.ratio, comparison.low, comparison.high)


def _verdict(comparison: Comparison | None, *, is_baseline: bool, is_timed: bool) -> str:
    if comparison is None:
        return "baseline" if is_baseline else ("no baseline" if is_timed else MISSING)
    effect = comparison.minimum_detectable_effect
    if comparison.verdict is Verdict.equivalent:
        within = f"equivalent within {percent(comparison.sameness)}"
        return within if effect is None else f"{within} (would see {percent(effect)})"
    if comparison.verdict is not Verdict.undecided:
        return str(comparison.verdict)
    more = "" if comparison.more_s is None else f"; {duration(comparison.more_s)} more may tell"
    seen = "too few visits" if effect is None or effect > WORTH_TELLING else f"would see {percent(effect)}"
    return f"undecided ({seen}{more})"


def _work(record: Record, rated: Rates | None) -> dict[str, str]:
    """What the time means as work: "85.1 GFLOP/s (84 %)", "1.20 GB/s (4.1 %)", "128 FLOP/B", "2.0 x" or "unknown"."""
    if rated is None:
        return dict.fromkeys(("products", "traffic", "intensity", "executed"), MISSING)
    ratio = executed_ratio(record.workload, record.executed_flops)
    return {
        "products": _rate(rated.flops_per_s, "flops/s", rated.matmul_share),
        "traffic": _rate(rated.bytes_per_s, "bytes/s", rated.copy_share),
        "intensity": f"{significant(arithmetic_intensity(record.workload), 3)} FLOP/B",
        "executed": "unknown" if ratio is None else f"{significant(ratio, 2)} x",
    }


def _rate(rate: float, unit: str, share: float | None) -> str:
    return show(rate, unit) + ("" if share is None else f" ({percent(share)})")


def _ran(operators: Operators | None) -> dict[str, str]:
    """What ran, how many operators, and how much they asked for."""
    if operators is None:
        return dict.fromkeys(("ran", "operators", "allocated"), MISSING)
    number, asked = num_operators(operators), allocated_bytes(operators)
    return {"ran": words.plain(ran(operators)), "operators": f"{number:,}", "allocated": show(asked, "bytes")}


def _memory(peak: float | None, workload: Workload) -> str:
    """The peak beside the textbook: "17.0 MiB (2.1 S)" is as much as 2.1 score matrices of B * H * T * S numbers."""
    if peak is None:
        return MISSING
    return f"{show(peak, 'bytes')} ({significant(peak / score_matrix_bytes(workload), 2)} S)"


def _error(record: Record) -> str:
    if record.agreement is None:
        return MISSING
    ratio = record.agreement.error_ratio
    if ratio is None:
        return "not finite" if any(record.agreement.tensors()) else MISSING
    return significant(ratio, 2) if ratio < HUGE else f"{ratio:.0e}"
