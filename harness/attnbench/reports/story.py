"""The run as readable text, summary.md, and as a page with a picture, report.html.

Both begin with the answer, and end with facts about the run and the machine.
"""

import re
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from markupsafe import Markup, escape

from attnbench.analysis import comparisons as verdicts
from attnbench.analysis.comparisons import (
    comparisons,
    contention,
    doubts,
    session_doubts,
    throttled,
    too_noisy,
)
from attnbench.analysis.conclusion import Mark, Question, conclude, factor
from attnbench.analysis.mixes import Total, totals
from attnbench.analysis.results import LOST, Results
from attnbench.reports import Picture, Report, answers, cells, endings, grouped, recommended
from attnbench.statistics.interference import MANY
from attnbench.statistics.verdict import FEWEST_PROCESSES, Reason
from attnbench.storage.records import KEPT_MEMORY, Comparison, Environment, Verdict
from attnbench.storage.warned import Warn, Warned
from attnbench.units import (
    MISSING,
    duration,
    escaped,
    markdown_list,
    markdown_table,
    percent,
    plain,
    show,
)

TEMPLATES = Path(__file__).parent
SCRIPT = TEMPLATES / "page.js"


def rendered(template: str, results: Results, **more: object) -> str:
    """Render a template of this folder with the values that summary and page share; in HTML all text is escaped."""
    import jinja2  # here: a check does not need it, and it takes half a second

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    templates.filters |= {"escaped": escaped, "listed": markdown_list}
    return templates.get_template(template).render(
        facts=facts(results),
        findings=findings(results),
        troubles=troubles(results),
        answer=answer(results),
        environments=[described(environment) for environment in results.environments.values()],
        **more,
    )


MOST_LINES = 200
"""Most lines of summary.md; other tables are in report.html and records.csv."""
ON_PAGE_ALONE = ("ran", "FLOP/s")
"""Columns that only the page shows; each measured metric has one."""


def summary(results: Results) -> str:
    """The run as Markdown, with all tables of cells that fit."""
    columns = [column for column in cells.columns(results) if column.heading not in ON_PAGE_ALONE]
    shapes, base = answers.shapes(results), cells.base(results.plan)

    def text(tables: dict[str, str], num_left_out: int) -> str:
        return rendered(
            "summary.md.jinja",
            results,
            shared=answers.shared(shapes) if shapes else "",
            table=markdown_table(answers.table(shapes, base)),
            legend=cells.legend(columns),
            tables=tables,
            num_left_out=num_left_out,
            hosts=hosts(results),
        )

    tables = {
        title: markdown_table([{column.heading: column.text(row) for column in columns} for row in rows])
        for title, rows in cells.groups(results).items()
    }
    number = len(tables)
    while tables and text(tables, number - len(tables)).count("\n") > MOST_LINES:
        tables.popitem()
    return text(tables, number - len(tables)).rstrip("\n") + "\n"


def page(results: Results) -> str:
    """The run as one self-contained page: the answer, one picture, the explorer, and then all details.

    Text from outside is escaped by the template, or is data of the script, which inserts it as text.
    """
    from attnbench.reports import explorer, lines  # here: a check needs no pictures, and these take a second to import

    shapes, picture = answers.shapes(results), lines.usual(results)
    return rendered(
        "page.html.jinja",
        results,
        table=answers.table(shapes, cells.base(results.plan)),
        hosts=hosts(results),
        figure="" if picture is None else inlined(picture),
        shared=answers.shared(shapes) if shapes else "",
        legend=cells.legend(cells.columns(results)),
        memory=answers.memory_line(shapes),
        verdict=verdict(results),
        machine=machine(results),
        data=Markup(explorer.data(results)),  # noqa: S704 - JSON without any "<"
        library=Markup(explorer.library()),  # noqa: S704 - unchanged from its package
        script=Markup(SCRIPT.read_text(encoding="utf-8")),  # noqa: S704 - our own
    )


def asked(results: Results) -> str:
    """The sweep with its numbers of implementations and shapes."""
    plan = results.plan
    names = len({arm.implementation for arm in plan.specs} - set(cells.absent(results)))
    shapes = f"{len(plan.workloads)} shape{'s' * (len(plan.workloads) > 1)}"
    what = f"{names} implementation{'s' * (names > 1)} on {shapes}"
    if plan.sides is not None:
        what = f"Two states of the code: {what}"
    return plain(what if plan.sweep in {"set", "sides", ""} else f"{plan.sweep}: {what}")


TRADE = re.compile(r"\((R|TM)\)|\b(CPU|Processor)\b|\s*@.*$|\s+\d+-Core", re.IGNORECASE)
"""Uninformative parts of a processor's name."""


def verdict(results: Results) -> str:
    """The sweep, and whether everything in it is right."""
    if results.plan.sides is not None:
        return asked(results)
    worst = endings.marks(results, without=cells.absent(results))
    checks = sum(record.agreement is not None for record in results.records)
    if not checks:
        return f"{asked(results)}, nothing was checked"
    against = f"({checks} check{'s' * (checks > 1)} against float64)"
    bad = {name: each for name, each in worst.items() if each in {Mark.wrong, Mark.failed, Mark.imprecise}}
    if not bad:
        return f"{asked(results)}, all right {against}"
    return f"{asked(results)}: {conclude(worst, Question.measurement).words} {against}"


def machine(results: Results) -> list[str]:
    """The machine, the method, and the margin; before them the two states of the code, if there are two."""
    return [*filter(None, [sides(results)]), *_machine(results)]


def sides(results: Results) -> str:
    """The two states of the code, and how they were measured; else ""."""
    found = results.plan.sides
    if found is None:
        return ""
    base, candidate = (
        f"{side.given} ({side.commit[:12]})" if side.commit else side.given for side in (found.base, found.candidate)
    )
    how = "each in processes of its own" if found.is_apart else "both in the same processes"
    new = f"; only in the candidate: {', '.join(found.new)}" if found.new else ""
    return plain(f"Base {base}, candidate {candidate}, {how}{new}.")


def unlike(results: Results) -> list[Warned]:
    """The differences between the environments of two states of the code, as a sentence."""
    base, candidate = (
        next((each.environment for each in records if each.environment is not None), None)
        for records in verdicts.by_side(results)
    )
    if base is None or candidate is None or base.fingerprint == candidate.fingerprint:
        return []
    before, after = described(base), described(candidate)
    kept = ("Python", "versions", "threads", "settings", "flags")
    parts = [f"{name} {before[name]} and {after[name]}" for name in kept if before[name] != after[name]]
    if not parts:
        return []
    return [Warn.environments_differ.says(f"The environments of base and candidate differ: {'; '.join(parts)}.")]


def _machine(results: Results) -> list[str]:
    found = next(iter(results.environments.values()), None)
    parts = []
    if found is not None:
        name = found.accelerator or " ".join(TRADE.sub(" ", found.cpu).split())
        cores = found.num_threads or found.num_physical_cores
        torch = found.versions.get("torch", MISSING).removesuffix("+cpu")
        parts = [name, f"{cores} core{'s' * (cores > 1)}", f"torch {torch}"]
    parts += [f"{results.elapsed_s:.0f} s"] if results.elapsed_s is not None else ["not finished"]
    if not any(results.num_visits.values()):
        return [plain(", ".join([*parts, "nothing was timed"]))]
    number = verdicts.num_processes(results)
    parts += [f"{number} process{'es' * (number != 1)}", f"{results.plan.allocator} allocator"]
    parts.append("DOUBTFUL" if session_doubts(results) else "noisy" if too_noisy(results) else "quiet")
    return [plain(", ".join(parts)), f"Differences below {percent(results.plan.smallest_effect)} count as equal."]


def inlined(picture: Picture, number: int = 1) -> Markup:
    """A picture's SVG as part of a page, with a text alternative and identifiers of its own."""
    svg = re.sub(r'\bid="', f'id="picture{number}-', picture.svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\1picture{number}-", svg)
    named = f'<svg role="img" aria-label="{escape(picture.caption)}" '
    return Markup(svg.replace("<svg ", named, 1))  # noqa: S704 - drawn by us; text in it is outlines


def facts(results: Results) -> dict[str, str]:
    """Facts of the run by name: its plan and its course."""
    plan, records = results.plan, results.records
    counts = Counter(str(record.status) for record in records)
    asked = plan.num_cells
    visits = sum(results.num_visits.values())
    processes = verdicts.num_processes(results)
    counted = f"{processes} process{'es' * (processes != 1)}"
    return {
        "run": plain(results.run),
        "started": plain(results.started.time),
        "commit": plain(results.started.commit) or MISSING,
        "took": "did not come to its end" if results.elapsed_s is None else show(results.elapsed_s, "s"),
        "budget": show(plan.budget_s, "s"),
        "sweep": plain(plan.sweep) or MISSING,
        "baseline": sides(results) or cells.base(plan),
        "cells": f"{len(records)} of {asked}: " + ", ".join(f"{count} {status}" for status, count in counts.items()),
        "not available here": _absences(results) or "nothing that was asked for",
        "samples": f"{visits} visits of {plan.num_blocks} blocks, {counted}, caches {plan.conditions}",
        "verdicts": decided(results) + (f" ({results.reason})" if results.reason else ""),
        "interference": interference(results),
        "method": method(results),
        "fastest matrix product": _ceilings(results),
    }


def described(environment: Environment) -> dict[str, str]:
    """An environment in words, by name of fact."""
    facts = {
        "fingerprint": environment.fingerprint,
        "processor": f"{environment.cpu} ({environment.cpu_capability})",
        "cores": f"{environment.num_physical_cores} physical, {environment.num_logical_cores} logical",
        "memory": show(environment.memory_bytes, "bytes"),
        "accelerator": environment.accelerator or "none",
        "system": environment.system,
        "Python": environment.python,
        "versions": _pairs(environment.versions),
        "threads": str(environment.num_threads or MISSING),
        "settings": _pairs(environment.settings),
        "flags": _pairs(environment.flags),
        "clocks": _pairs(environment.clocks),
        "load at start": show(environment.load),
        "moment": _pairs(environment.moment),
    }
    return {name: plain(text) for name, text in facts.items()}


def troubles(results: Results) -> list[Warned]:
    """Warnings that precede all results: the run was cut short, or the machine was busy."""
    lines = list[Warned]()
    if results.elapsed_s is None:
        text = "This run did not come to its end: missing cells were not measured."
        lines.append(Warn.unfinished.says(text))
    if results.num_left_out and results.plan.metrics:  # a check skips the rest of wrong implementations
        counted = f"{results.num_left_out:,} of {results.num_left_out + len(results.records):,} cells were left out"
        budget = duration(results.plan.budget_s)
        text = f"{counted}: no more fit into the budget of {budget}, spread evenly. Give --budget more."
        lines.append(Warn.left_out.says(text))
    if results.num_lost:
        lines.append(Warn.salvaged.says(f"It was salvaged from a damaged one, in {LOST.format(results.num_lost)}."))
    if results.num_restored:
        text = "Another program changed its journal during the run; the earlier lines were restored."
        lines.append(Warn.journal_changed.says(text))
    if not results.has_digests:
        text = "Its journal is older than digests: a number that was changed since would not be noticed."
        lines.append(Warn.no_digests.says(text))
    slowed, is_usual = throttled(results)
    if slowed is not None and is_usual:  # if unusual, it is listed elsewhere
        lines.append(slowed)
    noisy = too_noisy(results) if results.plan.command == "run" else None  # others have verdicts of their own
    busy = contention(results)
    lines += [] if busy is None or busy in doubts(results) else [busy]
    if results.plan.sides is not None:
        lines += [*unlike(results), *(Warn.untried.says(plain(line)) for line in verdicts.untried(results))]
    return [*doubts(results), *([] if noisy is None else [noisy]), *lines]


def findings(results: Results) -> list[str]:
    """Wrong and failed cells: a line for each implementation, group of workloads and reason, with the lengths.

    Of two states of the code they are the candidate's losses.
    """
    if results.plan.sides is not None:
        return [plain(line) for line in verdicts.losses(results)]
    titles = cells.titles(results)
    alike = grouped(
        (record for record in results.records if record.is_finding),
        lambda record: (record.arm, record.status, titles[record.workload.id], record.message),
    )
    lines = []
    for (arm, status, title, reason), records in alike.items():
        lengths = ", ".join(cells.length(record.workload.axes()) for record in records)
        lines.append(plain(f"{arm}: {status} at length {lengths} ({title}): {reason or 'no reason was recorded'}"))
    return lines


def of_model(results: Results) -> list[str]:
    """The attention time of all layers of a model, for each point and arm."""
    said = []
    for label, found in grouped(totals(results), lambda each: each.mix.label).items():
        timed = [each for each in found if each.seconds is not None]
        whole = f"{results.plan.model} {label}" if results.plan.model else label
        calls = f"{found[0].num_calls} {'layers' if results.plan.model else 'calls'} of attention"
        named = [f"{each.arm} {show(each.seconds, 's')}{_to_base(each)}" for each in timed[:MOST_NAMED]]
        rest = f", {len(timed) - MOST_NAMED} more are slower" if len(timed) > MOST_NAMED else ""
        missing = [str(each.arm) for each in found if each.seconds is None]
        none = f"; no time: {', '.join(missing)}" if missing else ""
        text = ", ".join(named) + rest if named else "none has a time for all of them"
        said.append(plain(f"{whole}, {calls}: {text}{none}."))
    return said


def kept_memory(results: Results, metrics: Collection[str] = (KEPT_MEMORY,)) -> list[str]:
    """A line for each cell with memory that grows with each call; with more metrics also memory kept by first calls."""
    lines = []
    for record in results.records:
        for metric in metrics:
            found = record.measurement(metric)
            value = found.samples[0].value if found is not None and found.samples else 0.0
            if found is not None and value:
                text = next(iter(found.warnings), f"keeps {show(value, 'bytes')} once")
                lines.append(plain(f"{record.arm} {text} ({record.workload.direction})"))
    return lines


MOST_NAMED = 4
"""Most implementations that a sentence names with their times."""


def _to_base(total: Total) -> str:
    """The ratio to the baseline: " (2.30x slower (2.20 to 2.40))"."""
    if total.ratio is None or total.ratio == 1.0:
        return ""
    return f" ({factor(total.ratio, total.low, total.high)})"


def answer(results: Results) -> list[str]:
    """Recommend an implementation in a few sentences."""
    if results.plan.sides is not None:
        return [endings.of_sides(results).sentence]
    if results.plan.command != "run":
        doubtful = "doubtful: " if session_doubts(results) else ""
        return [plain(f"{doubtful}{line}") for line in recommended.lines(results)]
    return [*of_model(results), *answers.advice(results)]


def hosts(results: Results) -> str:
    """The hosts of a run over several machines, with their numbers of workloads; else ""."""
    if not results.hosts:
        return ""
    counts = Counter(host for _, host in dict.fromkeys((each.workload.id, each.host) for each in results.records))
    named = ", ".join(f"{host or 'no host'} ({number})" for host, number in counts.items())
    return plain(f"Each shape was measured by one host, and no comparison spans two: {named}.")


def method(results: Results) -> str:
    """The basis of the verdicts in a line: margin, processes, allocator."""
    plan, number = results.plan, verdicts.num_processes(results)
    counted = f"{number} process{'es' * (number != 1)}"
    return f"Margin {percent(plan.smallest_effect)}, {counted}, allocator {plan.allocator}."


def decided(results: Results) -> str:
    """The number of decided comparisons, and the time that may decide the others."""
    found = comparisons(results)
    if not found:
        return "nothing was compared"
    undecided = [each for each in found if each.verdict is Verdict.undecided]
    text = f"{len(found) - len(undecided)} of {len(found)} comparisons decided"
    if not undecided:
        return text
    if all(each.reason == Reason.few_processes for each in undecided):
        return f"{text}: too few processes, a verdict needs {FEWEST_PROCESSES}"
    more = more_time(undecided)
    return f"{text}; {more or 'no time that can be predicted would decide the others'}"


def more_time(undecided: Sequence[Comparison]) -> str:
    """The time that would decide half of the undecided, and all within reach; "" if it is unknown."""
    within_reach = sorted(each.more_s for each in undecided if each.more_s is not None)
    if not within_reach:
        return ""
    half = within_reach[: (len(within_reach) + 1) // 2]
    more = "" if len(half) == len(within_reach) else f", {duration(max(within_reach))} for {len(within_reach)}"
    return f"about {duration(max(half))} more would decide {len(half)}{more}"


def interference(results: Results) -> str:
    """The number of disturbed blocks, and the share of the machine taken by other work."""
    if not results.num_blocks:
        return "not watched"
    text = f"{results.num_discarded} of {results.num_blocks} blocks discarded because of interference"
    if results.num_discarded > MANY * results.num_blocks:
        text += ": other work disturbed this machine too much for verdicts to be trusted"
    if results.system_load is not None:
        others, host = percent(results.system_load.others), percent(results.system_load.stolen)
        text += f"; others had {others} of the processors' time, and the host took {host}"
    return text


def _absences(results: Results) -> str:
    """Implementations that are absent from this run, grouped by reason."""
    reasons = cells.absent(results)
    alike = grouped(reasons, lambda name: reasons[name])
    return plain("; ".join(f"{', '.join(names)} ({reason})" for reason, names in alike.items()))


def _ceilings(results: Results) -> str:
    """The fastest matrix product of the run, for each device, dtype and number of threads."""
    parts = []
    for device, dtype, num_threads in results.ceilings:
        found = results.ceilings[device, dtype, num_threads]
        where = f"{dtype} on {device}" + (f" with {num_threads} thread{'s' * (num_threads > 1)}" if num_threads else "")
        rate = plain(found.message) if found.matmul is None else show(found.matmul.rate, "flops/s")
        parts.append(f"{where}: {rate}")
    return "; ".join(parts) or "not measured"


def _pairs(text: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in text.items()) or "none"


REPORT = {
    "html": Report(
        summary="one page with pictures and tables, complete in itself",
        files=("report.html",),
        text=page,
        is_usual=True,
    ),
    "markdown": Report(
        summary="the whole run as a readable text with tables", files=("summary.md",), text=summary, is_usual=True
    ),
}
