"""Print runs, checks and tables on the terminal."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.gate.certain import changed
from attnbench.analysis.judgements import judgements
from attnbench.analysis.results import Results
from attnbench.commands import OUTPUT
from attnbench.console import say
from attnbench.reports import cells, screen, summary
from attnbench.storage.records import CheckVerdict, Record, Status, rejectable
from attnbench.units import grouped, multiple, sanitize_line, text_lines

NOT_ON_TERMINAL = {*summary.ON_PAGE_ALONE, "error", "notes"}
"""Columns that only files have, since a terminal is narrow."""
MOST_LINES = 4  # of a list, unless --verbose is set


def print_results(results: Results) -> None:
    """Print the closing screen of a run; with --quiet only warnings and the answer, with --verbose also every cell.

    If the run compares two states of the code, a list of the cells whose results differ between them follows.
    """
    if OUTPUT.is_quiet:
        print_troubles(results)
        say(summary.verdict(results))
        for answer in () if results.plan.sides else summary.answer(results) or ["Nothing was compared."]:
            say(answer, "bold")
        return
    if OUTPUT.is_verbose:
        print_cells(results)
    console = Console()
    for line in screen.screen(results):
        console.print(line.text, style=line.style or None, markup=False, highlight=False, soft_wrap=True)
    if results.plan.sides is not None:
        differing = changed(results)
        _print_list("Results that differ:", differing)
        if not differing:
            say("Results are the same on both sides: status, error, conventions, notes, operators, memory.", "dim")


def print_cells(results: Results) -> None:
    """Print a table of cells for each group of workloads, without the columns NOT_ON_TERMINAL; then all findings."""
    columns = [column for column in cells.columns(results) if column.heading not in NOT_ON_TERMINAL]
    for title, members in cells.groups(results).items():
        say(title, "bold")
        rows = [cells.texts(cell, columns) for cell in members]
        print_table([column.heading for column in columns], rows)
        say("")
    say(f"{summary.decided(results)}; {summary.interference(results)}")
    print_findings(results)
    say("")


def print_troubles(results: Results) -> None:
    """Print the warnings about the whole run in yellow; warnings that make times doubtful are in reverse video."""
    for line in summary.troubles(results):
        say(line, "bold reverse yellow" if line in doubts(results) else "bold yellow")


STYLES = {
    CheckVerdict.right: "bold green",
    CheckVerdict.imprecise: "bold yellow",
    CheckVerdict.wrong: "bold red",
    CheckVerdict.approximate: "bold",
    CheckVerdict.not_judged: "bold yellow",
}


def print_check(results: Results, not_judged: Mapping[str, str]) -> None:
    """Print the verdict on each implementation with its coverage, then mistakes and other observations.

    `not_judged` maps specs that could not be tried to the reasons.
    """
    judged = judgements(results)
    for each in judged:
        has_worst = each.worst is not None and each.verdict is CheckVerdict.right
        worst = f" (error at most {multiple(each.worst or 0.0)} of the tolerance)" if has_worst else ""
        say(f"{each.implementation}: {each.sentence}{worst}", STYLES[each.verdict])
        for convention in each.conventions:
            say(f"  except: {convention}", "yellow")
        if each.conventions and not OUTPUT.is_quiet:
            say(f"  (--reject {','.join(rejectable(each.conventions))} counts this as wrong)", "dim")
    for spec, reason in not_judged.items():
        say(f"{spec}: {CheckVerdict.not_judged}: {reason}", STYLES[CheckVerdict.not_judged])
    for each in judged:
        _print_mistakes([*each.wrong, *each.failed])
    if OUTPUT.is_quiet:
        return
    notes = [f"{each.implementation}, {rule}: {text}" for each in judged for rule, text in each.notes.items()]
    _print_list("Noted (no reason to reject):", notes)
    _print_not_tried(record for record in results.records if record.status is not Status.approximate)
    for line in summary.kept_memory(results):
        say(line)
    compared = [record for record in results.records if record.agreement is not None]
    if line := cells.gathered_line(str(each.arm) for each in compared if results.is_gathered(each)):
        say(f"\n{sanitize_line(line)}", "dim")
    say("")
    if number := results.num_left_out:
        why = results.reason or f"{number} more cell{'s' * (number > 1)} not checked after a wrong one"
        say(f"{why}: --all checks these, too.", "dim")
    say(f"Repeat with the same inputs: --seed {results.plan.seed}", "dim")


def _print_mistakes(records: Iterable[Record]) -> None:
    """Print each mistake or failure once, on the smallest workload that shows it."""
    for alike in grouped(records, _mistake).values():
        first, *others = sorted(alike, key=lambda record: (record.workload.num_scores, record.workload.id))
        kind, style = ("", "bold red") if first.is_wrong else (f" {first.status}", "bold yellow")
        say(f"\n{first.implementation}:{kind} on {first.workload.id}", style)
        for line in first.message.replace("; found by:", ".\nFound by:").replace(". ", ".\n").splitlines():
            say(f"  {line}")
        if others:
            say(f"  The same on {len(others)} more, such as {others[-1].workload.id}.", "dim")


def _mistake(record: Record) -> tuple[str, ...]:
    """Return a key that cells of one implementation share if they show the same mistake."""
    mistakes = () if record.agreement is None else record.agreement.mistakes
    message = record.message.split(". ", 1)[0] if record.is_wrong else re.sub(r"\d+", "#", record.message)  # any size
    return record.implementation, record.status, *(mistakes or (message,))


def print_findings(results: Results) -> None:
    """Print the findings of a run, and the numbers of cells that were not tried, with the reasons."""
    for line in summary.findings(results):
        say(line, "red")
    for line in summary.kept_memory(results):
        say(line)
    _print_not_tried(results.records)


def _print_not_tried(records: Iterable[Record]) -> None:
    missing = [record for record in records if record.status is not Status.ok and not record.is_finding]
    predicted = {record.key for record in missing if record.is_predicted and record.status is not Status.error}
    limits = {Status.out_of_memory: "predicted to need too much memory"}
    whys = dict.fromkeys(predicted, "predicted to be too slow (--call-limit)")
    whys |= {each.key: limits[each.status] for each in missing if each.key in predicted and each.status in limits}
    reasons = Counter(f"{record.arm}: {whys.get(record.key, record.message)}" for record in missing)
    lines = [f"{line} ({number} cell{'s' * (number > 1)})" for line, number in reasons.items()]
    _print_list("Not tried:", lines)


def _print_list(title: str, lines: Sequence[str]) -> None:
    """Print a title and lines below it, at most MOST_LINES unless --verbose is set."""
    most = len(lines) if OUTPUT.is_verbose else MOST_LINES
    if lines:
        say(f"\n{title}")
    for line in lines[:most]:
        say(f"  {line}", "dim")
    if len(lines) > most:
        say(f"  {len(lines) - most} more: --verbose", "dim")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts as wide as the terminal, with bold headings."""
    console = Console()
    texts = [list(map(sanitize_line, row)) for row in rows]
    for place, line in enumerate(text_lines(columns, texts, width=console.width)):
        console.print(line, style="bold" if not place else None, markup=False, highlight=False, soft_wrap=True)
