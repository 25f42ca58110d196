"""Break the time of a call down by kind of operator."""

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from attnbench.statistics.intervals import median
from attnbench.storage.operator_kinds import COMPILED, KINDS, OWN, PAGE_FAULTS, compiled, makers
from attnbench.storage.records import LATENCY, Arm, Comparison, Key, Measurement, Operators, Record
from attnbench.storage.samples import Samples

SMALL_SHARE = 0.05
"""Kinds with a smaller share of the time are not mentioned."""


def ran(operators: Operators) -> str:
    """Name the backend, or else the operator with the most time: "flash"; "compiled: flash" if it was compiled.

    Kernels that are not PyTorch's own are named: "flash (FlashAttention 3)", or alone if no backend ran.
    """
    main = max(operators.calls, key=lambda one: one.self_s, default=None)
    known = " + ".join(each for each in makers(name for one in operators.calls for name in one.kernels))
    text = operators.observed or known or ("nothing" if main is None else short(main.name))
    if operators.observed and known and known not in OWN:
        text = f"{text} ({known})"
    return f"compiled: {text}" if compiled(operators.calls) else text


def short(name: str) -> str:
    """An operator's name without its namespace: aten::bmm is "bmm"."""
    return "generated kernels" if name == COMPILED else name.rpartition("::")[2]


def num_operators(operators: Operators) -> int:
    """Number of operator calls, nested calls and views included."""
    return sum(one.num_calls for one in operators.calls)


def allocated_bytes(operators: Operators) -> int:
    """Bytes allocated during the call, freed or not."""
    return sum(one.allocated_bytes for one in operators.calls)


def timed(operators: Operators, latency: Measurement | None) -> Operators:
    """Take the page faults from the timed calls if there are any: a process may need fewer faults as it runs on."""
    if latency is None or not latency.samples:
        return operators
    own = Samples.of(latency.samples)
    return msgspec.structs.replace(operators, num_faults=median(own.num_faults / np.maximum(1, own.num_calls)))


def times(operators: Operators, call_s: float) -> dict[str, float]:
    """Seconds of one call by kind of operator; they add up to `call_s`.

    The time of page faults is an estimate: their number times the cost of one, at most nine tenths of the call. Page
    faults happen at the first write to fresh memory, so their time is taken from the kinds in proportion to the bytes
    allocated.
    """
    own_s = sum(one.self_s for one in operators.calls)
    if not own_s:
        return {}
    kinds = {kind: members for kind in KINDS if (members := [one for one in operators.calls if one.kind == kind])}
    found = {kind: call_s * (sum(one.self_s for one in members) / own_s) for kind, members in kinds.items()}
    faults_s = min(operators.num_faults * operators.fault_s, 0.9 * call_s)
    if not faults_s:
        return found
    asked = {kind: float(sum(one.allocated_bytes for one in members)) for kind, members in kinds.items()}
    taken = _spread(faults_s, found, asked)
    return {PAGE_FAULTS: faults_s} | {kind: found[kind] - taken[kind] for kind in found}


def _spread(amount: float, room: dict[str, float], weights: dict[str, float]) -> dict[str, float]:
    """Spread `amount` by weight without exceeding any `room`; spread the rest by the room that remains."""
    total = sum(weights.values())
    taken = {key: min(room[key], amount * weights[key] / total if total else 0.0) for key in room}
    rest, left = amount - sum(taken.values()), sum(room.values()) - sum(taken.values())
    return {key: taken[key] + (rest * (room[key] - taken[key]) / left if left > 0 else 0.0) for key in room}


def where(operators: Operators) -> str:
    """Break down the time of a call, largest share first: "62 % matmul (bmm), 21 % softmax, 17 % mask (where)".

    Shares are of the profiled self times of the operators; shares below 5 % are left out.
    """
    shares = times(msgspec.structs.replace(operators, num_faults=0.0), 1.0)
    largest = sorted((kind for kind in shares if shares[kind] >= SMALL_SHARE), key=lambda kind: -shares[kind])
    return ", ".join(f"{100 * shares[kind]:.0f} % {_named(kind, operators)}" for kind in largest)


def _named(kind: str, operators: Operators) -> str:
    """Name a kind together with its slowest operator."""
    main = max((one for one in operators.calls if one.kind == kind), key=lambda one: one.self_s)
    name = short(main.name)
    return kind if kind in name else f"{kind} ({name})"


def paired_times(
    records: Iterable[Record], reference: Callable[[Arm], Arm], compared: dict[Key, Comparison]
) -> dict[Key, float]:
    """Seconds of a call for each cell, comparable within a workload.

    If a cell has a ratio to its reference, this is the ratio times the time of the reference: the ratio comes from
    paired blocks and is more accurate than two separate medians.
    """
    own_s = {one.key: median(Samples.of(samples).value) for one in records if (samples := one.samples(LATENCY))}
    found = {}
    for (workload, arm), seconds in own_s.items():
        base_s, comparison = own_s.get((workload, reference(arm))), compared.get((workload, arm))
        found[workload, arm] = seconds if base_s is None or comparison is None else comparison.ratio * base_s
    return found
