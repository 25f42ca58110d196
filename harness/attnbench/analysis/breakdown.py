"""What ran in a call, folded from the profiler's events: own time, bytes and kind of each operator; pure functions.

Knows nothing of torch, so that reports can be made where it is missing, and tests can script every case.
"""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from attnbench.storage.operator_kinds import COMPILED, KINDS, PAGE_FAULTS, backend_of, kind_of, plain_name
from attnbench.storage.records import Measurement, Operator, Operators
from attnbench.units import show
from attnbench.workloads.counts import score_matrix_bytes
from attnbench.workloads.workload import Workload

OUTSIDE = "outside any operator"
SMALL_SHARE = 0.05
"""A smaller share of the extra time is no reason worth telling."""


class Span(NamedTuple):
    """One event of a profile: an operator from start to end, or, where bytes are given, an allocation or a release."""

    name: str
    thread: int
    start_ns: int
    end_ns: int
    allocated_bytes: int | None = None


@dataclass(slots=True)
class _Open:
    """An operator that has begun, and what is known of it."""

    name: str
    start_ns: int
    end_ns: int
    inside_ns: int = 0  # in the operators that it called
    blocks: list[int] = field(default_factory=list)


def fold(spans: Iterable[Span]) -> tuple[Operator, ...]:
    """Each operator once, the one with the most time of its own first.

    What is allocated inside an allocating operator is counted for the one that called it: that is who will write there.
    """
    done: list[_Open] = []
    stacks: dict[int, list[_Open]] = {}
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        stack = stacks.setdefault(span.thread, [])
        while stack and stack[-1].end_ns <= span.start_ns and span.end_ns > stack[-1].end_ns:
            stack.pop()
        if span.allocated_bytes is not None:
            if span.allocated_bytes:
                _owner(stack, done).blocks.append(span.allocated_bytes)
            continue
        one = _Open(name=plain_name(span.name), start_ns=span.start_ns, end_ns=span.end_ns)
        if stack:
            stack[-1].inside_ns += span.end_ns - span.start_ns
        stack.append(one)
        done.append(one)
    return tuple(_merged(done))


def _owner(stack: list[_Open], done: list[_Open]) -> _Open:
    """Who asked for memory: the innermost operator that does more than allocate."""
    for one in reversed(stack):
        if kind_of(one.name) != "allocation":
            return one
    if stack:
        return stack[0]
    done.append(_Open(name=OUTSIDE, start_ns=0, end_ns=0))
    return done[-1]


def _merged(done: Sequence[_Open]) -> list[Operator]:
    by_name: dict[str, list[_Open]] = {}
    for one in done:
        by_name.setdefault(one.name, []).append(one)
    merged = [
        Operator(
            name=name,
            kind="allocation" if name == OUTSIDE else kind_of(name),
            num_calls=0 if name == OUTSIDE else len(members),
            self_s=max(0, sum(one.end_ns - one.start_ns - one.inside_ns for one in members)) / 1e9,
            allocated_bytes=sum(sum(one.blocks) for one in members),
            largest_bytes=max((block for one in members for block in one.blocks), default=0),
        )
        for name, members in by_name.items()
    ]
    return sorted(merged, key=lambda one: (-one.self_s, one.name))


def compiled(calls: Iterable[Operator]) -> bool:
    """Whether any of it was made by torch.compile."""
    return any(one.kind == "compiled" or one.name == COMPILED for one in calls)


def observed(calls: Iterable[Operator]) -> str:
    """The backend of `scaled_dot_product_attention` that ran, joined by "+" where there are several; "" for none."""
    return "+".join(sorted(set(filter(None, (backend_of(one.name) for one in calls)))))


def ran(operators: Operators) -> str:
    """What ran, in a word: the backend, or the operator with the most time; "compiled: flash" where it was compiled."""
    main = max(operators.calls, key=lambda one: one.self_s, default=None)
    told = operators.observed or ("nothing" if main is None else short(main.name))
    return f"compiled: {told}" if compiled(operators.calls) else told


def short(name: str) -> str:
    """An operator's name without its namespace: aten::bmm is "bmm"."""
    return "generated kernels" if name == COMPILED else name.rpartition("::")[2]


def num_operators(operators: Operators) -> int:
    """How many operators ran, those called by others and views included."""
    return sum(one.num_calls for one in operators.calls)


def allocated_bytes(operators: Operators) -> int:
    """All that was asked for in the call, freed or not."""
    return sum(one.allocated_bytes for one in operators.calls)


def timed(operators: Operators, latency: Measurement | None) -> Operators:
    """The same with the page faults of the calls that were timed, where any were: a process may need fewer in time."""
    if latency is None or not latency.samples:
        return operators
    per_call = [sample.num_faults / max(1, sample.num_calls) for sample in latency.samples]
    return msgspec.structs.replace(operators, num_faults=statistics.median(per_call))


def times(operators: Operators, call_s: float) -> dict[str, float]:
    """The seconds of one call by kind; their sum is `call_s`.

    Page faults are an estimate: their number times what one costs, at most nine tenths of the call. They happen where
    fresh memory is written first, so they are taken from the kinds in proportion to the bytes that these asked for.
    """
    own_s = sum(one.self_s for one in operators.calls)
    if not own_s:
        return {}
    found = {kind: call_s * (sum(one.self_s for one in members) / own_s) for kind, members in _kinds(operators).items()}
    faults_s = min(operators.num_faults * operators.fault_s, 0.9 * call_s)
    if not faults_s:
        return found
    taken = _spread(faults_s, found, {kind: _bytes(members) for kind, members in _kinds(operators).items()})
    return {PAGE_FAULTS: faults_s} | {kind: found[kind] - taken[kind] for kind in found}


def _kinds(operators: Operators) -> dict[str, list[Operator]]:
    return {kind: found for kind in KINDS if (found := [one for one in operators.calls if one.kind == kind])}


def _bytes(members: Iterable[Operator]) -> float:
    return float(sum(one.allocated_bytes for one in members))


def _spread(amount: float, room: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    """`amount` in shares by weight, none above its room; what finds none there is spread by the room that is left."""
    total = sum(weights.values())
    taken = {key: min(room[key], amount * weights[key] / total if total else 0.0) for key in room}
    rest, left = amount - sum(taken.values()), sum(room.values()) - sum(taken.values())
    return {key: taken[key] + (rest * (room[key] - taken[key]) / left if left > 0 else 0.0) for key in room}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What ran in a cell and how long a call lasts."""

    operators: Operators
    call_s: float


def reasons(cell: Timed, fastest: Timed, workload: Workload) -> list[str]:
    """The two largest reasons why `cell` takes longer than `fastest`: "41 % page faults on the 128 MiB score matrix".

    A share is of all that the cell spends more, kind by kind; where it spends less on a kind, that counts for nothing.
    """
    mine, best = times(cell.operators, cell.call_s), times(fastest.operators, fastest.call_s)
    extra = {kind: max(0.0, seconds - best.get(kind, 0.0)) for kind, seconds in mine.items()}
    total = sum(extra.values())
    if not total:
        return []
    largest = sorted(extra, key=lambda kind: -extra[kind])[:2]
    shares = {kind: extra[kind] / total for kind in largest if extra[kind] >= SMALL_SHARE * total}
    return [f"{share:.0%}".replace("%", " %") + f" {_told(kind, cell, workload)}" for kind, share in shares.items()]


def _told(kind: str, cell: Timed, workload: Workload) -> str:
    """A kind with what stands behind it in this cell."""
    if kind == PAGE_FAULTS:
        largest = max(one.largest_bytes for one in cell.operators.calls)
        if not largest:
            return kind
        size = show(largest, "bytes")
        return (
            f"{kind} on the {size} score matrix"
            if largest == score_matrix_bytes(workload)
            else (f"{kind} on blocks of up to {size}")
        )
    main = max((one for one in cell.operators.calls if one.kind == kind), key=lambda one: one.self_s)
    name = short(main.name)
    return kind if kind in name else f"{kind} ({name})"
