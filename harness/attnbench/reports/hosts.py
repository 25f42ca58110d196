"""A run on several hosts, as hosts.md: kinds of host side by side, how far hosts lie apart, and who does not count."""

import math
from collections import Counter

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.hosts import FEWEST_HOSTS, Across, Hosts, of_run
from attnbench.analysis.results import Results
from attnbench.reports import cells, grouped, text_report
from attnbench.storage.records import Verdict
from attnbench.units import MISSING, escaped, markdown_list, markdown_table, plain, significant, span

FEW = f"Fewer than {FEWEST_HOSTS} hosts of a kind say nothing of others of it: the one with the most processes counts."


def lines(results: Results) -> list[str]:
    """Who is the fastest on each kind of host, and who wins on one and loses on another; none of one host alone."""
    found = over_all(results)
    if found is None:
        return []
    said = [f"doubtful: {line}" if doubts(results) else line for line in sentences(found)]
    return said + [FEW] * any(not cell.is_general for cell in found.cells)


def shown(results: Results) -> str:
    """Which host stands for each workload in tables and pictures, where several have measured it; else nothing."""
    found = over_all(results)
    if found is None or not found.is_replicated:
        return ""
    hosts = Counter(host for _, host in dict.fromkeys((each.workload.id, each.host) for each in results.records))
    named = ", ".join(f"{host or 'none'} ({number})" for host, number in hosts.items())
    return plain(f"What follows shows one host for each workload: {named}. records.csv has the cells of all hosts.")


def speaks(results: Results) -> bool:
    """Whether only hosts together answer what is the fastest: there are several kinds, or several of a cell."""
    found = of_run(results)
    return found is not None and (len(found.kinds) > 1 or found.is_replicated)


def excluded(results: Results) -> list[str]:
    """The hosts that do not count, or whose verdicts are doubtful, and those that are of one machine, a line each."""
    found = of_run(results)
    if found is None:
        return []
    said = [plain(f"Host {name} does not count: {why}.") for name, why in found.failed.items()]
    if found.is_replicated:  # else each host's doubts are the run's
        own = doubts(results)
        said += [
            plain(f"Host {n}: {line}") for n, part in found.parts.items() for line in doubts(part) if line not in own
        ]
    alike = "how far hosts lie apart says nothing of other machines."
    return said + [plain(f"{', '.join(names)} are one machine: {alike}") for names in found.one_machine]


def sentences(found: Hosts) -> list[str]:
    """The fastest by verdict on each kind of host, and what wins on one kind and loses on another."""
    said = []
    for kind, names in found.kinds.items():
        answers = found.answers.get(kind, [])
        clear = grouped((each for each in answers if not each.undecided), lambda each: each.fastest)
        ordered = sorted(clear.items(), key=lambda item: -len(item[1]))
        parts = [
            f"none is faster than {won[0].baseline} on {len(won)}"
            if name == won[0].baseline
            else f"{name} is the fastest on {len(won)}"
            for name, won in ordered
        ]
        num_open = sum(bool(each.undecided) for each in answers)
        parts += [f"{num_open} are not decided"] * bool(num_open)
        if parts:
            own = f"{len(answers)} workload{'s' * (len(answers) > 1)}"
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
    parts = [
        "# Several hosts, by kind",
        "Hosts of one kind are put together; kinds are never put together, but stand side by side.",
        markdown_list(kinds(found)),
    ]
    if said := sentences(found):
        parts += ["## Who wins where", "\n".join(f"- {escaped(line)}" for line in said)]
    parts += ["## Hosts that do not count", _left_out(found)]
    if any(not cell.is_general for cell in found.cells):
        parts.append(FEW)
    for title, rows in verdicts(found).items():
        parts += [f"## {escaped(title)}", markdown_table(rows)]
    return "\n\n".join(parts) + "\n"


def kinds(found: Hosts) -> dict[str, str]:
    """The letter of each kind, by which tables name it, with what it is and its hosts."""
    return {
        mark: plain(f"{kind}: {_counted(found.kinds[kind])}: {', '.join(found.kinds[kind])}")
        for kind, mark in _marks(found).items()
    }


def verdicts(found: Hosts) -> dict[str, list[dict[str, str]]]:
    """By group of workloads a row for each comparison, with three columns for each kind of host."""
    titles: dict[str, str] = {}
    for part in found.parts.values():  # none need have measured all
        titles |= {workload: title for workload, title in cells.titles(part).items() if workload not in titles}
    by_title = grouped(found.cells, lambda cell: titles.get(cell.workload.id, "other"))
    return {title: _rows(members, _marks(found)) for title, members in by_title.items()}


def _marks(found: Hosts) -> dict[str, str]:
    return {kind: chr(ord("A") + place) if place < 26 else f"K{place}" for place, kind in enumerate(found.kinds)}  # noqa: PLR2004 - letters


def over_all(results: Results) -> Hosts | None:
    """What hosts say together, where a report begins with it: several have measured."""
    found = of_run(results)
    return None if found is None or len(found.parts) == 1 else found


def _left_out(found: Hosts) -> str:
    return markdown_list({name: plain(why) for name, why in found.failed.items()}) or "None."


def _rows(members: list[Across], marks: dict[str, str]) -> list[dict[str, str]]:
    rows = []
    for (_, arm), own in grouped(members, lambda cell: (cell.workload.id, cell.arm)).items():
        by_kind = {cell.kind: cell for cell in own}
        row = {"implementation": plain(str(arm)), "length": cells.length(own[0].workload.axes())}
        for kind, mark in marks.items():
            cell = by_kind.get(kind)
            judged = None if cell is None else cell.judgement
            row[f"{mark}: ratio"] = MISSING if judged is None else span(judged.ratio, judged.low, judged.high)
            row[f"{mark}: verdict"] = MISSING if cell is None else str(cell.verdict)
            row[f"{mark}: hosts differ by"] = MISSING if cell is None else spread(cell)
        rows.append(row)
    return rows


def spread(cell: Across) -> str:
    """How far the hosts of a kind lie apart: the lowest and the highest ratio of any."""
    number = len(cell.logs)
    if not cell.is_general:
        return f"unknown ({number} host{'s' * (number > 1)})"
    ends = [significant(math.exp(end(cell.logs.values())), 3) for end in (min, max)]
    return f"{number} hosts: {ends[0]} to {ends[1]}"


REPORT = text_report("hosts.md", "several hosts: a verdict for each kind of host, and how far hosts differ", document)
