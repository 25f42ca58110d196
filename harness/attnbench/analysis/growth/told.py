"""Growth in words: a sentence for each implementation, tables for a page, and JSON for a program."""

from collections.abc import Iterator, Sequence

import msgspec

from attnbench.analysis.growth.fit import Fit
from attnbench.analysis.growth.series import Growth, Outcome
from attnbench.analysis.results import Results
from attnbench.reports import words
from attnbench.reports.markdown import escaped
from attnbench.reports.panels import Panel
from attnbench.storage.records import Status
from attnbench.units import MISSING, show

METRICS = {
    "peak_memory": "peak",
    "scratch_memory": "peak less results",
    "saved_memory": "saved for backward",
    "num_allocations": "allocations",
    "allocated_memory": "allocated in all",
    "reserved_memory": "reserved",
    "fragmentation": "fragmentation",
}
"""The columns of the second table; one that nobody has is left out."""


def sentence(growth: Growth) -> str:
    """What is known of one implementation, in a line."""
    fit, letter = growth.fit, _letter(growth.panel)
    if fit is None:
        name = words.plain(growth.implementation)
        return f"{name}: growth needs three lengths or more; {len(growth.points)} could be measured"
    exponent = f"{letter}^{fit.exponent:.2f} ({fit.low:.2f} to {fit.high:.2f})"
    over = f"over {letter}={fit.lengths[0]} to {fit.lengths[-1]}, {letter}^{fit.end:.2f} at the end"
    told = [
        f"{words.plain(growth.implementation)}: memory grows with {exponent} {over}",
        _reached(growth, fit),
        *(outcome_told(outcome, letter) for outcome in growth.outcomes),
    ]
    return "; ".join(part for part in told if part)


def _reached(growth: Growth, fit: Fit) -> str:
    letter, limit = _letter(growth.panel), show(growth.limit_bytes, "bytes")
    if growth.limit_bytes <= 0:
        return ""
    if growth.reach is None:
        return f"{limit} are never reached, or are less than it takes at any length"
    found = growth.reach
    between = "" if found.is_exact else f" ({number(found.low)} to {number(found.high)})"
    there = f"{letter}^{fit.slope(found.point):.2f}"
    return f"{limit} are reached at {letter}={number(found.point)}{between}, growing with {there}"


def outcome_told(outcome: Outcome, letter: str) -> str:
    """One call near the limit: what was predicted and what came of it."""
    at = f"{letter}={outcome.length}"
    predicted = f"predicted {show(outcome.predicted_bytes, 'bytes')}"
    if outcome.status is None:
        return f"not tried {at} ({predicted}): {words.plain(outcome.message, limit=160)}"
    if outcome.status is Status.ok:
        found = f"{predicted}, measured {show(outcome.measured_bytes, 'bytes')}"
        return f"tried {at}: {found}" + ("" if outcome.fits else ", which should not have fitted")
    if outcome.status is Status.out_of_memory:
        return f"tried {at}: out of memory" + (", as predicted" if not outcome.fits else f", although {predicted}")
    return f"tried {at}: {outcome.status}, {words.plain(outcome.message, limit=160)}"


def number(value: float) -> str:
    """A length to four digits at most."""
    digits = max(0, len(str(int(value))) - 4)
    return f"{round(value, -digits):.0f}"


def heading(growth: Growth) -> str:
    """What the panel is of."""
    workload = growth.panel.rows[0].workload
    return " ".join(part for part in (words.title(workload), growth.panel.other) if part)


def by_panel(growths: Sequence[Growth]) -> dict[str, list[Growth]]:
    """The implementations of each panel, by its heading."""
    found: dict[str, list[Growth]] = {}
    for growth in growths:
        found.setdefault(heading(growth), []).append(growth)
    return found


def markdown(growths: Sequence[Growth], results: Results, pictures: Sequence[str], notes: Sequence[str]) -> str:
    """The page: what was asked, the sentences, what each call takes at the longest length, and the pictures."""
    lines = ["# Memory against length", "", *_asked(growths, results), ""]
    for title, members in by_panel(growths).items():
        lines += [f"## {escaped(title)}", "", *(f"- {escaped(sentence(growth))}." for growth in members), ""]
        lines += [*_table(members, results), ""]
    lines += [f"![{name}]({name}.png)" for name in pictures]
    lines += ["", *(f"- {escaped(note)}" for note in notes)]
    return "\n".join(lines).rstrip() + "\n"


def _asked(growths: Sequence[Growth], results: Results) -> Iterator[str]:
    environment = next((record.environment for record in results.records if record.environment is not None), None)
    where = "" if environment is None else f" on {escaped(environment.cpu)}, torch {environment.versions.get('torch')}"
    limits = sorted({growth.limit_bytes for growth in growths if growth.limit_bytes})
    ends = list(dict.fromkeys([*limits[:1], *limits[-1:]]))
    at = f", with a limit of {' to '.join(show(limit, 'bytes') for limit in ends)}" if ends else ""
    yield f"Written by `attnbench growth`{where}{at}."
    yield "Bytes are those of one call beyond its inputs. Memory is counted and does not scatter: the interval of an"
    yield "exponent says how well a line fits."


def _table(members: Sequence[Growth], results: Results) -> Iterator[str]:
    records = {(record.workload.id, str(record.arm)): record for record in results.records}
    rows = []
    for growth in members:
        longest = max(
            (row.workload for row in growth.panel.rows if growth.panel.length(row.workload) == growth.points[-1][0]),
            key=lambda workload: workload.id,
        )
        record = records[longest.id, growth.implementation]
        cells = {"implementation": words.plain(growth.implementation), "length": words.length(longest)}
        for metric, column in METRICS.items():
            found = record.measurement(metric)
            cells[column] = MISSING if found is None else _shown(found.samples[0].value, found.unit)
        rows.append(cells)
    columns = [column for column in rows[0] if any(row[column] != MISSING for row in rows)]
    yield f"| {' | '.join(columns)} |"
    yield f"|{' --- |' * len(columns)}"
    for row in rows:
        yield f"| {' | '.join(escaped(row[column]) for column in columns)} |"


def _shown(value: float, unit: str) -> str:
    return show(value, unit) if unit == "bytes" else f"{value:.0f}"


def facts(growth: Growth) -> dict[str, object]:
    """Everything as a program reads it."""
    fit, reach = growth.fit, growth.reach
    return {
        "workload": growth.workload(growth.points[-1][0]).id,
        "axis": growth.panel.axis,
        "implementation": growth.implementation,
        "lengths": [length for length, _ in growth.points],
        "peak_bytes": [value for _, value in growth.points],
        "fitted_lengths": None if fit is None else list(fit.lengths),
        "exponent": None if fit is None else fit.exponent,
        "exponent_low": None if fit is None else fit.low,
        "exponent_high": None if fit is None else fit.high,
        "exponent_at_the_end": None if fit is None else fit.end,
        "curve_bytes": None if fit is None else list(fit.parts),
        "limit_bytes": growth.limit_bytes or None,
        "reached_at": None if reach is None else reach.point,
        "reached_at_low": None if reach is None else reach.low,
        "reached_at_high": None if reach is None else reach.high,
        "tried": [msgspec.to_builtins(outcome) | {"is_wrong": outcome.is_wrong} for outcome in growth.outcomes],
    }


def _letter(panel: Panel) -> str:
    return "T" if panel.axis == "seq_len" else "S"
