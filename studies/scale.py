"""`python -m studies.scale`: what large journals, histories and sweeps cost, by real commands: CPU time and memory."""

import gzip
import json
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from attnbench.storage.events import (
    SCHEMA,
    ArmSamples,
    CellChecked,
    Event,
    Plan,
    RunFinished,
    RunStarted,
    VisitFinished,
    WorkerStarted,
)
from attnbench.storage.journal import JOURNAL, write
from attnbench.storage.records import (
    PROBE,
    Agreement,
    Arm,
    Environment,
    ProbeResult,
    Sample,
    Status,
    TensorError,
)
from attnbench.units import markdown_table
from attnbench.workloads.workload import Workload

ROOT = Path(__file__).parents[1]
NAMES = ("sdpa", "fused", "naive_loop")
ENVIRONMENT = Environment(
    cpu="Example CPU", cpu_capability="AVX2", num_physical_cores=2, num_logical_cores=2, memory_bytes=2**33,
    system="Linux", python="3.11", versions={"torch": "2.13.0"}, native_dtypes=(),
)  # fmt: skip
RIGHT = Agreement(
    oracle="float64",
    probes=(
        ProbeResult(
            probe="normal",
            tensors=(
                TensorError(
                    tensor="output", error=1e-7, allowed=1e-6, yardstick_error=4e-7, rounding_band=2e-7,
                    worst=(0, 0, 0, 0), expected=1.0, actual=1.0,
                ),
            ),
        ),
    ),
)  # fmt: skip
NUM_BLOCKS = 4
LIMIT_S = 200


class Cost(NamedTuple):
    """What a command took."""

    what: str
    needed: str
    cpu_s: float
    memory_bytes: int
    printed: str


def history(number: int, num_workloads: int, num_visits: int, draws: random.Random) -> list[Event]:
    """The events of one run: all cells right, so many visits of each workload, times that jitter by a percent."""
    workloads = [Workload(seq_len=64 * (1 + place), scope="attention") for place in range(num_workloads)]
    moment = f"2026-{1 + number // 600 % 12:02d}-{1 + number // 24 % 25:02d}T{number % 24:02d}:00:00+00:00"
    plan = Plan(
        sweep="made", workloads=tuple(workloads), implementations=NAMES, baseline=NAMES[0], metrics=("latency",),
        budget_s=60.0, call_limit_s=2.0, timeout_s=60.0, memory_limit_bytes=0,
    )  # fmt: skip
    made: list[Event] = [
        RunStarted(schema=SCHEMA, run=f"{number:06d}-made", time=moment, commit=f"{number:040x}", plan=plan),
        WorkerStarted(time=moment, environment=ENVIRONMENT),
    ]
    for workload in workloads:
        made += [CellChecked(workload=workload.id, implementation=n, status=Status.ok, agreement=RIGHT) for n in NAMES]
    arms = [*(Arm(implementation=name) for name in NAMES), Arm(implementation=NAMES[0]).as_control(), PROBE]
    start_s = 0.0
    for visit in range(num_visits):
        for workload in workloads:
            taken = []
            for slot, arm in enumerate(arms):
                usual_s = 1e-4 if arm == PROBE else workload.seq_len * 1e-5 * (1.0 + 0.3 * (slot % 3))
                samples = []
                for block in range(NUM_BLOCKS):
                    start_s += usual_s
                    value = usual_s * draws.gauss(1.0, 0.01)
                    samples.append(Sample(value, 4, 0, visit, block, slot, start_s, 0, 0.5))
                taken.append(ArmSamples(arm=arm, samples=tuple(samples)))
            made.append(VisitFinished(workload=workload.id, epoch=0, visit=visit, arms=tuple(taken), elapsed_s=start_s))
    made.append(RunFinished(time=moment, elapsed_s=start_s, reason="made"))
    return made


def made(run: Path, number: int, num_workloads: int, num_visits: int, draws: random.Random) -> None:
    """Make a run, in a process of its own: a command that starts from this one would seem to need as much memory."""
    run.mkdir(parents=True)
    child = os.fork()
    if not child:
        write(run / JOURNAL, history(number, num_workloads, num_visits, draws))
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise ValueError(f"{run} could not be made")
    draws.random()  # another one next time


def cost(what: str, needed: str, command: Sequence[str], folder: Path, code: int = 0) -> Cost:
    """What one command costs, as a process of its own; infinity seconds where it takes more than `LIMIT_S`.

    Raises:
        ValueError: it ended otherwise than it should.
    """
    process = subprocess.Popen(  # noqa: S603 - our own commands
        [sys.executable, "-P", *command],
        cwd=folder,
        env=os.environ | {"XDG_CACHE_HOME": str(folder / "caches"), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CPU, (LIMIT_S, LIMIT_S)),  # noqa: PLW1509 - no threads
    )
    assert process.stdout is not None
    printed = process.stdout.read().decode(errors="replace").strip()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode in {-signal.SIGXCPU, -signal.SIGKILL}:
        return Cost(what, needed, math.inf, used.ru_maxrss * 1024, printed)
    if process.returncode != code:
        raise ValueError(f"{what}: exit code {process.returncode}: {printed[-500:]}")
    return Cost(what, needed, used.ru_utime + used.ru_stime, used.ru_maxrss * 1024, printed)


def costs(folder: Path, *, large: bool) -> list[Cost]:
    """Every row of the table."""
    draws, found = random.Random(0), []
    runs = folder / "many" / "runs"
    for number in range(2000):
        made(runs / f"{number:06d}-made", number, 4, 3, draws)
    attnbench = ["-m", "attnbench"]
    for what, needed in (("history over 2,000 runs, cold", "20 s"), ("... when nothing changed", "5 s")):
        found.append(cost(what, needed, [*attnbench, "history", "--results", "many", "--json"], folder))
    for num_visits, needed in ((20_000, "8 s"),):
        run = folder / f"visits{num_visits}"
        made(run, 0, 20, num_visits // 20, draws)
        found.append(cost(f"report of {num_visits:,} visits", needed, [*attnbench, "report", str(run)], folder))
    full = folder / "full"
    full.mkdir()
    packed = ROOT / "results" / "gallery" / "full" / f"{JOURNAL}.gz"
    (full / JOURNAL).write_bytes(gzip.decompress(packed.read_bytes()))
    found.append(cost("report of the sweep with 1,416 cells", "10 s", [*attnbench, "report", str(full)], folder))
    reads = "import sys; from pathlib import Path; from attnbench.analysis.results import read; read(Path(sys.argv[1]))"
    sizes = [(100_000, "3 s, 300 MB"), *([(1_000_000, "30 s, 2 GB")] if large else [])]
    for num_visits, needed in sizes:
        run = folder / f"read{num_visits}"
        made(run, 0, 20, num_visits // 20, draws)
        found.append(cost(f"reading {num_visits:,} visits", needed, ["-c", reads, str(run)], folder))
    for name, values in (("10^9 combinations", list(range(1, 1001))), ("10^9 equal combinations", [8] * 1000)):
        sweep = folder / "sweep.toml"
        axes = "".join(f"{axis} = {json.dumps(values)}\n" for axis in ("seq_len", "batch_size", "num_heads"))
        sweep.write_text(f'summary = "large"\nleave_out = []\n[[grid]]\n{axes}', encoding="utf-8")
        plans = (
            "from attnbench.processes.planning import *\n"
            "try: print(len(plan(Selection(sweep='sweep.toml', implementations=('sdpa',))).workloads))\n"
            "except ValueError as error: print(error)"
        )
        found.append(cost(f"a sweep of {name}", "0.5 s, with the count", ["-c", plans], folder))
    return found


def scale(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/scale"),
    name: Annotated[str, typer.Option(help="The file's name.")] = "scale",
    *,
    large: Annotated[bool, typer.Option("--large", help="A million visits, too.")] = False,
) -> None:
    """Measure what large inputs cost, and write a table."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="attnbench-scale-") as folder:
        rows = [
            {
                "what": each.what,
                "CPU": f"{each.cpu_s:.1f} s" if math.isfinite(each.cpu_s) else f"over {LIMIT_S} s",
                "memory": f"{each.memory_bytes / 1e6:.0f} MB",
                "needed": each.needed,
            }
            for each in costs(Path(folder), large=large)
        ]
    to.mkdir(parents=True, exist_ok=True)
    text = markdown_table(rows)
    (to / f"{name}.md").write_text(f"{text}\n", encoding="utf-8")
    typer.echo(text)


if __name__ == "__main__":
    typer.run(scale)
