"""`python -m studies.models`: the attention of every preset in every phase, here: status, time, and what is too large.

One run measures the workloads of all presets, each once, and may be stopped and gone on with. Times are those of all
layers of a model together; a layer's kind counts as often as the model has it.
"""

import csv
import math
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from attnbench.analysis.mixes import Total, totals
from attnbench.analysis.results import Results, read
from attnbench.commands.running import watching
from attnbench.processes import execution
from attnbench.processes.messages import Failed, Prepared
from attnbench.processes.planning import build_plan
from attnbench.storage.events import Plan
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import LATENCY, Arm, Key, Record, Status
from attnbench.units import markdown_table, show, significant
from attnbench.workloads import models
from attnbench.workloads.counts import compulsory_bytes, useful_flops
from attnbench.workloads.models import Mix
from attnbench.workloads.workload import Workload

IMPLEMENTATIONS = ("sdpa", "sdpa_flash", "sdpa_mask", "fused", "chunked")
STAGES = ("check", "time")
WRONG = {Status.disagrees, Status.invalid}
TOO_LARGE = {Status.timeout, Status.out_of_memory}
LARGEST_BYTES = 2**28
"""What has more bytes to read and write is only predicted: to draw and to check it would take minutes."""
PREDICTIONS = "predictions.jsonl"
SIZES = {"batch_size", "seq_len", "kv_len"}
PEAK = re.compile(r"predicted a peak of ([\d.e+]+ \w+)")
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
PREDICTED = re.compile(rf"predicted ([\d.e+]+) ({'|'.join(UNITS)})(?: and ([\d.e+]+ \w+))? for one call")


@dataclass(frozen=True)
class Row:
    """One point of a model in a phase, and what each implementation did there."""

    model: str
    phase: str
    point: str
    layers: int
    cells: dict[str, str]  # by implementation
    means_s: dict[str, float | None]  # of a layer; None where some layer has no time


def planned(presets: Iterable[str], call_limit_s: float) -> tuple[Plan, dict[str, Workload]]:
    """One plan for all presets in all phases, each workload once; and all workloads, those not to try included."""
    plans = [
        (name, build_plan(sweep="quick", model=name, phase=phase, is_exact=True, implementations=IMPLEMENTATIONS))
        for name in presets
        for phase in models.preset(name).phases
    ]
    every = {each.id: each for _, one in plans for each in one.workloads}
    made = msgspec.structs.replace(
        plans[0][1],
        sweep="models",
        model="",
        workloads=tuple(each for each in every.values() if compulsory_bytes(each) <= LARGEST_BYTES),
        mixes=tuple(Mix(label=f"{name} {mix.label}", counts=mix.counts) for name, one in plans for mix in one.mixes),
        metrics=(LATENCY,),
        budget_s=0.0,  # the first rounds alone
        call_limit_s=call_limit_s,
    )
    return made, every


class Foreseen(msgspec.Struct, frozen=True):
    """A line of the file of predictions: what an implementation is predicted to take at a workload."""

    workload: str
    arm: Arm
    reply: Prepared | Failed


def foreseen(made: Plan, every: Mapping[str, Workload], file: Path) -> dict[Key, Prepared | Failed]:
    """What each implementation is predicted to take at workloads that are not tried; `file` keeps what is known."""
    data = file.read_bytes() if file.exists() else b""
    file.write_bytes(data[: data.rfind(b"\n") + 1])  # without a line that was cut off
    lines = [msgspec.json.decode(line, type=Foreseen) for line in file.read_bytes().splitlines()]
    known = {(line.workload, line.arm): line.reply for line in lines}
    tried = {each.id for each in made.workloads}
    untried = [each for each in every.values() if each.id not in tried]
    left = tuple(each for each in untried if not all((each.id, arm) in known for arm in made.cells(each)))
    if not left:
        return known
    asked = msgspec.structs.replace(made, workloads=left, mixes=())
    with watching() as watch, file.open("ab") as kept:
        for each in execution.predict(asked, watch, limit_s=math.inf):
            known[each.workload.id, each.arm] = each.reply
            kept.write(msgspec.json.encode(Foreseen(each.workload.id, each.arm, each.reply)) + b"\n")
            kept.flush()
    return known


def rows(results: Results, every: Mapping[str, Workload], others: Mapping[Key, Prepared | Failed]) -> list[Row]:
    """A row for each point of each model, in the order of the plan; `others` are the predictions of what was not tried.

    Raises:
        KeyError: something was neither tried nor predicted.
    """
    ends = {key: Ended.foreseen(reply) for key, reply in others.items()}
    ends |= {record.key: Ended.tried(record) for record in results.records}
    by_label: dict[str, list[Total]] = {}
    for total in totals(results):
        by_label.setdefault(total.mix.label, []).append(total)
    found = []
    for mix in results.plan.mixes:
        model, phase, point = mix.label.split(" ", 2)
        own = {total.arm.implementation: total for total in by_label[mix.label]}
        cells = {name: _cell(own[name], ends, every) for name in results.plan.implementations}
        means_s = {name: total.seconds and total.seconds / total.num_calls for name, total in own.items()}
        found.append(Row(model, phase, point, sum(mix.counts.values()), cells, means_s))
    return found


@dataclass(frozen=True)
class Ended:
    """What became of an implementation at a workload: a time that was measured or predicted, a peak, a status."""

    status: Status
    seconds: float | None = None
    memory: str = ""

    @classmethod
    def tried(cls, record: Record) -> "Ended":
        """A cell of the run."""
        if record.samples(LATENCY):
            return cls(record.status, statistics.median(sample.value for sample in record.samples(LATENCY)))
        return cls(record.status, *_read(record.message))

    @classmethod
    def foreseen(cls, reply: Prepared | Failed) -> "Ended":
        """A cell that was predicted alone."""
        if isinstance(reply, Failed):
            return cls(reply.status, *_read(reply.message))
        memory = "" if reply.peak_bytes is None else show(reply.peak_bytes, "bytes")
        return cls(Status.timeout, reply.call_s, memory)


def _read(message: str) -> tuple[float | None, str]:
    """Time and memory that a message says are predicted."""
    if found := PREDICTED.search(message):
        return float(found[1]) * UNITS[found[2]], found[3] or ""
    peak = PEAK.search(message)
    return None, peak[1] if peak else ""


def _cell(total: Total, ends: Mapping[Key, Ended], every: Mapping[str, Workload]) -> str:
    """The time of all layers and its ratio, or why there is none."""
    if total.seconds is not None:
        ratio = "" if total.ratio in {None, 1.0} else f" (x{significant(total.ratio, 3)})"  # the baseline's is 1.0
        return show(total.seconds, "s") + ratio
    own = {workload: ends[workload, total.arm] for workload in total.mix.counts}
    found = {ended.status for ended in own.values()}
    if found & WRONG:
        return "wrong"
    if others := found - TOO_LARGE - {Status.ok}:
        return ", ".join(sorted(map(str, others)))
    large = [workload for workload, ended in own.items() if ended.status in TOO_LARGE]
    if not large:
        return "not timed"
    largest = max(large, key=lambda each: useful_flops(every[each]))
    return f"too large here: {_predicted(every[largest], total.arm, ends, every)} a call"


def _predicted(workload: Workload, arm: Arm, ends: Mapping[Key, Ended], every: Mapping[str, Workload]) -> str:
    """Time and memory of a call that was not made.

    Where no time was predicted, it is that of the largest smaller call, times the ratio of their FLOPs; where no memory
    was, it is what a call must read and write.
    """
    own = ends[workload.id, arm]
    memory = own.memory or f"at least {show(compulsory_bytes(workload), 'bytes')}"
    if own.seconds is not None:
        return f"{show(own.seconds, 's')}, {memory}"

    def shape(each: Workload) -> dict[str, object]:
        return {axis: value for axis, value in each.axes().items() if axis not in SIZES}

    flops = useful_flops(workload)
    smaller = [
        (useful_flops(every[other]), ended.seconds)
        for (other, one), ended in ends.items()
        if one == arm and ended.seconds is not None and shape(every[other]) == shape(workload)
    ]
    below = [each for each in smaller if each[0] < flops]
    if not below:
        return f"no time to go by, {memory}"
    known, seconds = max(below)
    return f"about {show(seconds * flops / known, 's')}, {memory}"


def page(results: Results, found: list[Row]) -> str:
    """The table as Markdown, below what it says and of which machine."""
    limit, environment = results.plan.call_limit_s, next(iter(results.environments.values()))
    table = [
        {"model": row.model, "phase": row.phase, "at": row.point, "layers": str(row.layers), **row.cells}
        for row in found
    ]
    timed = sum("a call" not in cell and cell[0].isdigit() for row in found for cell in row.cells.values())
    counts = f"{timed} of {sum(len(row.cells) for row in found)} have a time"
    versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
    return f"""# The attention of {len({row.model for row in found})} models, in every phase

Each cell is the time of the attention of all layers of the model together, by one implementation, and its ratio to
`sdpa`; a kind of layer counts as often as the model has it. `models.csv` has the mean of a layer, too. {counts}.

What takes longer than {show(limit, "s")} a call, or reads and writes more than {show(LARGEST_BYTES, "bytes")}, is too
large here: the time and the memory of one call are then predicted from shorter lengths. "About" is a smaller call's
time by the ratio of their FLOPs, and "at least" is what a call must read and write.

{markdown_table(table)}

Measured by `nox -s models` on {environment.cpu}, {environment.num_physical_cores} cores; {versions}. Seed
{results.plan.seed}; run `{results.run}`.
"""


def write(found: list[Row], path: Path) -> None:
    """The same as CSV, with the mean of a layer in seconds."""
    names = list(found[0].cells)
    columns = [f"{name}: {what}" for name in names for what in ("all layers", "mean of a layer, s")]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["model", "phase", "at", "layers", *columns])
        for row in found:
            cells = [each for name in names for each in (row.cells[name], row.means_s[name] or "")]
            writer.writerow([row.model, row.phase, row.point, row.layers, *cells])


def study(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/models"),
    runs: Annotated[Path, typer.Option(metavar="DIR", help="Where the run is, to go on with it.")] = Path(
        "build/models"
    ),
    call_limit_s: Annotated[float, typer.Option("--call-limit", help="Seconds; longer calls are not tried.")] = 0.2,
    only: Annotated[list[str] | None, typer.Option("--model", help="These alone; may be repeated.")] = None,
) -> None:
    """Measure every preset in every phase; go on with the run where there is one."""
    made, every = planned(only or models.names(), call_limit_s)
    with watching() as watch:
        execution.execute(read(runs).plan if (runs / JOURNAL).exists() else made, runs, watch, STAGES)
    results = read(runs)
    found = rows(results, every, foreseen(results.plan, every, runs / PREDICTIONS))
    to.mkdir(parents=True, exist_ok=True)
    (to / "README.md").write_text(page(results, found), encoding="utf-8")
    write(found, to / "models.csv")
    typer.echo(f"{to / 'README.md'} has {len(found)} points of {len({row.model for row in found})} models")


if __name__ == "__main__":
    typer.run(study)
