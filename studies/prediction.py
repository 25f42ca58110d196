"""`python -m studies.prediction --to DIR`: how well cells that were never run are predicted from a minute of others.

A calibration of a minute, then random workloads whose sizes are drawn independently of it, by the same stage: checked,
then visited in rounds, far more often, so that what is compared with is known better than what it is predicted from.
Wrong answers have no time and do not count. Times are of one thread, which is steadier than two on a small machine, and
freed memory is retained: the C library gives large blocks back at chance moments, and the same call then takes up to
twice as long. Predictions are made from the calibration alone; nothing of the unseen cells goes into them. Both runs
are kept below DIR, so that a study that was stopped goes on, and is judged again without being measured again.
"""

import csv
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import typer

from attnbench.analysis import calibration
from attnbench.analysis.results import Results, read
from attnbench.analysis.table import rows, table, workload_of
from attnbench.commands.running import watching
from attnbench.processes import execution
from attnbench.processes.planning import Selection, plan
from attnbench.storage.events import Plan, VisitFinished
from attnbench.storage.journal import JOURNAL, events
from attnbench.storage.records import PROBE
from attnbench.units import markdown_table, percent
from attnbench.workloads.counts import compulsory_bytes, dense_flops, useful_flops
from attnbench.workloads.workload import Workload

IMPLEMENTATIONS = ("sdpa", "sdpa_math", "fused", "bmm", "einsum", "sdpa_mask")
HALF = ("sdpa", "bmm")
"""Of bfloat16, only these."""
KINDS: list[dict[str, Any]] = [
    {"dtype": "float32", "direction": direction, "mask": mask}
    for direction in ("inference", "forward_backward")
    for mask in ("none", "causal")
] + [{"dtype": "bfloat16", "direction": "inference", "mask": "none"}]
LONGEST_S = 60.0
CELLS_S, MOST_ROUNDS = 300.0, 60
"""Of the unseen cells; they are visited as often as their time allows."""
NUM_WORKLOADS = 80
SEED = 6
"""Of the unseen cells; 1 to 5 are of earlier runs, by which times are now predicted."""
LEAST_S, MOST_S = 50e-6, 50e-3
LEAST_FLOPS, MOST_FLOPS = 6e6, 8e8
"""Of the products of one forward call: about 50 us, and about 50 ms forward and backward."""
LIMITS = {"time_median": 0.05, "time_95": 0.15, "memory": 0.01, "cells": 300}
COVERED = (0.85, 0.95)
CHANGED = (
    "What times and memory are fitted to, the rule of the intervals, which workloads a calibration runs, that freed "
    "memory is retained, and how often unseen cells are visited were changed with the results of earlier runs of this "
    "study in view, on other unseen workloads. Those here are of a seed that was set before any of them was measured."
)
"""What a reader must know of the design."""


def base(kind: dict[str, str], seed: int) -> Plan:
    """The plan of one kind, whose workloads are replaced."""
    settings = [f"{axis}={value}" for axis, value in kind.items()] + ["num_threads=1"]
    return plan(
        Selection(
            sweep="quick",
            settings=settings,
            is_exact=True,
            implementations=IMPLEMENTATIONS,
            call_limit_s=0.2,
            allocator="retain",
            seed=seed,
        )
    )


def with_few_halves(planned: Plan) -> Plan:
    """The same with bfloat16 for HALF alone."""
    halves = tuple(each.id for each in planned.workloads if each.dtype == "bfloat16")
    return msgspec.structs.replace(planned, left_out={name: halves for name in IMPLEMENTATIONS if name not in HALF})


def calibrating(seed: int = 1) -> Plan:
    """The calibration of all kinds."""
    plans = [base(kind, seed) for kind in KINDS]
    whole = msgspec.structs.replace(plans[0], workloads=tuple(each for own in plans for each in own.workloads))
    return with_few_halves(calibration.planned(whole, ["num_threads"]))


def unseen(seed: int, number: int = NUM_WORKLOADS) -> Iterator[Workload]:
    """Random workloads of all kinds in turns."""
    draws = random.Random(seed)
    for count in range(number):
        kind = KINDS[count % len(KINDS)]
        while True:
            lengths = [16 * max(2, round(math.exp(draws.uniform(math.log(32), math.log(1024))) / 16)) for _ in range(2)]
            queries, keys = lengths if draws.random() < 1 / 3 else lengths[:1] * 2
            batch, heads, width = (
                draws.choice((1, 2)),
                draws.choice((1, 2, 4, 6, 8, 12, 16)),
                draws.choice((32, 64, 128)),
            )
            if LEAST_FLOPS <= 4 * batch * heads * queries * keys * width <= MOST_FLOPS:
                break
        yield Workload(
            batch_size=batch, num_heads=heads, head_dim=width, seq_len=queries, kv_len=keys, num_threads=1, **kind
        )


def held_out(seed: int = SEED) -> Plan:
    """The unseen cells, by the same stage."""
    planned = msgspec.structs.replace(
        calibrating(seed),
        workloads=tuple(dict.fromkeys(unseen(seed))),
        budget_s=CELLS_S,
        num_rounds=MOST_ROUNDS,
        stages=(*calibration.STAGES, "metrics", "ceilings"),
    )
    return with_few_halves(planned)


def measure(planned: Plan, folder: Path) -> Results:
    """Run a plan, or go on with it; read it."""
    if not ((folder / JOURNAL).exists() and read(folder).elapsed_s is not None):
        with watching() as watch:
            execution.execute(planned, folder, watch)
    return read(folder)


def probe_s(folder: Path) -> float:
    """The median time of the interference probe in a run: how fast the machine was."""
    visits = (event for event in events(folder / JOURNAL) if isinstance(event, VisitFinished))
    return float(np.median([sample.value for visit in visits for sample in visit.samples(PROBE)]))


def judged(known: Results, found: Results) -> list[dict[str, Any]]:
    """A row for each unseen cell: measured, predicted, and what the roofline says."""
    predictor = calibration.load([known.folder])
    seen = {(row["workload"], row["implementation"]) for row in rows(table(known))}
    made = []
    for row in rows(table(found)):
        workload, name = workload_of(row), row["implementation"]
        if row["status"] != "ok" or row["latency_s"] is None or (row["workload"], name) in seen:
            continue
        if not LEAST_S <= row["latency_s"] <= MOST_S:
            continue
        prediction = predictor.predict(workload, name)
        if prediction is None:
            continue
        ceilings = found.ceilings.get(workload.place)
        roofline = None
        if (
            ceilings is not None
            and ceilings.matmul is not None
            and ceilings.copy(compulsory_bytes(workload)) is not None
        ):
            copy = ceilings.copy(compulsory_bytes(workload))
            assert copy is not None
            roofline = max(useful_flops(workload) / ceilings.matmul.rate, compulsory_bytes(workload) / copy.rate)
        made.append(
            {
                "workload": row["workload"], "implementation": name, "dtype": workload.dtype,
                "direction": workload.direction, "mask": workload.mask, "measured_s": row["latency_s"],
                "measured_low_s": row["latency_low_s"], "measured_high_s": row["latency_high_s"],
                "num_visits": row["num_visits"],
                "predicted_s": prediction.seconds, "low_s": prediction.low, "high_s": prediction.high,
                "roofline_s": roofline, "measured_bytes": row["peak_memory_bytes"],
                "predicted_bytes": prediction.peak_bytes, "is_extrapolated": prediction.is_extrapolated,
            }
        )  # fmt: skip
    return made


def summary(made: list[dict[str, Any]]) -> dict[str, float]:
    """Each figure that has a limit, and the roofline's next to it."""
    times = np.array([abs(row["predicted_s"] / row["measured_s"] - 1) for row in made])
    memory = np.array([abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in made])
    rooflines = np.array([abs(row["roofline_s"] / row["measured_s"] - 1) for row in made if row["roofline_s"]])
    unsure = [(row["measured_high_s"] - row["measured_low_s"]) / 2 / row["measured_s"] for row in made
              if row["measured_low_s"] is not None]  # fmt: skip
    inside = [row["low_s"] <= row["measured_s"] <= row["high_s"] for row in made]
    return {
        "cells": len(made),
        "time_median": float(np.median(times)),
        "time_95": float(np.quantile(times, 0.95)),
        "measured_median": float(np.median(unsure)) if unsure else math.nan,
        "measured_95": float(np.quantile(unsure, 0.95)) if unsure else math.nan,
        "memory_median": float(np.median(memory)),
        "memory_95": float(np.quantile(memory, 0.95)),
        "memory_within": float(np.mean(memory <= LIMITS["memory"])),
        "coverage": float(np.mean(inside)),
        "roofline_median": float(np.median(rooflines)) if len(rooflines) else math.nan,
    }


def _range(values: list[int]) -> str:
    return f"{min(values)} to {max(values)}"


def markdown(made: list[dict[str, Any]], known: Results, found: Results) -> str:
    """The page: each limit, met or missed, first."""
    seen = summary(made)
    low, high = COVERED
    limits = [
        ("unseen cells", f"at least {LIMITS['cells']}", str(int(seen["cells"])), seen["cells"] >= LIMITS["cells"]),
        ("error of times, median", f"at most {percent(LIMITS['time_median'])}", percent(seen["time_median"]),
         seen["time_median"] <= LIMITS["time_median"]),
        ("error of times, 95th percentile", f"at most {percent(LIMITS['time_95'])}", percent(seen["time_95"]),
         seen["time_95"] <= LIMITS["time_95"]),
        ("error of memory, 95th percentile", f"at most {percent(LIMITS['memory'])}", percent(seen["memory_95"]),
         seen["memory_95"] <= LIMITS["memory"]),
        ("90 % intervals cover", f"{percent(low)} to {percent(high)}", percent(seen["coverage"]),
         low <= seen["coverage"] <= high),
        ("calibration", f"at most {LONGEST_S:g} s", f"{known.elapsed_s or math.nan:.1f} s",
         (known.elapsed_s or math.inf) <= LONGEST_S),
    ]  # fmt: skip
    missed = [what for what, _, _, is_met in limits if not is_met]
    answer = "Every limit is met." if not missed else f"Missed: {'; '.join(missed)}."
    table_of = markdown_table(
        [
            {"what": what, "limit": limit, "here": here, "": "met" if is_met else "missed"}
            for what, limit, here, is_met in limits
        ]
    )
    by_family: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in made:
        by_family.setdefault((row["implementation"], row["dtype"], row["direction"]), []).append(row)
    parts = []
    for (name, dtype, direction), own in by_family.items():
        part = summary(own)
        named = {"implementation": name, "dtype": dtype, "direction": direction, "cells": str(len(own))}
        figures = {"median error": "time_median", "95th percentile": "time_95", "measured to": "measured_median",
                   "covered": "coverage"}  # fmt: skip
        shown = {heading: percent(part[figure]) for heading, figure in figures.items()}
        parts.append(named | shown | {"peaks to 1 %": percent(part["memory_within"])})
    each = markdown_table(parts)
    speed = probe_s(found.folder) / probe_s(known.folder)
    cells = f"{len(made)} cells that were never run, in {(found.elapsed_s or math.nan):.0f} s"
    calibrated = f"{len(known.records)} cells of a calibration of {(known.elapsed_s or math.nan):.0f} s"
    environment = next(iter(known.environments.values()))
    workloads, visits = found.plan.workloads, [row["num_visits"] for row in made]
    heads = [each.batch_size * each.num_heads for each in workloads]
    lengths, widths = [each.seq_len for each in workloads], [each.head_dim for each in workloads]
    flops = [dense_flops(msgspec.structs.replace(each, direction="inference")) for each in workloads]
    return "\n\n".join(
        [
            "# Times and memory of cells that were never run",
            answer,
            table_of,
            (f"Predicted from {calibrated}, and compared with {cells}, on {environment.cpu} with one thread and "
            f"freed memory retained (torch {environment.versions['torch']}). The roofline alone, from ceilings "
            f"measured among them, is off by {percent(seen['roofline_median'])} in the median. "
            f"{percent(seen['memory_within'])} of the peaks are predicted to 1 %, half of them to "
            f"{percent(seen['memory_median'])}."),
            (f"The measured times are no truth, either: their 95 % intervals, from {min(visits)} visits or more, reach "
            f"{percent(seen['measured_median'])} to either side in the median and {percent(seen['measured_95'])} at "
            "the 95th percentile."),
            (f"The interference probe took {speed:.3f} times as long while the unseen cells were measured as during "
            f"the calibration; nothing is scaled by it. Workloads have {_range(heads)} heads in all rows, lengths "
            f"of {_range(lengths)}, widths of {_range(widths)}, up to {max(flops):.1e} FLOPs forward; cells whose "
            f"measured time is outside {LEAST_S * 1e6:g} us to {MOST_S * 1e3:g} ms do not count. Of bfloat16 there are "
            f"{' and '.join(HALF)}, in inference without a mask."),
            CHANGED,
            "![Measured and predicted times](prediction.png)",
            each,
            "Made by `python -m studies.prediction --to DIR`.",
        ]
    ) + "\n"  # fmt: skip


def draw(made: list[dict[str, Any]], file: Path) -> None:
    """Measured against predicted times on log scales, and how the errors are distributed."""
    from matplotlib.figure import Figure

    from attnbench.reports import style

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name in IMPLEMENTATIONS:
        own = [row for row in made if row["implementation"] == name]
        look = style.look(name)
        dot: dict[str, Any] = {"linestyle": "", "marker": look.marker, "color": look.colour, "markersize": 4}
        left.loglog([r["measured_s"] for r in own], [r["predicted_s"] for r in own], label=name, **dot)
    ends = [LEAST_S, MOST_S]
    left.loglog(ends, ends, color="black", linewidth=0.8)
    left.set(xlabel="measured (s)", ylabel="predicted (s)", title=f"{len(made)} cells that were never run")
    left.legend(fontsize=8)
    errors = np.sort([abs(row["predicted_s"] / row["measured_s"] - 1) for row in made])
    rooflines = np.sort([abs(row["roofline_s"] / row["measured_s"] - 1) for row in made if row["roofline_s"]])
    for values, label in ((errors, "calibration"), (rooflines, "roofline alone")):
        right.plot(100 * values, np.arange(1, len(values) + 1) / max(len(values), 1), label=label)
    for limit, line, what in (("time_median", "--", "median"), ("time_95", ":", "95th percentile")):
        right.axvline(100 * LIMITS[limit], color="gray", linewidth=0.8, linestyle=line, label=f"limit of the {what}")
    right.set(xscale="log", xlabel="error of the time (%)", ylabel="share of cells", title="Distribution of the error")
    right.legend(fontsize=8)
    figure.savefig(file, dpi=120)


def main(
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Where the study is kept.")],
    seed: Annotated[int, typer.Option(help="Of the unseen cells.")] = SEED,
) -> None:
    """Calibrate, measure unseen cells, and compare."""
    known = measure(calibrating(), to / "calibration")
    found = measure(held_out(seed), to / "unseen")
    made = judged(known, found)
    with (to / "prediction.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, made[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(
            {name: f"{value:.5g}" if isinstance(value, float) and name != "measured_bytes" else value
             for name, value in row.items()}
            for row in made
        )  # fmt: skip
    draw(made, to / "prediction.png")
    page = markdown(made, known, found)
    (to / "prediction.md").write_text(page, encoding="utf-8")
    typer.echo(page)


if __name__ == "__main__":
    typer.run(main)
