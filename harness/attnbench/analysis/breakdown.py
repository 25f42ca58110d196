"""Name the backend of a call, and break down its time by operator."""

from attnbench.devices.kernels import COMPILED, OWN, compiled, makers
from attnbench.storage.records import Operators
from attnbench.units import grouped, show

SMALL_SHARE = 0.05  # operators with a smaller share of the time are not listed


def backend_used(operators: Operators) -> str:
    """Name the backend of SDPA that ran, such as "flash", or "compiled: flash" if torch.compile generated an operator.

    If the kernels come from a library that PyTorch does not bundle, the library is added: "flash (FlashAttention 3)".
    If no backend ran, the result is the library of the kernels, else the operator with the most self time, else
    "nothing".
    """
    main = max(operators.calls, key=lambda one: one.self_s, default=None)
    known = " + ".join(makers(name for one in operators.calls for name in one.kernels))
    text = operators.observed or known or ("nothing" if main is None else short(main.name))
    if operators.observed and known and known not in OWN:
        text = f"{text} ({known})"
    return f"compiled: {text}" if compiled(operators.calls) else text


def short(name: str) -> str:
    """Strip the namespace and template arguments from an operator's name: aten::bmm becomes "bmm".

    A graph from torch.compile is called "generated kernels".
    """
    return "generated kernels" if name == COMPILED else name.partition("<")[0].rpartition("::")[2]


def num_operators(operators: Operators) -> int:
    """Count the operator calls, including nested calls and views."""
    return sum(one.num_calls for one in operators.calls)


def operator_shares(operators: Operators) -> str:
    """Break down the time of a call, largest share first: "62 % bmm (2.34 ms, 2 calls), 21 % softmax (793 us, 1 call)".

    The times are self times of operators; profiling makes them longer. Operators with less than SMALL_SHARE of the
    time are left out. An operator that only carries out another one, as _softmax does for softmax, adds no calls.
    """
    alike = grouped(operators.calls, lambda one: short(one.name).strip("_"))
    seconds = dict.fromkeys(alike, 0.0)
    for name, members in alike.items():
        seconds[name] = sum(one.self_s for one in members)
    total_s, parts = sum(seconds.values()), list[str]()
    for name in sorted(seconds, key=lambda name: -seconds[name]):
        inner = [one for one in alike[name] if short(one.name).startswith("_")]
        outer = [one for one in alike[name] if one not in inner]
        number = sum(one.num_calls for one in outer or inner)
        if seconds[name] >= SMALL_SHARE * total_s > 0:
            spent = f"{show(seconds[name], 's')}, {number} call{'s' * (number != 1)}"
            parts.append(f"{100 * seconds[name] / total_s:.0f} % {name} ({spent})")
    return ", ".join(parts)
