"""What a run shows and few people expect, in words with the run's own numbers; what it does not show is not told."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import geometric_mean

import msgspec

from attnbench.analysis.breakdown import times
from attnbench.analysis.results import Results
from attnbench.devices import NOT_NATIVE
from attnbench.reports import words
from attnbench.reports.explained import NEAR
from attnbench.reports.table import Row, percent, shown
from attnbench.storage.operator_kinds import PAGE_FAULTS
from attnbench.storage.records import Verdict
from attnbench.units import show, significant
from attnbench.workloads.workload import Workload

LOW, HIGH = 0.1, 0.25
"""A cliff: page faults are a smaller share of a call than the one, and a larger than the other at the next length."""
COMPILED = "+compile"
"""What a name ends with that stands for the same code by torch.compile."""
FEW = 3
"""So many are told one by one."""
CLEAR = 1.05
"""A ratio nearer to 1 surprises nobody."""

Timed = dict[tuple[Workload, str], Row]
Ratios = list[tuple[Row, float]]


def surprises(results: Results) -> dict[str, str]:
    """By its name, each surprise of this run in one or two sentences; none of two states of the code."""
    if results.plan.sides is not None:
        return {}
    rows = {(row.workload, row.implementation): row for row in shown(results) if row.time is not None}
    told = {name: look(rows) for name, look in LOOKS.items()}
    return {name: words.plain(text) for name, text in told.items() if text}


def _page_faults(rows: Timed) -> str:
    """Where fresh pages become a large part of a call, from one length to the next."""
    cliffs = list(_cliffs(rows))
    if not cliffs:
        return ""
    before, after = max(cliffs, key=lambda pair: _fault_share(pair[1]))
    largest = max(one.largest_bytes for one in after.operators.calls) if after.operators is not None else 0
    names = ", ".join(dict.fromkeys(found.implementation for _, found in cliffs))
    return (
        f"{after.implementation} spends {percent(_fault_share(before))} of a call on fresh pages at length "
        f"{words.length(before.workload)} and {percent(_fault_share(after))} at {words.length(after.workload)} "
        f"({after.group}), where its largest block is {show(largest, 'bytes')}: so large a block goes back to the "
        "system when it is freed, and the next call takes each of its pages anew. An estimate, from the number of "
        f"faults; --allocator retain shows the same code without them. Such a cliff is there for: {names}."
    )


def _cliffs(rows: Timed) -> Iterator[tuple[Row, Row]]:
    """Neighbours in length, the first nearly without page faults, the second full of them."""
    series: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows.values():
        short = "one" if row.workload.seq_len != row.workload.kv_len else ""
        series.setdefault((row.group, row.implementation, short), []).append(row)
    for members in series.values():
        ordered = sorted(members, key=lambda row: (row.workload.seq_len, row.workload.kv_len))
        for before, after in pairwise(ordered):
            if _fault_share(before) < LOW and _fault_share(after) > HIGH:
                yield before, after


def _fault_share(row: Row) -> float:
    if row.operators is None or row.time is None:
        return 0.0
    return times(row.operators, row.time.point).get(PAGE_FAULTS, 0.0) / row.time.point


def _half_precision(rows: Timed) -> str:
    """Half precision that takes longer than float32 does."""
    found: dict[str, Ratios] = {}
    for (workload, name), row in rows.items():
        full = rows.get((msgspec.structs.replace(workload, dtype="float32"), name))
        if workload.dtype in {"bfloat16", "float16"} and full is not None:
            found.setdefault(workload.dtype, []).append((row, _time(row) / _time(full)))
    told = [
        f"{dtype} takes {_times(ratios)} the time of float32, most for {_where(ratios)}{_why(ratios)}"
        for dtype, ratios in found.items()
        if _mean(ratios) > CLEAR
    ]
    if not told:
        return ""
    notes = dict.fromkeys(note for row in rows.values() for note in row.doubts if note.endswith(NOT_NATIVE))
    return f"{'; '.join(told)}.{''.join(f' {note}.' for note in notes)}"


def _compiled(rows: Timed) -> str:
    """Textbook code in whose place the compiler put a fused kernel."""
    told = []
    for name in dict.fromkeys(name for _, name in rows if name.endswith(COMPILED)):
        plain = name.removesuffix(COMPILED)
        mine = [row for (_, other), row in rows.items() if other == name and row.operators is not None]
        written = {row.operators.observed for (_, other), row in rows.items() if other == plain and row.operators}
        became = [row for row in mine if row.operators is not None and row.operators.observed]
        if not became or written != {""}:
            continue
        backends = ", ".join(dict.fromkeys(row.operators.observed for row in became if row.operators is not None))
        ratios = _beside(rows, name, plain, [row.workload for row in became])
        told.append(
            f"in {len(became)} of {len(mine)} workloads what ran of {name} is PyTorch's {backends} kernel, which "
            f"nobody wrote there: the compiler knows the textbook form{_elsewhere(mine, became)}. "
            f"It takes {_times(ratios)} the time of {plain}"
        )
    return "; ".join(told) + "." if told else ""


def _elsewhere(rows: Sequence[Row], became: Sequence[Row]) -> str:
    """The masks under which it does not, where masks make the difference."""
    known = {row.workload.mask for row in became}
    others = {row.workload.mask for row in rows} - known
    is_clear = others and not any(row.workload.mask in known for row in rows if row not in became)
    return f", but not under the mask {' or '.join(sorted(others))}" if is_clear else ""


def _explicit_mask(rows: Timed) -> str:
    """A mask as a tensor, where a flag says the same."""
    causal = [workload for workload, name in rows if name == "sdpa_mask" and workload.mask == "causal"]
    found = _beside(rows, "sdpa_mask", "sdpa", causal)
    if not found or _mean(found) < CLEAR:
        return ""
    return (
        f"the causal mask as a tensor (sdpa_mask) takes {_times(found)} the time of is_causal (sdpa), "
        f"most for {_where(found)}: a tensor must be read, and its kernel cannot skip what it hides."
    )


def _module_list(rows: Timed) -> str:
    """A ModuleList of heads beside one fused projection, length by length."""
    lengths: dict[int, Ratios] = {}
    for row, ratio in _beside(rows, "module_list", "fused", [workload for workload, _ in rows]):
        if row.workload.scope == "module":
            lengths.setdefault(row.workload.seq_len, []).append((row, ratio))
    if not lengths or max(map(_mean, lengths.values())) < CLEAR:
        return ""
    told = ", ".join(f"{_times(lengths[length])} at length {length}" for length in sorted(lengths))
    return f"a ModuleList of heads beside fused, projections included, takes {told}."


def _baseline_beaten(rows: Timed) -> str:
    """Who is faster than the baseline, by verdict."""
    baseline = next((row.implementation for row in rows.values() if row.is_baseline), "")
    faster: dict[str, Ratios] = {}
    for row in rows.values():
        if row.comparison is not None and row.comparison.verdict is Verdict.faster:
            faster.setdefault(row.implementation, []).append((row, 1 / row.comparison.ratio))
    if not faster:
        return ""
    most = sorted(faster.items(), key=lambda item: -len(item[1]))
    others = f", and by {', '.join(name for name, _ in most[FEW:])}" if len(most) > FEW else ""
    told = [
        f"{name} in {len(found)} of {sum(other == name for _, other in rows)} workloads (most for {_where(found)})"
        for name, found in most[:FEW]
    ]
    return f"{baseline} is beaten by {'; '.join(told)}{others}."


def _beside(rows: Timed, name: str, other: str, workloads: Sequence[Workload]) -> Ratios:
    """By the row of `name`, its time divided by that of `other` on each workload, from the same blocks if it can."""
    found = []
    for workload in dict.fromkeys(workloads):
        mine, its = rows.get((workload, name)), rows.get((workload, other))
        if mine is not None and its is not None:
            ratio = _ratio(mine) / _ratio(its) if _is_related(mine, its) else _time(mine) / _time(its)
            found.append((mine, ratio))
    return found


def _is_related(*rows: Row) -> bool:
    return all(row.is_baseline or row.comparison is not None for row in rows)


def _ratio(row: Row) -> float:
    return 1.0 if row.comparison is None else row.comparison.ratio


def _time(row: Row) -> float:
    assert row.time is not None
    return row.time.point


def _mean(ratios: Ratios) -> float:
    return geometric_mean([ratio for _, ratio in ratios])


def _times(ratios: Ratios) -> str:
    """Several ratios in words: "1.8 times (1.2 to 3.1 over 6 cells)"."""
    mean = f"{significant(_mean(ratios), 2)} times"
    if len(ratios) == 1:
        return mean
    low, high = (significant(end(ratio for _, ratio in ratios), 2) for end in (min, max))
    return f"{mean} ({low} to {high} over {len(ratios)} cells)"


def _where(ratios: Ratios) -> str:
    """The row with the largest ratio, and that."""
    row, most = max(ratios, key=lambda one: one[1])
    return f"{row.implementation}, {row.group}, length {words.length(row.workload)}: {significant(most, 2)} times"


def _why(ratios: Ratios) -> str:
    """What the row with the largest ratio spends more than the fastest of its workload, where that is known."""
    row, _ = max(ratios, key=lambda one: one[1])
    why = row.cells["why slower"]
    return f" ({why} beside the fastest there)" if "%" in why and why != NEAR else ""


LOOKS: dict[str, Callable[[Timed], str]] = {
    "Page faults": _page_faults,
    "Half precision": _half_precision,
    "Compiled": _compiled,
    "Explicit mask": _explicit_mask,
    "ModuleList": _module_list,
    "Beaten": _baseline_beaten,
}
