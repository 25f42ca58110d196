"""`attnbench run --dry-run`: the cells, their predicted cost, and the reasons for those that are left out.

For a device that only a data sheet describes, the cells are examined here: each implementation reports its support, and
times are lower bounds by the roofline. Source: S. Williams et al., https://doi.org/10.1145/1498765.1498785.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import typer

from attnbench.commands import running, terminal
from attnbench.devices import described, device
from attnbench.devices.described import DataSheet
from attnbench.processes import messages
from attnbench.processes.execution import Predicted, predict
from attnbench.reports import grouped
from attnbench.storage.events import Plan
from attnbench.storage.records import Status
from attnbench.units import duration, plain, show
from attnbench.workloads.counts import compulsory_bytes, held_bytes, useful_flops
from attnbench.workloads.workload import Workload

CHECK_S, CHECK_CALLS = 0.15, 7
"""Approximate seconds and calls of a check: fitted to 729 checks of the gallery's runs."""
MOST_ROWS = 40


def predicted(plan: Plan, seen: Sequence[Predicted]) -> dict[str, Any]:
    """The cells of a plan with their predicted time and memory, as data; extrapolated if only part was examined.

    Predictions come from calls at shorter lengths.
    """
    tried = [(each, each.reply) for each in seen if isinstance(each.reply, messages.Prepared)]
    left_out = [(each, each.reply) for each in seen if isinstance(each.reply, messages.Failed)]
    asked = plan.num_cells
    share = asked / len(seen) if seen else 0.0
    rows: list[dict[str, Any]] = [_row(each) | _cost(each, reply) for each, reply in tried]
    check_s = share * sum(CHECK_S + CHECK_CALLS * (row["call_s"] or 0.0) for row in rows)
    return {
        "cells": asked,
        "looked_at": len(seen),
        "tried": len(tried),
        "checks_s": check_s,
        "budget_s": plan.budget_s,
        "predicted": rows,
        "left_out": [
            _row(each) | {"status": str(reply.status), "reason": plain(reply.message)} for each, reply in left_out
        ],
    }


def _row(each: Predicted) -> dict[str, str]:
    return {"workload": each.workload.id, "implementation": plain(str(each.arm))}


def _cost(each: Predicted, reply: messages.Prepared) -> dict[str, Any]:
    """Seconds and bytes of one call; memory is at least that of inputs and outputs."""
    least = compulsory_bytes(each.workload)
    return {"call_s": reply.call_s, "peak_bytes": reply.peak_bytes, "least_bytes": least}


def print_plan(plan: Plan, *, as_json: bool = False, sheet: DataSheet | None = None) -> None:
    """Predict the cells of a plan, and print the predictions.

    Cells of a missing device are left out; those of a device that `sheet` describes have their roofline.

    Raises:
        ValueError: no workload is for the kind of device that the sheet describes.
    """
    asked = {each.device for each in plan.workloads}
    there = {name for name in asked if sheet is not None and name.partition(":")[0] == sheet.kind}
    if sheet is not None and not there:
        given = ", ".join(sorted(asked))
        raise ValueError(
            f"{sheet.name} is described, and every workload is for {given}: give --set device={sheet.kind}"
        )
    missing = {name: why for name in asked - there if (why := device(name).missing())}
    present = {each.id: each for each in plan.workloads if each.device not in {*missing, *there}}
    left_out = {name: tuple(each for each in ids if each in present) for name, ids in plan.left_out.items()}
    here = msgspec.structs.replace(plan, workloads=tuple(present.values()), left_out=left_out)
    seen: list[Predicted] = []
    if here.workloads:
        with running.watching() as watch:
            places = {workload.id: place for place, workload in enumerate(here.workloads)}
            cells = predict(here, watch)
            seen = sorted(cells, key=lambda each: places[each.workload.id])
    found = predicted(here, seen)
    for workload in plan.workloads:
        if workload.device in missing:
            reason = plain(f"{missing[workload.device]}; --set device=h200 plans for a GPU by its data sheet")
            row = {"workload": workload.id, "status": str(Status.unsupported), "reason": reason}
            found["left_out"] += [row | {"implementation": plain(str(arm))} for arm in plan.cells(workload)]
    if sheet is not None:
        meant = [workload for workload in plan.workloads if workload.device in there]
        found |= {"described": msgspec.to_builtins(sheet), "expected": expected(plan, meant, sheet)}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    if sheet is not None:
        _print_described(sheet, found["expected"])
    if here.workloads or missing:
        typer.echo(sentence(found))
    _print_predicted(found)


def _print_predicted(found: dict[str, Any]) -> None:
    """Print the cells that would be tried, and those that are left out."""
    rows = []
    for row in found["predicted"]:
        memory = show(row["peak_bytes"] or row["least_bytes"], "bytes")
        least = "" if row["peak_bytes"] else "at least "
        rows.append((row["workload"], row["implementation"], show(row["call_s"], "s"), f"{least}{memory}"))
    _print_table(("workload", "implementation", "one call", "memory"), rows)
    _print_left_out(found["left_out"])


def _print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the first rows; the first column is printed only if it changes."""
    shown = [
        ["" if place and rows[place - 1][0] == row[0] else row[0], *row[1:]]
        for place, row in enumerate(rows[:MOST_ROWS])
    ]
    if shown:
        terminal.print_table(header, shown)
    if len(rows) > MOST_ROWS:
        typer.echo(f"... and {len(rows) - MOST_ROWS:,} more; --json has all")


def _print_left_out(rows: Sequence[dict[str, Any]]) -> None:
    """Print the reasons why cells would not be tried."""
    reasons = Counter((row["implementation"], row["status"], row["reason"]) for row in rows)
    if reasons:
        typer.echo("\nLeft out:")
        lines = [(name, status, str(number), why) for (name, status, why), number in reasons.items()]
        _print_table(("implementation", "status", "cells", "why"), lines)


def expected(plan: Plan, workloads: Sequence[Workload], sheet: DataSheet) -> list[dict[str, Any]]:
    """A row for each cell on a described device: whether it is supported and fits, and the best possible time.

    `least_s` is the longer of two times: the useful FLOPs at the sheet's rate, and the compulsory bytes at its memory's
    (`bound` names it). `held_bytes` is the least memory of a call. `needs` are packages to install. `status` is that of
    a run's cell: ok, unsupported, out_of_memory, timeout, or error if an implementation cannot be loaded.
    """
    from attnbench.checking.case import reason_against
    from attnbench.contract.loading import implementation

    loaded: dict[str, Any] = {}
    rows = []
    for workload in workloads:
        for arm, spec in plan.cells(workload).items():
            row = {"workload": workload.id, "implementation": plain(str(arm))} | _roofline(workload, sheet)
            rows.append(row | {"status": str(Status.ok), "reason": "", "needs": []})
            if spec not in loaded:
                try:
                    loaded[spec] = implementation(spec)
                except Exception as error:  # noqa: BLE001 - importing foreign code may raise anything
                    loaded[spec] = error
            plug = loaded[spec]
            if isinstance(plug, Exception):
                rows[-1] |= {"status": str(Status.error), "reason": plain(f"{type(plug).__name__}: {plug}")}
                continue
            with described.assuming(sheet) as there:
                reason = reason_against(plug, workload, on_this_machine=False)
            rows[-1]["needs"] = sorted(set(there.packages))
            rows[-1] |= _verdict(plan, rows[-1], reason, sheet)
    return rows


def _roofline(workload: Workload, sheet: DataSheet) -> dict[str, Any]:
    flops, moved, rate = useful_flops(workload), compulsory_bytes(workload), sheet.rate(workload)
    of_memory_s, of_products_s = moved / sheet.bytes_per_s, flops / rate if rate else 0.0
    return {
        "least_s": max(of_memory_s, of_products_s),
        "bound": "products" if of_products_s > of_memory_s else "memory",
        "useful_flops": flops,
        "held_bytes": held_bytes(workload),
    }


def _verdict(plan: Plan, row: dict[str, Any], reason: str | None, sheet: DataSheet) -> dict[str, str]:
    """Status and reason of a cell that is out of reach by its roofline; empty if it is not."""
    if reason:
        return {"status": str(Status.unsupported), "reason": plain(reason)}
    limit_bytes = plan.memory_limit_bytes or sheet.memory_bytes
    if row["held_bytes"] > limit_bytes:
        text = f"inputs, outputs and gradients take {show(row['held_bytes'], 'bytes')} of {show(limit_bytes, 'bytes')}"
        return {"status": str(Status.out_of_memory), "reason": text}
    if row["least_s"] > plan.call_limit_s:
        text = f"no call takes less than {show(row['least_s'], 's')}, over the limit of {show(plan.call_limit_s, 's')}"
        return {"status": str(Status.timeout), "reason": f"{text}; --call-limit {row['least_s']:.2g} includes it"}
    return {}


def _print_described(sheet: DataSheet, rows: Sequence[dict[str, Any]]) -> None:
    """Print the answer, each workload with its roofline, and the cells that are left out."""
    fit = [row for row in rows if row["status"] == Status.ok]
    limit = f"{show(sheet.memory_bytes, 'bytes')} and {sheet.bytes_per_s / 1e12:.3g} TB/s"
    text = f"{sheet.name}, as described ({limit}): {len(fit):,} of {len(rows):,} cells are supported and may fit."
    if fit:
        text += f" One call of each takes at least {show(sum(row['least_s'] for row in fit), 's')}."
        text += " Nothing was run: times are those of a roofline, and memory is the least that a call holds."
    typer.echo(text)
    needs = {row["implementation"]: ", ".join(row["needs"]) for row in fit if row["needs"]}
    if needs:
        typer.echo(f"To be installed there: {'; '.join(f'{package} for {name}' for name, package in needs.items())}.")
    lines = []
    for workload, cells in grouped(fit, lambda row: row["workload"]).items():
        first = cells[0]
        least = show(first["least_s"], "s"), first["bound"], show(first["held_bytes"], "bytes")
        lines.append((workload, *least, str(len(cells))))
    _print_table(("workload", "one call, at best", "bound by", "memory, at least", "supported by"), lines)
    _print_left_out([row for row in rows if row["status"] != Status.ok])


def sentence(found: dict[str, Any]) -> str:
    """The answer: the number of cells, and their approximate duration."""
    part = "" if found["looked_at"] == found["cells"] else f" of {found['looked_at']:,} looked at"
    text = f"{found['cells']:,} cells, of which {found['tried']:,}{part} would be tried."
    text += f" Checks take about {duration(found['checks_s'])} of the budget of {duration(found['budget_s'])}."
    return text
