"""Break the time of a call down by kind of operator."""

from attnbench.storage.operator_kinds import COMPILED, KINDS, OWN, compiled, makers
from attnbench.storage.records import Operators

SMALL_SHARE = 0.05
"""Kinds with a smaller share of the time are not mentioned."""


def ran(operators: Operators) -> str:
    """Name the backend, or else the operator with the most time: "flash"; "compiled: flash" if it was compiled.

    Kernels that are not PyTorch's own are named: "flash (FlashAttention 3)", or alone if no backend ran.
    """
    main = max(operators.calls, key=lambda one: one.self_s, default=None)
    known = " + ".join(makers(name for one in operators.calls for name in one.kernels))
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


def shares(operators: Operators) -> dict[str, float]:
    """Shares of the time of a call by kind of operator, in the order of KINDS; empty if nothing took time."""
    total_s = sum(one.self_s for one in operators.calls)
    by_kind = {kind: sum(one.self_s for one in operators.calls if one.kind == kind) for kind in KINDS}
    ran_kinds = {one.kind for one in operators.calls}
    return {kind: own_s / total_s for kind, own_s in by_kind.items() if kind in ran_kinds} if total_s else {}


def where(operators: Operators) -> str:
    """Break down the time of a call, largest share first: "62 % matmul (bmm), 21 % softmax, 17 % mask (where)".

    Shares are of the profiled self times of the operators; shares below 5 % are left out.
    """
    known = shares(operators)
    largest = sorted((kind for kind in known if known[kind] >= SMALL_SHARE), key=lambda kind: -known[kind])
    return ", ".join(f"{100 * known[kind]:.0f} % {_named(kind, operators)}" for kind in largest)


def _named(kind: str, operators: Operators) -> str:
    """Name a kind together with its slowest operator."""
    main = max((one for one in operators.calls if one.kind == kind), key=lambda one: one.self_s)
    name = short(main.name)
    return kind if kind in name else f"{kind} ({name})"
