"""`python -m studies.models`: the attention of every preset in every phase, here: status, time, and what is too large.

One run measures the workloads of all presets, each once, and may be stopped and gone on with. Times are those of all
layers of a model together; a layer's kind counts as often as the model has it.
"""

import csv
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
from attnbench.processes.planning import Selection, plan
from attnbench.storage.events import Plan
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import LATENCY, Record, Status
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
"""What has more bytes to read and write is not tried: to draw and to check it would take minutes."""
SIZES = {"batch_size", "seq_len", "kv_len"}
PREDICTED = re.compile(r"predicted ([\d.,]+ (?:ns|us|ms|s|min|h))(?: and ([\d.,]+ \w+))? for one call")


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
        (name, plan(Selection(sweep="quick", model=name, phase=phase, is_exact=True, implementations=IMPLEMENTATIONS)))
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


def rows(results: Results, every: Mapping[str, Workload]) -> list[Row]:
    """A row for each point of each model, in the order of the plan."""
    by_label: dict[str, list[Total]] = {}
    for total in totals(results):
        by_label.setdefault(total.mix.label, []).append(total)
    found = []
    for mix in results.plan.mixes:
        model, phase, point = mix.label.split(" ", 2)
        by_arm = {total.arm: total for total in by_label[mix.label]}
        own = {arm.implementation: by_arm[arm] for arm in results.plan.specs}
        cells = {name: _cell(total, results.records, every) for name, total in own.items()}
        means_s = {name: total.seconds and total.seconds / total.num_calls for name, total in own.items()}
        found.append(Row(model, phase, point, sum(mix.counts.values()), cells, means_s))
    return found


def _cell(total: Total, records: Iterable[Record], every: Mapping[str, Workload]) -> str:
    """The time of all layers and its ratio, or why there is none."""
    if total.seconds is not None:
        ratio = "" if total.ratio in {None, 1.0} else f" (x{significant(total.ratio, 3)})"  # the baseline's is 1.0
        return show(total.seconds, "s") + ratio
    own = {record.workload.id: record for record in records if record.arm == total.arm}
    absent = [each for each in total.mix.counts if each not in own or not own[each].samples(LATENCY)]
    found = {own[each].status for each in absent if each in own}
    if found & WRONG:
        return "wrong"
    large = [each for each in absent if each not in own or own[each].status in TOO_LARGE]
    if not large:
        return ", ".join(map(str, found))
    largest = max(large, key=lambda each: useful_flops(every[each]))
    message = own[largest].message if largest in own else ""
    return f"too large here: {_predicted(every[largest], message, own.values())} a call"


def _predicted(workload: Workload, message: str, own: Iterable[Record]) -> str:
    """Time and memory of a call that was not tried.

    Where the run predicted no time, it is that of the largest smaller call that the implementation was timed at, times
    the ratio of their FLOPs; where it predicted no memory, it is what a call must read and write.
    """
    found = PREDICTED.search(message)
    memory = found[2] if found and found[2] else f"at least {show(compulsory_bytes(workload), 'bytes')}"
    if found:
        return f"{found[1]}, {memory}"

    def shape(each: Workload) -> dict[str, object]:
        return {axis: value for axis, value in each.axes().items() if axis not in SIZES}

    flops = {useful_flops(each.workload): each for each in own if each.samples(LATENCY)}
    alike = {number: each for number, each in flops.items() if shape(each.workload) == shape(workload)}
    smaller = [number for number in alike if number < useful_flops(workload)]
    if not smaller:
        return f"no time to go by, {memory}"
    median_s = statistics.median(sample.value for sample in alike[max(smaller)].samples(LATENCY))
    return f"about {show(median_s * useful_flops(workload) / max(smaller), 's')}, {memory}"


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
`sdpa`; a kind of layer counts as often as the model has it. `models.csv` has the mean of a layer, too. What takes
longer than {show(limit, "s")} a call, or reads and writes more than {show(LARGEST_BYTES, "bytes")}, is not tried: it is
too large here, with the predicted time and peak of one call. {counts}.

{markdown_table(table)}

Measured by `nox -s models` on {environment.cpu}, {environment.num_physical_cores} cores; {versions}. Seed
{results.plan.seed}; run `{results.run}`.
"""


def write(found: list[Row], path: Path) -> None:
    """The same as CSV, with the mean of a layer in seconds."""
    names = list(found[0].cells)
    columns = [f"{name}: {what}" for name in names for what in ("all layers", "mean of a layer, s")]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
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
    found = rows(results, every)
    to.mkdir(parents=True, exist_ok=True)
    (to / "README.md").write_text(page(results, found), encoding="utf-8")
    write(found, to / "models.csv")
    typer.echo(f"{to / 'README.md'} has {len(found)} points of {len({row.model for row in found})} models")


if __name__ == "__main__":
    typer.run(study)
