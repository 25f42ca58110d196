"""The reports summary.md (a run as readable text) and report.html (a page with a picture).

Screens and the Python API also use the functions for single parts, such as the verdict, the warnings and the facts.
"""

import base64
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import msgspec
from markupsafe import Markup, escape

from attnbench.analysis import comparisons as verdicts
from attnbench.analysis.comparisons import contention, doubts, session_doubts, too_noisy
from attnbench.analysis.conclusion import HOW_FAST, Mark, conclude, marks
from attnbench.analysis.results import LOST, Results
from attnbench.analysis.sides import by_side, losses, untried
from attnbench.analysis.warned import Warn, Warned
from attnbench.reports import Report, answers, cells, exit_status, recommended, titles
from attnbench.storage.records import KEPT_MEMORY, Environment, Record, Status, Verdict
from attnbench.units import (
    MISSING,
    duration,
    escaped,
    grouped,
    markdown_list,
    markdown_table,
    percent,
    sanitize_line,
    show,
)

PAGE = "report.html"
TEMPLATES = Path(__file__).parent
SCRIPT = TEMPLATES / "page.js"
MOST_LINES = 200  # of summary.md; report.html and records.csv have the tables that do not fit
ON_PAGE_ALONE = ("ran", "FLOP/s")  # columns that only the page shows


OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z-]*)")


def render_template(template: str, results: Results, **more: object) -> str:
    """Render a template with the values that both reports use, and with `more`; in HTML all text is escaped."""
    import jinja2  # here, since the import takes half a second and a check does not need it

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=jinja2.select_autoescape(["html.jinja"]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
    )
    templates.filters |= {"escaped": escaped, "listed": markdown_list, "tabulated": markdown_table}
    templates.filters |= {"breakable": _breakable, "unbroken": _unbroken}
    shapes = answers.shapes(results)
    return templates.get_template(template).render(
        {part.__name__: part(results) for part in (facts, findings, troubles, verdict, machine, answer)},
        shared=f"{titles.shared([shape.workload for shape in shapes])}:" if shapes else "",
        table=answers.table(shapes),
        signs=answers.legend(shapes),
        memory=answers.memory_line(shapes),
        environments=[describe_environment(environment) for environment in results.environments.values()],
        **more,
    )


def _breakable(name: str) -> Markup:
    """Return a name as HTML that may be broken after each underscore, so that a column is no wider than its times."""
    return escape(name).replace("_", Markup("_<wbr>"))


def _unbroken(line: str) -> Markup:
    """Return a line as HTML in which no option, such as --budget, is split across two lines."""
    return Markup(OPTION.sub(r'<span class="whole">\1</span>', str(escape(line))))  # noqa: S704 - escaped before


def markdown(results: Results) -> str:
    """Return a run as Markdown, with as many tables of cells as fit into MOST_LINES."""
    columns = [column for column in cells.columns(results) if column.heading not in ON_PAGE_ALONE]
    headings = [column.heading for column in columns]
    tables = {}
    for title, members in cells.groups(results).items():
        tables[title] = [dict(zip(headings, cells.texts(cell, columns), strict=True)) for cell in members]
    number = len(tables)
    while True:
        more = {"legend": cells.legend(columns), "tables": tables, "num_left_out": number - len(tables)}
        text = render_template("summary.md.jinja", results, **more)
        if not tables or text.count("\n") <= MOST_LINES:
            return text.rstrip("\n") + "\n"
        tables.popitem()


def html_page(results: Results) -> str:
    """Return a run as one self-contained HTML page: the answer, one picture, the charts, and then all details.

    The template escapes texts from outside. The script of the page inserts texts of its data as text, never as HTML.
    """
    from attnbench.reports import (  # here, since these take a second to import and a check draws nothing
        explorer,
        plotted_metrics,
    )

    picture = plotted_metrics.usual(results)
    return render_template(
        "page.html.jinja",
        results,
        caption="" if picture is None else picture.caption,
        figure="" if picture is None else base64.b64encode(picture.png).decode(),
        legend=cells.legend(cells.columns(results)),
        data=Markup(explorer.data(results)),  # noqa: S704 - JSON without any "<"
        library=Markup(explorer.LIBRARY.read_text(encoding="utf-8")),  # noqa: S704 - unchanged from its package
        script=Markup(SCRIPT.read_text(encoding="utf-8")),  # noqa: S704 - our own
    )


def verdict(results: Results) -> str:
    """Describe a run in a line: its sweep, how many implementations and shapes it has, and which answers are right."""
    plan = results.plan
    names = len({arm.implementation for arm in plan.specs} - set(cells.absent_implementations(results)))
    num_shapes = len(plan.workloads)
    what = f"{names} implementation{'s' * (names != 1)} on {num_shapes} shape{'s' * (num_shapes != 1)}"
    what = what if plan.sides is None else f"Two states of the code: {what}"
    head = sanitize_line(what if plan.sweep in {"set", "sides", ""} else f"{plan.sweep}: {what}")
    checks = sum(record.agreement is not None for record in results.records)
    if not checks:
        return f"{head}, nothing was checked"
    against = f"({checks} check{'s' * (checks > 1)} against float64)"
    worst = marks(results)
    if set(worst.values()) == {Mark.right}:
        return f"{head}, {'all ' * (len(worst) > 1)}right {against}"
    return f"{head}: {conclude(worst, HOW_FAST).words} {against}"


TRADE = re.compile(r"\((R|TM)\)|\b(CPU|Processor)\b|\s*@.*$|\s+\d+-Core", re.IGNORECASE)
"""Uninformative parts of a processor's name."""


def machine(results: Results) -> list[str]:
    """Return lines about two compared states or several hosts, if any, then about machine, method and margin."""
    around, parts = [text for text in (sides(results), hosts(results)) if text], list[str]()
    if environment := next(iter(results.environments.values()), None):
        kinds = [kind.partition(",")[0] for kind in environment.accelerator.split("; ")]  # without memory etc.
        name = ", ".join(filter(None, kinds)) or " ".join(TRADE.sub(" ", environment.cpu).split())
        every, used = environment.num_physical_cores, environment.num_threads
        cores = f"{used} of {every}" if 0 < used < every else str(used or every)
        torch = environment.versions.get("torch", MISSING).removesuffix("+cpu")
        parts = [name, f"{cores} core{'s' * (cores != '1')}", f"torch {torch}"]
    parts += [f"{results.elapsed_s:.0f} s"] if results.elapsed_s is not None else ["not finished"]
    if not any(results.num_visits.values()):
        return [*around, sanitize_line(", ".join([*parts, "nothing was timed"]))]
    number = verdicts.num_processes(results)
    parts += [f"{number} process{'es' * (number != 1)}", f"{results.plan.allocator} allocator"]
    parts += [results.plan.conditions] if results.plan.conditions != "warm" else []
    parts.append(_state(results))
    equal, seed = percent(results.plan.smallest_effect), results.plan.seed
    margin = f"Differences below {equal} count as equal. Repeat: --seed {seed}."
    return [*around, sanitize_line(", ".join(parts)), margin]


def _state(results: Results) -> str:
    """Describe the machine during the run in a word, which agrees with the warnings."""
    if session_doubts(results):
        return "DOUBTFUL"
    return "noisy" if too_noisy(results) else "busy" if contention(results) else "quiet"


def sides(results: Results) -> str:
    """Describe the two states of the code, and how they were measured; "" in a run of one state."""
    both = results.plan.sides
    if both is None:
        return ""
    named = [each.given + f" ({each.commit[:12]})" * bool(each.commit) for each in (both.base, both.candidate)]
    how = "each in processes of its own" if both.is_apart else "both in the same processes"
    new = f"; only in the candidate: {', '.join(both.new)}" if both.new else ""
    return sanitize_line(f"Base {named[0]}, candidate {named[1]}, {how}{new}.")


def _first_environment(records: Iterable[Record]) -> Environment | None:
    return next((record.environment for record in records if record.environment), None)


def unlike(results: Results) -> list[Warned]:
    """Warn if the environments of two states of the code differ; the list is empty if they do not."""
    base, candidate = map(_first_environment, by_side(results))
    if base is None or candidate is None:
        return []
    old, new = describe_environment(base), describe_environment(candidate)
    names = ("python", "versions", "threads", "settings", "flags")
    parts = [f"{name} {old[name]} and {new[name]}" for name in names if old[name] != new[name]]
    text = f"The environments of base and candidate differ: {'; '.join(parts)}."
    return [Warn.environments_differ.says(text)] if parts else []


def facts(results: Results) -> dict[str, str]:
    """Return facts about a run by name, such as its budget, cells, samples and interference."""
    plan, records = results.plan, results.records
    counts = Counter(str(record.status) for record in records)
    visits, processes = sum(results.num_visits.values()), verdicts.num_processes(results)
    absent = cells.absent_implementations(results)
    reasons = grouped(absent, lambda name: absent[name])
    return {
        "run": sanitize_line(results.run),
        "started": sanitize_line(results.started.time),
        "commit": sanitize_line(results.started.commit) or MISSING,
        "budget": show(plan.budget_s, "s"),
        "cells": f"{len(records)} of {plan.num_cells}: "
        + ", ".join(f"{count} {status}" for status, count in counts.items()),
        "not available here": sanitize_line("; ".join(f"{', '.join(names)} ({why})" for why, names in reasons.items()))
        or "none",
        "left out by the sweep": left_out(results) or "none",
        "samples": f"{results.num_blocks} blocks in {visits} visits, {processes} process{'es' * (processes != 1)}, "
        f"caches {plan.conditions}",
        "verdicts": decided(results) + (f" ({results.reason})" if results.reason else ""),
        "interference": interference(results),
    }


def left_out(results: Results) -> str:
    """List the implementations that the sweep left out, on how many of the shapes, and why; "" if there are none."""
    plan, parts, here = results.plan, list[str](), {arm.implementation for arm in results.plan.specs}
    for name, why in plan.why_left_out.items():
        number = sum(name not in here or each.id in plan.left_out.get(name, ()) for each in plan.asked)
        where = f" on {number} of {len(plan.asked)} shapes" * (number < len(plan.asked))
        parts += [f"{name}{where}{f' ({why})' * bool(why)}"] * bool(number)
    return sanitize_line(", ".join(parts))


def describe_environment(environment: Environment) -> dict[str, str]:
    """Describe an environment as texts by name, the fingerprint first."""
    facts = {"fingerprint": environment.fingerprint, **msgspec.structs.asdict(environment)}
    facts |= {"memory_bytes": show(environment.memory_bytes, "bytes")}
    names = {name: name.removeprefix("num_").removesuffix("_bytes").replace("_", " ") for name in facts}
    return {names[name]: _in_words(value) for name, value in facts.items()}


def _in_words(value: object) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{name} {text}" for name, text in value.items())
    if isinstance(value, tuple):
        value = ", ".join(value)
    text = re.sub(r"\b(\d+) bytes", lambda size: show(int(size[1]), "bytes"), str(value or "none"))
    return sanitize_line("unknown" if value is None else text)


def troubles(results: Results) -> list[Warned]:
    """Return warnings about the whole run, such as doubtful times, an unfinished run or a damaged journal."""
    plan, doubtful, noisy, busy = results.plan, doubts(results), too_noisy(results), contention(results)
    lines = [*doubtful]
    if noisy is not None and plan.command != "fastest":  # `fastest` has verdicts of its own
        lines.append(noisy)
    if results.elapsed_s is None:
        lines.append(Warn.unfinished.says("This run did not finish: missing cells were not measured."))
    if results.num_left_out and plan.metrics:  # a check skips the other cells of wrong implementations
        counted = f"{results.num_left_out:,} of {results.num_left_out + len(results.records):,} cells were left out"
        budget = duration(plan.budget_s)
        text = f"{counted}: they did not fit into the budget of {budget}. Raise --budget."
        lines.append(Warn.left_out.says(text))
    fewest = min(results.num_visits.values(), default=plan.num_rounds)
    if "budget" in results.reason and fewest < plan.num_rounds:
        enough = math.ceil(plan.budget_s * plan.num_rounds / max(fewest, 1))
        spent = f"the budget of {duration(plan.budget_s)} was spent after {fewest} of the {plan.num_rounds} processes"
        text = f"Give --budget {enough}, or fewer shapes: {spent} that verdicts need."
        lines.append(Warn.left_out.says(text))
    if results.num_lost:
        lines.append(Warn.salvaged.says(f"This run is the rest of a damaged one, in {LOST.format(results.num_lost)}."))
    if results.num_restored:
        text = "Another program changed the journal during the run; the earlier lines were restored."
        lines.append(Warn.journal_changed.says(text))
    if busy is not None and busy not in doubtful:
        lines.append(busy)
    if plan.sides is not None:
        skipped = (f"not tried: {cell}: {reason}" for cell, reason in untried(results).items())
        lines += [*unlike(results), *map(Warn.untried.says, map(sanitize_line, skipped))]
    return lines


def findings(results: Results) -> list[str]:
    """List wrong and failed cells; those that differ only in their lengths share a line.

    If two states of the code are compared, it returns the lines of `losses` instead.
    """
    if results.plan.sides is not None:
        return [sanitize_line(line) for line in losses(results)]
    alike = grouped(
        (record for record in results.records if record.is_finding),
        lambda record: (record.arm, record.status, titles.title(record.workload.axes()), record.message),
    )
    lines = []
    for (arm, status, title, reason), records in alike.items():
        lengths = ", ".join(titles.length(record.workload.axes()) for record in records)
        word = Mark.wrong if status is Status.disagrees else status
        lines.append(sanitize_line(f"{arm}: {word} at T={lengths}: {reason or 'no reason was recorded'} ({title})"))
    return lines


def kept_memory(results: Results) -> list[str]:
    """Return a line for each cell whose memory grows with each call."""
    measured = ((record, record.measurement(KEPT_MEMORY)) for record in results.records)
    return [
        sanitize_line(f"{record.arm} {next(iter(kept.warnings))} ({record.workload.direction})")
        for record, kept in measured
        if kept is not None and kept.warnings and kept.samples and kept.samples[0].value
    ]


def answer(results: Results) -> list[str]:
    """Answer in a few sentences: with a recommendation or, for two states of the code, with the conclusion."""
    if results.plan.sides is not None:
        return [exit_status.of_sides(results).sentence]
    if results.plan.command != "run":
        doubtful = "doubtful: " if session_doubts(results) else ""
        return [sanitize_line(f"{doubtful}{line}") for line in recommended.recommendation_lines(results)]
    return answers.advice(results)


def hosts(results: Results) -> str:
    """List the hosts of a run on several machines, each with its number of shapes; "" for other runs."""
    if not results.hosts:
        return ""
    measured = dict.fromkeys((each.workload.id, each.host) for each in results.records)
    counts = Counter(host for _, host in measured)
    members = ", ".join(f"{host or 'no host'} ({number})" for host, number in counts.items())
    return sanitize_line(f"Each shape was measured on one host: no comparison mixes hosts. Shapes per host: {members}.")


def decided(results: Results) -> str:
    """Count the decided comparisons, in words: "5 of 6 comparisons decided"."""
    judged = verdicts.comparisons(results)
    num_decided = sum(each.verdict is not Verdict.undecided for each in judged)
    return f"{num_decided} of {len(judged)} comparisons decided" if judged else "nothing was compared"


def interference(results: Results) -> str:
    """Describe interference: the number of discarded blocks, and the share of processor time that other work took."""
    if not results.num_blocks:
        return "not watched"
    text = f"{results.num_discarded} of {results.num_blocks} blocks discarded because of interference"
    if results.system_load is not None:
        others, host = percent(results.system_load.others), percent(results.system_load.stolen)
        text += f"; other processes used {others} of the processors' time, and the hypervisor {host}"
    return text


REPORT = {
    "html": Report(
        summary="one self-contained page with pictures and tables", file=PAGE, text=html_page, is_usual=True
    ),
    "markdown": Report(
        summary="the whole run as a readable text with tables", file="summary.md", text=markdown, is_usual=True
    ),
}
