"""Two states of the code side by side, as sides.md: the overall verdict, the failures, and a row for each cell."""

from attnbench.analysis.comparisons import by_side, losses
from attnbench.analysis.results import Results
from attnbench.analysis.table import Row, metric_columns
from attnbench.reports import cells, endings, story, text_report
from attnbench.storage.events import Side
from attnbench.units import MISSING, escaped, markdown_list, markdown_table, plain


def headline(results: Results) -> str:
    """The overall verdict in a sentence."""
    return endings.of_sides(results).sentence


def facts(results: Results) -> dict[str, str]:
    """Facts of a comparison by name: both sides and the method."""
    sides = results.plan.sides
    assert sides is not None
    how = "in processes of their own, block by block in turn" if sides.is_apart else "in the same blocks of one process"
    facts = {
        "base": _named(sides.base),
        "candidate": _named(sides.candidate),
        "measured": how,
        "method": story.method(results),
        "verdicts": story.decided(results) + (f" ({results.reason})" if results.reason else ""),
        "interference": story.interference(results),
    }
    if unlike := _unlike(results):
        facts["environments, base and candidate"] = unlike
    if sides.new:
        facts["new, nothing to compare with"] = ", ".join(sides.new)
    return {name: plain(text) for name, text in facts.items()}


def _unlike(results: Results) -> str:
    """List the differences between the environments of the two sides."""
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
    """Texts of each cell of the candidate by column, by the title of a group of workloads."""
    metrics = metric_columns(results)
    found: dict[str, list[dict[str, str]]] = {}
    for title, members in cells.groups(results).items():
        base = {(row["workload"], row["implementation"]): row for row in members if row["is_baseline"]}
        candidate = [row for row in members if not row["is_baseline"]]
        for row in sorted(candidate, key=lambda row: (row["implementation"], row["seq_len"], row["kv_len"])):
            other = base.get((row["workload"], row["implementation"]))
            texts = {
                "implementation": cells.arm(row),
                "length": cells.length(row),
                "base": "new" if other is None else _time(other),
                "candidate": _time(row),
                "verdict": cells.verdict(row),
            }
            for metric in metrics:
                texts[f"{metric.heading}, base"] = MISSING if other is None else cells.metric(other, metric)
                texts[metric.heading] = cells.metric(row, metric)
            found.setdefault(title, []).append({**texts, "notes": cells.notes(row)})
    return found


def _time(row: Row) -> str:
    """The time, or how the cell ended if there is none."""
    return cells.status(row) if row["latency_s"] is None else cells.time(row)


def document(results: Results) -> str:
    """The whole text; "" for a run without two sides."""
    if results.plan.sides is None:
        return ""
    found = losses(results) or ["none: no cell was lost, disagreed or failed"]
    parts = [
        f"# Side by side: {escaped(plain(headline(results)))}",
        markdown_list(facts(results)),
        "## Findings",
        "\n".join(f"- {escaped(plain(line))}" for line in found),
    ]
    for title, members in rows(results).items():
        parts += [f"## {escaped(title)}", markdown_table(members)]
    return "\n\n".join(parts) + "\n"


REPORT = text_report("sides.md", "two states of the code side by side, with one verdict for the whole", document)
