"""Renew the generated blocks of README.md from results/gallery/quick and the implementations: `python docs/figures.py`.

A block stands between `<!-- begin NAME -->` and `<!-- end NAME -->`. tests/test_figures.py holds the README to them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from harness import catalog, plugins
from harness.records import Status
from harness.reports import story
from harness.reports.markdown import escaped
from harness.reports.table import Row, groups
from harness.store import Results, read

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
QUICK = ROOT / "results" / "gallery" / "quick"
SHOWN_SCOPE, SHOWN_MASK, SHOWN_LEN = "attention", "causal", 512
OWN, OFFICIAL = "fused", "torch_mha"
NEEDED = re.compile(r"missing_package\(\"([\w.]+)\"")


def blocks(results: Results) -> dict[str, str]:
    """Every generated block of the README, by name."""
    names = plugins.implementation_names()
    needs = {name: package for name in names if (package := _package(name))}
    entries = catalog.implementations([name for name in names if name not in needs], on_this_machine=False)
    return {
        "table": "\n".join(_table(results)),
        "comparison": _comparison(results),
        "support": "\n".join([*_support(entries), *_optional(needs)]),
    }


def _package(name: str) -> str:
    """The optional package that an implementation needs, as its file has it; or nothing."""
    found = NEEDED.search((ROOT / "implementations" / f"{name}.py").read_text(encoding="utf-8"))
    return found[1] if found else ""


def _optional(needs: dict[str, str]) -> Iterator[str]:
    """Who takes part where a package is installed."""
    yield ""
    told = ", ".join(f"`{name}` (`{package}`)" for name, package in needs.items())
    yield f"Where its package is installed, and else unsupported with that reason: {told}."


def _table(results: Results) -> Iterator[str]:
    """One group of the quick sweep: causal attention in inference at one length, fastest first."""
    title, rows = next(
        (title, rows)
        for title, rows in groups(results).items()
        if (rows[0].workload.scope, rows[0].workload.mask) == (SHOWN_SCOPE, SHOWN_MASK)
        and rows[0].workload.direction == "inference"
    )
    environment = next(iter(story.environments(results).values()))
    yield f"{escaped(title)}, T={SHOWN_LEN}, on {escaped(environment.cpu)} with {environment.num_threads} threads:"
    yield ""
    yield "| implementation | time of a call | times sdpa | verdict | peak memory (score matrices) | error / allowed |"
    yield "| --- | --- | --- | --- | --- | --- |"
    shown = [row for row in rows if row.workload.seq_len == SHOWN_LEN]
    yield from (_line(row) for row in shown if row.status is not Status.unsupported)
    yield ""
    refused = [row for row in shown if row.status is Status.unsupported and not _package(row.implementation)]
    reasons = [f"`{row.implementation}` ({escaped(row.message)})" for row in refused]
    yield f"Not supported there: {', '.join(reasons)}; and what needs a package that is not installed."


def _support(entries: list[dict[str, str]]) -> Iterator[str]:
    """What each implementation supports, and below it why not."""
    columns = ["implementation", *catalog.QUESTIONS]
    yield f"| {' | '.join(map(escaped, columns))} |"
    yield f"| {' | '.join('---' for _ in columns)} |"
    for entry in entries:
        answers = [{"yes": "yes", "no": "-"}.get(entry[column], entry[column]) for column in catalog.QUESTIONS]
        yield f"| `{entry['implementation']}` | {' | '.join(answers)} |"
    yield ""
    yield from (f"- {escaped(line)}" for line in catalog.why_not(entries))


def _line(row: Row) -> str:
    if row.status is not Status.ok:
        return f"| `{row.implementation}` | {row.status}: {escaped(row.message)} | - | - | - | - |"
    columns = ("time per call", "ratio", "verdict", "memory", "error")
    return f"| `{row.implementation}` | {' | '.join(escaped(row.cells[column]) for column in columns)} |"


def _comparison(results: Results) -> str:
    """The hand-made module beside PyTorch's, projections included."""
    found = {
        (row.implementation, row.workload.seq_len): row
        for rows in groups(results).values()
        for row in rows
        if row.workload.scope == "module" and row.time is not None
    }
    lines = ["| T | `fused`, hand-made | `torch_mha`, PyTorch's | worst error / allowed |", "| --- | --- | --- | --- |"]
    for length in sorted({length for _, length in found}):
        own, official = found[OWN, length], found[OFFICIAL, length]
        ratios = [f"{row.cells['time per call']}, {row.cells['ratio']} of sdpa" for row in (own, official)]
        worst = max((row.cells["error"] for row in (own, official)), key=float)
        lines.append(f"| {length} | {' | '.join(ratios)} | {worst} |")
    return "\n".join(lines)


def renewed(text: str, found: dict[str, str]) -> str:
    """`text` with its blocks as `found` has them.

    Raises:
        ValueError: a block has no place in the text.
    """
    for name, block in found.items():
        place = re.compile(rf"(<!-- begin {name} -->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"README.md has no block {name}")
        text = place.sub(lambda match, block=block: f"{match[1]}\n{block}\n\n{match[2]}", text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    README.write_text(renewed(README.read_text(encoding="utf-8"), blocks(read(QUICK))), encoding="utf-8")
