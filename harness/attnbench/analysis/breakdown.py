"""Break the time of a call down by operator."""

from attnbench.devices.kernels import COMPILED, OWN, compiled, makers
from attnbench.storage.records import Operators

SMALL_SHARE = 0.05  # operators with less of the time are not mentioned


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
    """An operator's name without namespace and template arguments: aten::bmm is "bmm"."""
    return "generated kernels" if name == COMPILED else name.partition("<")[0].rpartition("::")[2]


def num_operators(operators: Operators) -> int:
    """Number of operator calls, nested calls and views included."""
    return sum(one.num_calls for one in operators.calls)


def where(operators: Operators) -> str:
    """Break down the time of a call, largest share first: "62 % bmm, 21 % softmax, 17 % where".

    Shares are of the profiled self times of the operators; shares below 5 % are left out.
    """
    seconds: dict[str, float] = {}
    for one in operators.calls:
        name = short(one.name).strip("_")
        seconds[name] = seconds.get(name, 0.0) + one.self_s
    total_s = sum(seconds.values())
    shares = {name: seconds[name] / total_s for name in sorted(seconds, key=lambda name: -seconds[name]) if total_s}
    return ", ".join(f"{100 * share:.0f} % {name}" for name, share in shares.items() if share >= SMALL_SHARE)
