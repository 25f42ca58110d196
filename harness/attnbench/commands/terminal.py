"""Output on a terminal."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from attnbench.analysis.breakdown import where
from attnbench.analysis.changed import changed
from attnbench.analysis.comparisons import doubts
from attnbench.analysis.judgements import CheckVerdict, Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.analysis.table import Row
from attnbench.commands import VERBOSITY
from attnbench.reports import cells, grouped, screen, story, text_lines
from attnbench.storage.records import KEPT, KEPT_MEMORY, Key, Record, Status
from attnbench.units import MISSING, plain, show

LONGEST_NAME = 32
WRONG, NOT_JUDGED = str(CheckVerdict.wrong), str(CheckVerdict.not_judged)


def say(text: str, style: str = "") -> None:
    """Print a line without control characters, wrapped between words on a terminal only."""
    console, indent = Console(), " " * (len(text) - len(text.lstrip(" ")))
    console.print(
        indent + plain(text), style=style or None, markup=False, highlight=False, soft_wrap=not console.is_terminal
    )


def print_results(results: Results) -> None:
    """Print the closing screen of a run; quiet prints only the answer, and verbose adds a table of every cell."""
    if VERBOSITY.is_quiet:
        print_troubles(results)
        say(story.verdict(results))
        for answer in () if results.plan.sides else story.answer(results) or ["Nothing was compared."]:
            say(answer, "bold")
        return
    if VERBOSITY.is_verbose:
        print_cells(results)
    console = Console()
    for line in screen.screen(results):
        console.print(line.text, style=line.style or None, markup=False, highlight=False, soft_wrap=True)


def print_cells(results: Results) -> None:
    """Print a table for each group of workloads: time, verdict and memory of each cell; then all findings."""
    for title, members in cells.groups(results).items():
        say(title, "bold")
        lines = [
            (
                cells.length(row),
                plain(cells.arm(row), limit=LONGEST_NAME),
                show(row["paired_latency_s"], "s"),
                _verdict(row),
                show(row.get("peak_memory_bytes"), "bytes"),
            )
            for row in members
        ]
        print_table(("length", "implementation", "time", "verdict", "peak memory"), lines)
        say("")
    say(story.method(results), "dim")
    say(f"{story.decided(results)}; {story.interference(results)}")
    print_findings(results)
    say("")


def _verdict(row: Row) -> str:
    """The verdict in few words, or how the cell ended if it is not ok."""
    return cells.verdict(row).partition(" (")[0] if row["status"] == Status.ok else cells.status(row)


def print_troubles(results: Results) -> None:
    """Print warnings that precede all verdicts, in colour; those that make all verdicts doubtful in reverse."""
    for line in story.troubles(results):
        say(line, "bold reverse yellow" if line in doubts(results) else "bold yellow")


def print_check(results: Results, not_judged: Mapping[str, str]) -> None:
    """Print the verdict on each implementation with its coverage, then mistakes and other observations.

    `not_judged` maps specs that could not be tried to the reasons.
    """
    judged = judgements(results)
    for each in judged:
        has_worst = each.worst is not None and each.verdict in {CheckVerdict.right, CheckVerdict.imprecise}
        worst = f" (error at most {cells.multiple(each.worst or 0.0)} of the tolerance)" if has_worst else ""
        say(f"{each.implementation}: {each.sentence}{worst}", STYLES[each.verdict])
        for convention in each.conventions:
            say(f"  except: {convention}", "yellow")
    for spec, reason in not_judged.items():
        say(f"{spec}: {NOT_JUDGED}: {reason}", STYLES[CheckVerdict.not_judged])
    for each in judged:
        _print_mistakes(each.wrong, "bold red")
        _print_mistakes(each.failed, "bold yellow")
    if VERBOSITY.is_quiet:
        return
    _print_evidence(results, judged)


STYLES = {
    CheckVerdict.right: "bold green",
    CheckVerdict.imprecise: "bold yellow",
    CheckVerdict.wrong: "bold red",
    CheckVerdict.approximate: "bold",
    CheckVerdict.not_judged: "bold yellow",
}


def _print_mistakes(records: Iterable[Record], style: str) -> None:
    """Print each failure once, on the smallest workload that shows it."""
    for group in grouped(records, _mistake).values():
        first, *others = sorted(group, key=lambda record: (record.workload.num_scores, record.workload.id))
        say("")
        kind = "" if first.is_wrong else f" {first.status}"
        say(f"{first.implementation}:{kind} on {first.workload.id}", style)
        for line in first.message.replace("; found by:", ".\nFound by:").replace(". ", ".\n").splitlines():
            say(f"  {line}")
        _say_others(others)


def _print_evidence(results: Results, judged: Sequence[Judgement]) -> None:
    """Print notes, omitted cells, and how to repeat the check."""
    notes = [f"  {each.implementation}, {rule}: {found}" for each in judged for rule, found in each.notes.items()]
    if notes:
        say("")
        say("Noted (no reason to reject):")
    for note in notes:
        say(note, "dim")
    print_kept_memory(results)
    _print_not_tried(record for record in results.records if record.status is not Status.approximate)
    say("")
    if results.num_left_out:
        plural = "s" if results.num_left_out > 1 else ""
        say(f"{results.num_left_out} more cell{plural} not checked after a wrong one: --all checks these, too.", "dim")
    say(f"Repeat with the same inputs: --seed {results.plan.seed}", "dim")


def verdicts(results: Results) -> dict[str, str]:
    """The verdict of a check on each implementation, by name."""
    return {each.implementation: each.word for each in judgements(results)}


def _say_others(records: Sequence[Record]) -> None:
    if records:
        plural = "s" if len(records) > 1 else ""
        say(f"  The same on {len(records)} other workload{plural}, such as {records[-1].workload.id}.", "dim")


def _mistake(record: Record) -> tuple[str, ...]:
    """Key of cells with the same mistake of one implementation."""
    mistakes = () if record.agreement is None else record.agreement.mistakes
    message = record.message.split(". ", 1)[0] if record.is_wrong else re.sub(r"\d+", "#", record.message)  # sizes
    return record.implementation, record.status, *(mistakes or (message,))


def print_findings(results: Results) -> None:
    """Print the findings of a run, and the number of untried cells, with the reasons."""
    for line in story.findings(results):
        say(line, "red")
    print_kept_memory(results)
    _print_not_tried(results.records)


def _print_not_tried(records: Iterable[Record]) -> None:
    missing = [record for record in records if record.status is not Status.ok and not record.is_finding]
    predicted = {record.key for record in missing if record.is_predicted and record.status is not Status.error}
    reasons = Counter(
        f"{record.arm}: {'predicted over a limit' if record.key in predicted else record.message}" for record in missing
    )
    if reasons:
        say("")
        say("Not tried:")
    for line, number in reasons.items():
        say(f"  {line} ({number} cell{'s' if number > 1 else ''})", "dim")


def print_changes(results: Results) -> None:
    """Print what differs in results, not in time, between two states of the code."""
    lines = [] if VERBOSITY.is_quiet else changed(results)
    if lines:
        say("Results that differ:", "bold")
    for line in lines:
        say(f"  {line}")


def print_kept_memory(results: Results) -> None:
    """Print each cell with memory that grows with each call; with --verbose also memory kept by first calls."""
    for line in story.kept_memory(results, KEPT if VERBOSITY.is_verbose else (KEPT_MEMORY,)):
        say(line)


def print_traces(results: Results, files: Mapping[Key, Path]) -> None:
    """Print for each workload the size of each trace and the breakdown of the time of a call; then failures."""
    sizes = {key: show(file.stat().st_size, "bytes") for key, file in files.items()}
    for workload, records in grouped(results.records, lambda record: record.workload.id).items():
        say(workload, "bold")
        traced = [(plain(one.implementation), str(one.status), sizes.get(one.key, MISSING)) for one in records]
        print_table(("implementation", "status", "trace"), traced)
        for one in records:
            if one.operators is not None and (shares := where(one.operators)):
                say(f"{one.implementation} spends {shares}")
    print_findings(results)


def print_support(entries: Sequence[dict[str, str]], questions: Iterable[str], reasons: Sequence[str]) -> None:
    """Print unsupported features of each installed implementation, then missing ones; verbose adds all reasons."""
    answers = {entry["implementation"]: {name for name in questions if entry[name] == "yes"} for entry in entries}
    possible = set().union(*answers.values())
    here = {name: [each for each in questions if each in possible - own] for name, own in answers.items() if own}
    print_table(("implementation", "lacks"), [(name, ", ".join(missing) or MISSING) for name, missing in here.items()])
    if impossible := [name for name in questions if name not in possible]:
        say(f"None supports: {', '.join(impossible)}")
    absent = grouped((entry for entry in entries if entry["implementation"] not in here), _first_reason)
    if absent:
        say("")
        say("Not here:")
    for reason, members in absent.items():
        say(f"  {', '.join(entry['implementation'] for entry in members)}: {reason}", "dim")
    if not VERBOSITY.is_verbose:
        say("Every reason: attnbench list -v", "dim")
        return
    for line in [*reasons, *(f"{entry['implementation']}: {entry['source']}" for entry in entries)]:
        say(line, "dim")


def _first_reason(entry: dict[str, str]) -> str:
    return (entry["why"].partition("\n")[0].partition(": ")[2]) or entry["source"]


def print_entries(entries: Sequence[dict[str, str]]) -> None:
    """Print entries with equal columns, then their sources."""
    columns = [column for column in entries[0] if column != "source"]
    print_table(columns, [[entry[column] for column in columns] for entry in entries])
    for entry in entries:
        if entry.get("source"):
            say(f"{entry[columns[0]]}: {entry['source']}", "dim")


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table of texts as wide as the terminal, with bold headings."""
    console = Console()
    texts = [[plain(text) for text in row] for row in rows]
    for place, line in enumerate(text_lines(columns, texts, width=console.width)):
        console.print(line, style="bold" if not place else None, markup=False, highlight=False, soft_wrap=True)
