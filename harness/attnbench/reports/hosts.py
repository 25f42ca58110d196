"""A run on several hosts, as hosts.md: kinds of host side by side, how far hosts lie apart, and who does not count."""

import math

from attnbench.analysis.hosts import Across, Hosts, of_run
from attnbench.analysis.results import Results
from attnbench.reports import cells, grouped, text_report
from attnbench.statistics.hosts import FEWEST_HOSTS, OfKind
from attnbench.storage.records import Verdict
from attnbench.units import MISSING, escaped, markdown_list, markdown_table, percent, plain, significant, span

FEW = f"Fewer than {FEWEST_HOSTS} hosts of a kind say nothing of others of it: an interval holds for them alone."


def lines(results: Results) -> list[str]:
    """Who is the fastest on each kind of host, and who wins on one and loses on another; none where all are of one."""
    found = of_run(results)
    return [] if found is None or len(found.kinds) == 1 else sentences(found)


def excluded(results: Results) -> list[str]:
    """The hosts that do not count, with the reason, a line each."""
    found = of_run(results)
    return [] if found is None else [plain(f"Host {name} does not count: {why}.") for name, why in found.failed.items()]


def sentences(found: Hosts) -> list[str]:
    """Who is the fastest on each kind of host, and who wins on one kind and loses on another."""
    said = []
    for kind, names in found.kinds.items():
        leaders = [each for each in found.leaders if each.kind == kind]
        clear = grouped((each for each in leaders if not each.rivals), lambda each: each.implementation)
        ordered = sorted(clear.items(), key=lambda item: -len(item[1]))
        parts = [f"{name} is clearly the fastest on {len(won)}" for name, won in ordered]
        parts += [f"{sum(bool(each.rivals) for each in leaders)} have no clear winner"] * any(e.rivals for e in leaders)
        if parts:
            own = f"{len(leaders)} workload{'s' * (len(leaders) > 1)}"
            said.append(plain(f"{kind} ({_counted(names)}): of {own}, {', '.join(parts)}."))
    for members in found.opposed.values():
        seen = "; ".join(f"{each.verdict} on {each.kind}" for each in members if each.verdict in _DECIDED)
        first = members[0]
        said.append(plain(f"{first.arm} against {first.baseline} on {first.workload.id}: {seen}."))
    return said


_DECIDED = {Verdict.faster, Verdict.slower}


def _counted(names: list[str]) -> str:
    return f"{len(names)} host{'s' * (len(names) > 1)}"


def document(results: Results) -> str:
    """The whole text; empty for a run on one machine."""
    found = of_run(results)
    return "" if found is None else text(found)


def text(found: Hosts) -> str:
    """The same of hosts that were put together."""
    marks = {kind: chr(ord("A") + place) if place < 26 else f"K{place}" for place, kind in enumerate(found.kinds)}  # noqa: PLR2004 - letters
    legend = {marks[kind]: f"{kind}: {_counted(names)}: {', '.join(names)}" for kind, names in found.kinds.items()}
    parts = [
        "# Several hosts, by kind",
        "Hosts of one kind are put together; kinds are never put together, but stand side by side.",
        markdown_list({mark: plain(said) for mark, said in legend.items()}),
    ]
    if said := sentences(found):
        parts += ["## Who wins where", "\n".join(f"- {escaped(line)}" for line in said)]
    parts += ["## Hosts that do not count", _left_out(found)]
    if any(not cell.of_kind.is_general for cell in found.cells):
        parts.append(FEW)
    first = next(iter(found.parts.values()))
    titles = cells.titles(first)
    for title, members in grouped(found.cells, lambda cell: titles.get(cell.workload.id, "other")).items():
        parts += [f"## {escaped(title)}", markdown_table(_rows(members, marks))]
    return "\n\n".join(parts) + "\n"


def _left_out(found: Hosts) -> str:
    short = {host: why for cell in found.cells for host, why in cell.of_kind.left_out.items()} | found.failed
    counted = {name for cell in found.cells for name in cell.of_kind.ratios}
    lost = {name: plain(why) + ", on some workloads" * (name in counted) for name, why in short.items()}
    return markdown_list(lost) or "None."


def _rows(members: list[Across], marks: dict[str, str]) -> list[dict[str, str]]:
    """A row for each comparison, with three columns for each kind."""
    rows = []
    for (_, arm), own in grouped(members, lambda cell: (cell.workload.id, cell.arm)).items():
        by_kind = {cell.kind: cell for cell in own}
        row = {"implementation": plain(str(arm)), "length": cells.length(own[0].workload.axes())}
        for kind, mark in marks.items():
            cell = by_kind.get(kind)
            ratio = None if cell is None else cell.ratio
            row[f"{mark}: ratio"] = MISSING if ratio is None else span(ratio.point, ratio.low, ratio.high)
            row[f"{mark}: verdict"] = MISSING if cell is None else str(cell.verdict)
            row[f"{mark}: hosts differ by"] = MISSING if cell is None else spread(cell.of_kind)
        rows.append(row)
    return rows


def spread(of_kind: OfKind) -> str:
    """How far the hosts of a kind lie apart: a standard deviation, and the lowest and highest ratio of any."""
    number = len(of_kind.ratios)
    if of_kind.spread is None:
        return f"unknown ({number} host{'s' * (number > 1)})"
    points = [significant(each.point, 3) for each in sorted(of_kind.ratios.values(), key=lambda each: each.point)]
    return f"{percent(math.expm1(of_kind.spread))} ({number} hosts: {points[0]} to {points[-1]})"


REPORT = text_report("hosts.md", "several hosts: a verdict for each kind of host, and how far hosts differ", document)
