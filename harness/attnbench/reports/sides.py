"""Two states of the code side by side, as sides.md: the verdict on the whole, what went wrong, a row for each cell."""

from pathlib import Path

from attnbench.analysis.overall import Suite, by_side, losses, suite
from attnbench.analysis.results import Results
from attnbench.reports import Report, story, verdicts, words
from attnbench.reports.markdown import escaped
from attnbench.reports.table import Row, groups, percent, span
from attnbench.storage.events import Side
from attnbench.units import MISSING

COLUMNS = ("implementation", "length", "base", "candidate", "ratio", "verdict", "memory, base", "memory", "notes")


def headline(results: Results) -> str:
    """The verdict on the whole, in a sentence."""
    found = suite(results)
    if found is None:
        return "nothing can be said of the whole: fewer than three processes, or no cell on both sides"
    seen = span(found.ratio.point, found.ratio.low, found.ratio.high)
    over = f"over {found.num_cells} cell{'s' * (found.num_cells > 1)}"
    return f"{found.verdict}: the candidate takes {seen} times as long as the base {over}; {_reach(found)}"


def _reach(found: Suite) -> str:
    """How small a slowdown would have shown."""
    effect = found.minimum_detectable_effect
    seen = (
        "so few processes could have found none" if effect is None else f"one of {percent(effect)} would have been seen"
    )
    return f"of slowdowns {seen}, none below {percent(found.margin)} counts"


def facts(results: Results) -> dict[str, str]:
    """What was compared and how, each under its name."""
    sides = results.plan.sides
    assert sides is not None
    how = "in processes of their own, block by block in turn" if sides.is_apart else "in the same blocks of one process"
    told = {
        "base": _named(sides.base),
        "candidate": _named(sides.candidate),
        "measured": how,
        "verdicts": verdicts.decided(results) + (f" ({results.reason})" if results.reason else ""),
        "disturbances": verdicts.disturbed(results),
    }
    if unlike := _unlike(results):
        told["environments, base and candidate"] = unlike
    if sides.new:
        told["new, nothing to compare with"] = ", ".join(sides.new)
    return {name: words.plain(text) for name, text in told.items()}


def _unlike(results: Results) -> str:
    """What differs between the environments of the two sides."""
    base, candidate = (
        next((each.environment for each in records if each.environment is not None), None)
        for records in by_side(results)
    )
    if base is None or candidate is None or base.fingerprint == candidate.fingerprint:
        return ""
    before, after = (story.described(environment) for environment in (base, candidate))
    kept = ("Python", "versions", "threads", "settings", "flags")
    return "; ".join(f"{name} {before[name]} and {after[name]}" for name in kept if before[name] != after[name])


def _named(side: Side) -> str:
    return f"{side.given} ({side.commit[:12]})" if side.commit else side.given


def rows(results: Results) -> dict[str, list[dict[str, str]]]:
    """By the title of a group of workloads, the texts under COLUMNS of each cell that the candidate has."""
    found: dict[str, list[dict[str, str]]] = {}
    for title, members in groups(results).items():
        base = {(row.workload.id, row.arm.implementation): row for row in members if row.is_baseline}
        for row in sorted(members, key=lambda row: (row.arm.implementation, row.workload.seq_len, row.workload.kv_len)):
            if not row.is_baseline:
                found.setdefault(title, []).append(_row(row, base.get((row.workload.id, row.arm.implementation))))
    return found


def _row(row: Row, base: Row | None) -> dict[str, str]:
    """A cell of both sides; where one has no time, its status stands in its place."""
    return {
        "implementation": row.cells["implementation"],
        "length": row.cells["length"],
        "base": "new" if base is None else _time(base),
        "candidate": _time(row),
        "ratio": row.cells["ratio"],
        "verdict": row.cells["verdict"],
        "memory, base": MISSING if base is None else base.cells["memory"],
        "memory": row.cells["memory"],
        "notes": row.cells["notes"],
    }


def _time(row: Row) -> str:
    return row.cells["time per call"] if row.time is not None else row.cells["status"]


def document(results: Results) -> str:
    """The whole text."""
    lines = [f"# Side by side: {escaped(words.plain(headline(results)))}", ""]
    lines += [f"- **{name}**: {escaped(text)}" for name, text in facts(results).items()]
    found = losses(results)
    lines += ["", "## Findings", ""]
    lines += [f"- {escaped(words.plain(line))}" for line in found or ["none: no cell was lost, disagreed or failed"]]
    for title, members in rows(results).items():
        lines += [
            "",
            f"## {escaped(title)}",
            "",
            f"| {' | '.join(COLUMNS)} |",
            f"|{'|'.join(' --- ' for _ in COLUMNS)}|",
        ]
        lines += [f"| {' | '.join(escaped(row[column]) for column in COLUMNS)} |" for row in members]
    return "\n".join([*lines, ""])


def write(results: Results, folder: Path) -> list[Path]:
    """Write sides.md, for a run that has two sides."""
    if results.plan.sides is None:
        return []
    path = folder / "sides.md"
    path.write_text(document(results), encoding="utf-8")
    return [path]


REPORT = Report(summary="two states of the code side by side, with one verdict for the whole", write=write)
