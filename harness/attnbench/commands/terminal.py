"""What a terminal shows on standard output: the final table and the findings."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from attnbench.analysis.overall import losses
from attnbench.analysis.results import Results
from attnbench.reports import sides, table, verdicts, words
from attnbench.storage.records import Key, Record, Status, Verdict
from attnbench.units import MISSING, show, significant

LONGEST_UNBROKEN = 40
MANY, DENSE_WIDTH = 12, 120
FAR = 1e4
"""From here on an error is told by its power of ten."""


def print_results(results: Results) -> None:
    """A table for each group of workloads, with a row for each implementation and a column for each length."""
    console = Console()
    for title, rows in table.groups(results).items():
        console.print(title, style="bold", markup=False, soft_wrap=True)
        console.print(_table(rows))
        console.print()
    told = f"Median time of a call; x: times {results.plan.baseline} in the same blocks; ?: undecided."
    console.print(f"{told} Intervals, memory and errors are in summary.md.", style="dim", markup=False)
    for line in (verdicts.decided(results), verdicts.disturbed(results)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_findings(results, console)


def _table(rows: Sequence[table.Row]) -> Table:
    lengths = list(dict.fromkeys(row.cells["length"] for row in rows))
    made = Table(show_edge=False, pad_edge=False)
    made.add_column("implementation", no_wrap=True)
    for length in lengths:
        made.add_column(f"T={escape(length)}", justify="right", no_wrap=True)
    by_name: dict[str, dict[str, table.Row]] = {}
    for row in sorted(rows, key=lambda row: row.sort_key[:2], reverse=True):  # order by the greatest length
        by_name.setdefault(row.implementation, {})[row.cells["length"]] = row
    for name, cells in sorted(by_name.items(), key=lambda item: _speed(item[1], lengths)):
        made.add_row(escape(name), *(_cell(cells.get(length)) for length in lengths))
    return made


def _speed(cells: dict[str, table.Row], lengths: Sequence[str]) -> tuple[float, ...]:
    """Fastest at the greatest length first; what has no time there goes by the length before."""
    times = [cells[length].time if length in cells else None for length in reversed(lengths)]
    return tuple(float("inf") if found is None else found.point for found in times)


def _cell(row: table.Row | None) -> str:
    if row is None:
        return f"[dim]{MISSING}[/]"
    if row.status is not Status.ok:
        colour = "dim" if row.is_predicted or row.status is Status.unsupported else "bold red"
        return f"[{colour}]{row.cells['status']}[/]"
    if row.time is None:
        memory = row.peak_memory_bytes
        return f"[green]ok[/] {show(memory, 'bytes')}" if memory is not None else "[green]ok[/]"
    if row.comparison is None:
        return f"{show(row.time.point, 's')} [dim]{'base' if row.is_baseline else ''}[/]"
    doubt = "?" if row.comparison.verdict is Verdict.undecided else ""
    return f"{show(row.time.point, 's')} [dim]x{significant(row.comparison.ratio, 3)}{doubt}[/]"


def print_check(results: Results) -> None:
    """A row for each implementation: how its cells ended, and how near it came to what is allowed."""
    rows = []
    for name in dict.fromkeys(record.implementation for record in results.records):
        own = [record for record in results.records if record.implementation == name]
        counts = ", ".join(f"{number} {status}" for status, number in Counter(r.status for r in own).items())
        ratios = [r.agreement.error_ratio for r in own if r.agreement is not None]
        finite = [ratio for ratio in ratios if ratio is not None]
        worst = "not finite" if None in ratios else _how_far(max(finite)) if finite else MISSING
        verdict = "WRONG" if any(r.is_finding for r in own) else "right" if ratios else "not checked"
        rows.append((name, verdict, counts, worst))
    print_table(("implementation", "verdict", "cells", "worst error / allowed"), rows)
    console = Console()
    for group in _alike(results):
        _print_finding(group, console)
    _print_notes(results, console)
    _print_not_tried(results, console)


def _alike(results: Results) -> list[list[Record]]:
    """The findings, those together in which one implementation is wrong in one way; the smallest workload first."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for record in results.records:
        if record.is_finding:
            told = record.agreement.mistakes if record.agreement is not None else ()
            first = record.message.split(". ", 1)[0]
            groups.setdefault((record.implementation, record.status, *(told or (first,))), []).append(record)
    return [sorted(group, key=_size) for group in groups.values()]


def _size(record: Record) -> tuple[int, str]:
    workload = record.workload
    return workload.batch_size * workload.num_heads * workload.seq_len * workload.kv_len, workload.id


def _print_finding(group: Sequence[Record], console: Console) -> None:
    """What is wrong, a sentence to a line, and on how many workloads."""
    first = group[0]
    console.print(
        f"\n{first.implementation}: {first.status} on {first.workload.id}",
        style="bold red",
        markup=False,
        soft_wrap=True,
    )
    for line in first.message.replace("; found by:", ".\nFound by:").replace(". ", ".\n").splitlines():
        console.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
    if len(group) > 1:
        plural = "" if len(group) == 2 else "s"  # noqa: PLR2004 - one more than the first
        more = f"The same on {len(group) - 1} other workload{plural}, such as {group[-1].workload.id}."
        console.print(f"  {more}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _print_notes(results: Results, console: Console) -> None:
    """What was noted and decides nothing, once for each implementation and rule."""
    noted: dict[str, str] = {}
    for record in results.records:
        for note in () if record.agreement is None else record.agreement.notes:
            noted.setdefault(f"{record.implementation}, {note.rule}", note.found)
    if noted:
        console.print("\nNoted, and no reason to reject:", markup=False)
    for name, found in noted.items():
        console.print(f"  {name}: {found}", style="dim", markup=False, highlight=False, soft_wrap=True)


def _how_far(ratio: float) -> str:
    return f"{ratio:.0e}" if ratio >= FAR else significant(ratio, 2)


def print_findings(results: Results, console: Console) -> None:
    """Each cell that went wrong, with its reason, and how many were not tried and why."""
    for record in results.records:
        if record.is_finding:
            where = f"{record.arm} on {record.workload.id}"
            console.print(f"{record.status}: {where}: {record.message}", style="red", markup=False, soft_wrap=True)
    _print_not_tried(results, console)


def _print_not_tried(results: Results, console: Console) -> None:
    reasons: dict[str, int] = {}
    for record in results.records:
        if record.status is not Status.ok and not record.is_finding:
            told = "predicted over a limit" if record.is_predicted else record.message
            line = f"{record.arm}: {told}"
            reasons[line] = reasons.get(line, 0) + 1
    if reasons:
        console.print("\nNot tried:", markup=False)
    for line, number in reasons.items():
        console.print(f"  {line} ({number} cell{'s' if number > 1 else ''})", markup=False, style="dim", soft_wrap=True)


def print_traces(results: Results, files: Mapping[Key, Path]) -> None:
    """A table for each workload with the size of each trace; then what went wrong."""
    console = Console()
    for workload in results.plan.workloads:
        console.print(workload.id, style="bold", markup=False, soft_wrap=True)
        rows = []
        for record in (each for each in results.records if each.workload.id == workload.id):
            file = files.get(record.key)
            size = MISSING if file is None else show(file.stat().st_size, "bytes")
            rows.append((record.implementation, str(record.status), size))
        print_table(("implementation", "status", "trace"), rows)
    print_findings(results, console)


def print_entries(entries: Sequence[dict[str, str]], notes: Sequence[str] = ()) -> None:
    """A list of things, all with the same columns; notes and sources, which are long, stand below."""
    columns = [column for column in entries[0] if column not in {"source", "why"}]
    print_table(columns, [[entry[column] for column in columns] for entry in entries], dense=len(columns) > MANY)
    console = Console()
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    for name, source in ((entry[columns[0]], entry.get("source")) for entry in entries):
        if source:
            console.print(f"{name}: {source}", style="dim", markup=False, soft_wrap=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, dense: bool = False) -> None:
    """A plain table of texts, the first column unbroken unless it is so long that it would crowd out the others.

    A dense one has no lines between its columns, and is 120 characters wide if need be.
    """
    console = Console()
    made = Table(show_edge=False, pad_edge=False)
    if dense:
        made.box, made.padding = SIMPLE_HEAD, (0, 0, 0, 0)
        console = Console(width=max(console.width, DENSE_WIDTH))
    is_short = all(len(row[0]) <= LONGEST_UNBROKEN for row in rows)
    for number, column in enumerate(columns):
        made.add_column(column, overflow="fold", no_wrap=number == 0 and is_short)
    for row in rows:
        made.add_row(*map(escape, row))
    console.print(made)


def summary(found: Results) -> dict[str, object]:
    """What a program wants to know of a run."""
    return {
        "run": found.run,
        "folder": str(found.folder),
        "counts": Counter(str(record.status) for record in found.records),
        "cells": [
            {
                "workload": row.workload.id,
                "implementation": row.arm.implementation,
                "side": row.arm.side,
                "status": str(row.status),
                "is_predicted": row.is_predicted,
                "message": row.message,
                "latency_s": None if row.time is None else row.time.point,
                "ratio": None if row.comparison is None else row.comparison.ratio,
                "verdict": None if row.comparison is None else str(row.comparison.verdict),
                "sameness": None if row.comparison is None else row.comparison.sameness,
                "flops_per_s": None if row.rates is None else row.rates.flops_per_s,
                "matmul_share": None if row.rates is None else row.rates.matmul_share,
                "peak_memory_bytes": row.peak_memory_bytes,
                "error_ratio": row.error_ratio,
            }
            for row in table.rows(found)
        ],
    }


def print_sides(results: Results) -> None:
    """Two sides: a table of cells, the verdict on all of them, and what went wrong."""
    console = Console()
    for title, members in sides.rows(results).items():
        console.print(title, style="bold", markup=False, soft_wrap=True)
        times = [[row[name].partition(" (")[0] for name in ("base", "candidate")] for row in members]
        rows = [
            (row["implementation"], row["length"], *both, row["ratio"], row["verdict"])
            for row, both in zip(members, times, strict=True)
        ]
        print_table(("implementation", "T", "base", "candidate", "ratio", "verdict"), rows)
        console.print()
    for name, told in sides.facts(results).items():
        console.print(f"{name}: {told}", style="dim", markup=False, highlight=False, soft_wrap=True)
    for line in losses(results):
        console.print(words.plain(line), style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(sides.headline(results), style="bold", markup=False, highlight=False, soft_wrap=True)
