"""Differences in results (not in time) between two states of the code, such as two versions of torch."""

from attnbench.analysis.comparisons import by_side
from attnbench.analysis.results import Results
from attnbench.storage.records import Record
from attnbench.units import plain, show

MOST_PARTS = 5
"""Most differences that a line names: those of the answer come first, then those of operators."""

CALLS = "calls of"
"""A call that only one side makes is a difference; other results count if they are known on both sides."""


def changed(results: Results) -> list[str]:
    """A line for each cell whose status, error, conventions, notes, operators or memory differ between the two sides.

    Both sides get the same inputs, so another error means other numbers in the answer. What is
    unknown on a side, as the memory of a wrong answer, is not compared.
    """
    base, candidate = by_side(results)
    before = {(record.workload.id, record.implementation): record for record in base if not record.is_predicted}
    lines = []
    for record in candidate:
        old = before.get((record.workload.id, record.implementation))
        if old is None or record.is_predicted:
            continue
        was, now = _facts(old), _facts(record)
        known = was.keys() & now.keys()
        if old.operators is not None and record.operators is not None:
            known |= {name for name in was | now if name.startswith(CALLS)}
        names = [name for name in was | now if name in known and was.get(name, "0") != now.get(name, "0")]
        parts = [f"{name} {was.get(name, '0')}, now {now.get(name, '0')}" for name in names[:MOST_PARTS]]
        parts += [f"{len(names) - MOST_PARTS} more"] if len(names) > MOST_PARTS else []
        if parts:
            lines.append(plain(f"{record.implementation} on {record.workload.id}: {'; '.join(parts)}"))
    return lines


def _facts(record: Record) -> dict[str, str]:
    """The results of a cell in words, by name."""
    facts = {"status": str(record.status)}
    if samples := record.samples("peak_memory"):
        facts["peak memory"] = show(samples[0].value, "bytes")
    if (agreement := record.agreement) is not None:
        ratio = agreement.error_ratio
        facts["error / tolerance"] = "not finite" if ratio is None else f"{ratio:.6g}"
        facts["conventions"] = ", ".join(agreement.conventions) or "none"
        facts["notes"] = ", ".join(rule.rule for rule in agreement.notes) or "none"
    if (seen := record.operators) is not None:
        facts["backend"] = seen.observed or "none"
        facts |= {f"{CALLS} {call.name}": str(call.num_calls) for call in seen.calls}
    return facts
