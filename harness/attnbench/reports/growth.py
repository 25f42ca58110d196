"""Growth of memory as sentences and JSON."""

from collections.abc import Sequence

from attnbench.analysis.growth import Growth
from attnbench.reports import titles
from attnbench.statistics.growth import FEWEST_LENGTHS
from attnbench.units import grouped, plain, show


def sentence(growth: Growth) -> str:
    """Describe the growth of one implementation in a line."""
    fit, letter, reach = growth.fit, "T" if growth.axis == "seq_len" else "S", growth.reach
    name, limit = plain(growth.implementation), show(growth.limit_bytes, "bytes")
    if fit is None:
        why = (
            "its memory fits no curve" if len(growth.points) >= FEWEST_LENGTHS else "growth needs three lengths or more"
        )
        return f"{name}: {why}; {len(growth.points)} could be measured"
    fitted = f"fitted over {letter}={fit.lengths[0]} to {fit.lengths[-1]}"
    text = f"memory grows with {letter}^{growth.exponent:.2f}"
    if growth.limit_bytes <= 0:
        return f"{name}: {text}, {fitted}"
    if reach is None:
        return f"{name}: {limit} are never reached, or are less than it takes at any length; {text}, {fitted}"
    length = round(reach, min(0, 4 - len(str(int(reach)))))
    return f"{name}: {limit} are reached at {letter}={length:.0f}; there {text}, {fitted}"


def by_panel(growths: Sequence[Growth]) -> dict[str, list[Growth]]:
    """Implementations by the title of their panel."""
    return grouped(growths, lambda growth: f"{titles.title(growth.workload.axes())} {growth.other}".rstrip())


def facts(growth: Growth) -> dict[str, object]:
    """How memory grows with length, and where limits are reached, for JSON."""
    fit, reach = growth.fit, growth.reach
    return {
        "workload": growth.workload.id,
        "direction": growth.workload.direction,
        "axis": growth.axis,
        "implementation": growth.implementation,
        "lengths": [length for length, _ in growth.points],
        "peak_bytes": [value for _, value in growth.points],
        "fitted_lengths": fit and list(fit.lengths),
        "exponent": growth.exponent,
        "curve_bytes": fit and list(fit.parts),
        "limit_bytes": growth.limit_bytes or None,
        "reached_at": reach,
    }
