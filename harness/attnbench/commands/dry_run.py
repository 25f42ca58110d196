"""What `attnbench run --dry-run` says: the cells, what they are predicted to cost, and what is left out and why."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import typer

from attnbench.commands import running, terminal
from attnbench.processes import messages
from attnbench.processes.execution import Predicted, predict
from attnbench.processes.stages import check_limit_s
from attnbench.storage.events import Plan
from attnbench.units import duration, plain, show
from attnbench.workloads.counts import compulsory_bytes

CHECK_S, CHECK_CALLS = 0.15, 7
"""A check takes about so long, and as many calls: fitted to 729 checks of the gallery's runs."""
MOST_ROWS = 40


def predicted(plan: Plan, seen: Sequence[Predicted]) -> dict[str, Any]:
    """What is predicted of a plan, as data; of a part of its cells where not all were looked at."""
    tried = [(each, each.reply) for each in seen if isinstance(each.reply, messages.Prepared)]
    left_out = [(each, each.reply) for each in seen if isinstance(each.reply, messages.Failed)]
    asked = plan.num_cells
    share = asked / len(seen) if seen else 0.0
    check_s = share * sum(CHECK_S + CHECK_CALLS * (reply.call_s or 0.0) for _, reply in tried)
    limit_s = check_limit_s(plan)
    return {
        "cells": asked,
        "checked": asked if check_s <= limit_s else int(asked * limit_s / check_s),
        "looked_at": len(seen),
        "tried": len(tried),
        "checks_s": check_s,
        "budget_s": plan.budget_s,
        "predicted": [_row(each) | _cost(each, reply) for each, reply in tried],
        "left_out": [
            _row(each) | {"status": str(reply.status), "reason": plain(reply.message)} for each, reply in left_out
        ],
    }


def _row(each: Predicted) -> dict[str, str]:
    return {"workload": each.workload.id, "implementation": plain(str(each.arm))}


def _cost(each: Predicted, reply: messages.Prepared) -> dict[str, float | None]:
    """Seconds and bytes of a call; memory is at least that of inputs and outputs."""
    least = compulsory_bytes(each.workload)
    return {"call_s": reply.call_s, "peak_bytes": reply.peak_bytes, "least_bytes": least}


def print_plan(plan: Plan, *, as_json: bool = False) -> None:
    """Look at the cells of a plan, and print what is predicted."""
    with running.watching() as watch:
        places = {workload.id: place for place, workload in enumerate(plan.workloads)}
        found = predicted(plan, sorted(predict(plan, watch), key=lambda each: places[each.workload.id]))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(sentence(found))
    rows: list[tuple[str, ...]] = []
    before = ""
    for row in found["predicted"][:MOST_ROWS]:
        is_first = row["workload"] != before
        before = row["workload"]
        call = "-" if row["call_s"] is None else show(row["call_s"], "s")
        memory = show(row["peak_bytes"] or row["least_bytes"], "bytes")
        least = "" if row["peak_bytes"] else "at least "
        rows.append((before if is_first else "", row["implementation"], call, f"{least}{memory}"))
    if rows:
        terminal.print_table(("workload", "implementation", "one call", "memory"), rows)
        if len(found["predicted"]) > MOST_ROWS:
            typer.echo(f"... and {len(found['predicted']) - MOST_ROWS:,} more; --json has all")
    reasons = Counter((row["status"], row["implementation"], row["reason"]) for row in found["left_out"])
    if reasons:
        typer.echo("\nLeft out:")
        lines = [(name, status, str(number), why) for (status, name, why), number in reasons.items()]
        terminal.print_table(("implementation", "status", "cells", "why"), lines[:MOST_ROWS])
        if len(lines) > MOST_ROWS:
            typer.echo(f"... and {len(lines) - MOST_ROWS:,} more reasons; --json has all")


def sentence(found: dict[str, Any]) -> str:
    """The answer: how many cells, and about how long they take."""
    part = "" if found["looked_at"] == found["cells"] else f" of {found['looked_at']:,} looked at"
    said = f"{found['cells']:,} cells, of which {found['tried']:,}{part} would be tried."
    said += f" Checks take about {duration(found['checks_s'])} of the budget of {duration(found['budget_s'])}."
    if found["checked"] < found["cells"]:
        said += f" About {found['checked']:,} cells would be checked, spread evenly; give --budget more for others."
    return said
