"""Measure how close the errors of right implementations come to their tolerances: `python -m studies.margins`.

Workloads are those of `attnbench check`, for functions and modules. A seed selects a workload and its random inputs.
Every probe (kind of input) goes to each implementation that supports the workload and needs no compiler: the bundled
ones, except those in SKIPPED, and Llama's module. Implementations over several ranks run on fewer seeds. A place is a
CPU instruction set for PyTorch, with one thread or two, and has a process of its own. Each seed belongs to one place;
the seeds of a workload usually belong to different places. Rerun the command to resume.
"""

import json
import os
import subprocess
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pandas as pd
import torch
import typer

from attnbench import plugins
from attnbench.case import reason_against
from attnbench.checking.reference import References, apply_empty_row_convention, call_candidate
from attnbench.contract import Implementation
from attnbench.contract.loading import implementation
from attnbench.processes.planning import apply_axes, build_plan
from attnbench.units import markdown_table
from attnbench.workloads.workload import Workload
from studies import frame
from studies.frame import Piece, Row

CAPABILITIES = ("default", "avx2", "avx512")
THREADS = (1, 2)
CLOSEST = ("dtype", "tensor", "implementation", "workload", "probe")
MOST_SHARE = 0.5
"""Largest error that a right implementation may have, as a share of the error's limit; above it the study fails."""
LLAMA = Path(__file__).with_name("llama.py")
"""File of a module that applies the rotary embedding itself, as most language models do."""
SKIPPED = ("context_parallel",)
"""Implementations that are left out: this one needs a GPU for each rank."""
REFUSED = "pack_vnni2 is only supported when avx512 is supported"
"""Error of SDPA in bfloat16 (torch 2.13) on a processor with AMX, if PyTorch is limited to older instruction sets."""
SEEDS_PER_RANKS = 4
"""Implementations over several ranks are slow: they are called only on one of this many seeds of a place."""


class Margin(msgspec.Struct, frozen=True):
    """The largest and the RMS error of one implementation in one tensor, each divided by its limit."""

    capability: str
    threads: int
    seed: int
    workload: str
    probe: str
    implementation: str
    dtype: str
    tensor: str
    largest: float
    rms: float


def planned() -> tuple[dict[str, Implementation], list[tuple[Workload, list[str]]]]:
    """Return the implementations by name, and pairs (workload, names of the implementations to call on it).

    The workloads are those of the default check, and their copies in scope `module`. On a copy that the default check
    does not have itself, only bundled implementations are called.
    """
    names = [name for name in plugins.stems(plugins.PACKAGE) if name not in SKIPPED]
    specs = [*names, f"{LLAMA}:llama"] if find_spec("transformers") else names
    plan = build_plan("check", settings=["device=cpu"], implementations=specs, with_baseline=False)
    every = {plugins.name_of(spec): implementation(spec) for spec in specs}
    every = {name: each for name, each in every.items() if not each.compiles}
    cells = dict[str, tuple[Workload, list[str]]]()
    own = {workload.id for workload in plan.workloads}
    for workload in [*plan.workloads, *apply_axes(plan.workloads, {"scope": "module"})]:
        able = every if workload.id in own else names
        asked = [name for name in every if name in able and workload.id not in plan.left_out.get(name, ())]
        plain = msgspec.structs.replace(workload, dropout=0.0)
        cells.setdefault(plain.id, (plain, asked))
    return every, list(cells.values())


def margins_of(
    seed: int, cell: Workload, every: Mapping[str, Implementation], place: tuple[str, int]
) -> Iterator[Margin]:
    """Yield the margins of the implementations `every` at the workload `cell`, with inputs drawn from the seed.

    `place` is an instruction set and a number of threads.
    """
    workload = msgspec.structs.replace(cell, seed=seed)
    for probe, reference in References(workload, seed).by_probe.items():
        for name, tried in every.items():
            reference.workload = msgspec.structs.replace(workload, world_size=2) if tried.distributes else workload
            if reason_against(tried, reference.workload) is not None:
                continue
            try:
                observed, _ = apply_empty_row_convention(call_candidate(tried, reference), reference)
            except Exception as error:
                if REFUSED not in str(error):
                    raise
                continue
            for name_of_tensor, tensor in observed.compared.items():
                if name_of_tensor not in reference.expected:
                    continue
                each = reference.tolerances[name_of_tensor].judge(tensor)
                kind = "weights" if each.tensor.endswith(" weights") else each.tensor
                peak = each.error / each.allowed if each.error is not None and each.allowed else float("inf")
                rms = each.rms / each.allowed_rms if each.rms is not None and each.allowed_rms else float("inf")
                yield Margin(*place, seed, cell.id, probe, name, workload.dtype, kind, peak, rms)


def measure(to: Path, seeds: int, place: tuple[str, int], first: int, step: int) -> None:
    """Measure the seeds of one place that are not stored yet: every `step`-th seed, starting with `first`.

    `place` is an instruction set and a number of threads. All places together have `seeds` seeds, but at least one for
    each workload.
    """
    torch.set_num_threads(place[1])
    every, cells = planned()
    own = range(first, max(seeds, len(cells)), step)

    def make(number: int) -> list[Row]:
        seed = own[number]
        cell, names = cells[(seed + seed // len(cells)) % len(cells)]
        has_ranks = number % SEEDS_PER_RANKS == 0
        asked = {name: every[name] for name in names if has_ranks or not every[name].distributes}
        return [msgspec.to_builtins(each) for each in margins_of(seed, cell, asked, place)]

    frame.complete([Piece(name=f"{place[0]} {place[1]}", make=make, size=len(own))], to)


def capabilities() -> list[str]:
    """List the instruction sets that ATEN_CPU_CAPABILITY can select on this CPU, up to PyTorch's own choice."""
    here = torch.backends.cpu.get_cpu_capability().lower()
    return list(CAPABILITIES[: CAPABILITIES.index(here) + 1]) if here in CAPABILITIES else ["default"]


def main(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/margins"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds in all; at least one for each cell.")] = 300,
    only: Annotated[str, typer.Option(metavar="NAME,N,I,P", help="One set, N threads: the Ith of P places.")] = "",
) -> None:
    """Find the largest error of honest code, as a share of its limit; exit with 1 if it is above one half."""
    if only:
        name, threads, first, step = only.split(",")
        measure(to, seeds, (name, int(threads)), int(first), int(step))
        return
    rows, places = [], list(product(capabilities(), THREADS))
    for number, (capability, count) in enumerate(places):
        settings = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(count), "OMP_WAIT_POLICY": "PASSIVE"}
        again = [sys.executable, "-m", "studies.margins", "--to", str(to), "--seeds", str(seeds)]
        subprocess.run(  # noqa: S603 - this very program
            [*again, "--only", f"{capability},{count},{number},{len(places)}"], env=os.environ | settings, check=True
        )
        rows += frame.rows(to, f"{capability} {count}")
    worst = write(pd.DataFrame(rows), to, seeds)
    typer.echo(json.dumps({"closest": round(worst, 3), "seeds": seeds, "written to": str(to)}))
    raise typer.Exit(int(worst > MOST_SHARE))


def write(margins: pd.DataFrame, to: Path, seeds: int) -> float:
    """Write margins.csv (implementations), cells.csv (workloads) and margins.md; return the largest share."""
    places = ["capability", "threads"]
    margins["share"] = margins[["largest", "rms"]].max(axis=1)
    table = margins.loc[margins.groupby(["implementation", "dtype"])["share"].idxmax()].round({"largest": 3, "rms": 3})
    columns = ["implementation", "dtype", "tensor", "probe", *places, "seed", "largest", "rms"]
    table[columns].to_csv(to / "margins.csv", index=False)
    of_cell = margins.loc[margins.groupby("workload")["share"].idxmax()].round({"largest": 3, "rms": 3})
    of_cell[["workload", *columns]].to_csv(to / "cells.csv", index=False)
    of_place = margins.groupby(places)[["largest", "rms"]].max().reset_index()
    numbers = margins.groupby(places)["seed"].nunique()
    of_kind = margins.loc[margins.groupby(["dtype", "tensor"])["share"].idxmax()]
    beyond = margins[margins["share"] > MOST_SHARE].sort_values("share", ascending=False)
    about = (
        f"{margins['seed'].nunique()} seeds ({seeds} asked for) on {len(of_cell)} cells, those of `attnbench check`, "
        f"with {numbers.min()} to {numbers.max()} seeds for each instruction set and number of threads: "
        "`python -m studies.margins`. Errors as shares of their limits (checking/tolerance.py); "
        "[every implementation](margins.csv) and [every cell](cells.csv).\n"
    )
    lines = [
        "# How near honest code comes to a limit\n",
        about,
        markdown_table([_row(row, ("capability", "threads")) for row in of_place.to_dict("records")]),
        f"\n## Failing: above {MOST_SHARE:g}\n",
        markdown_table([_row(row, CLOSEST) for row in beyond.to_dict("records")]) if len(beyond) else "None.",
        "\n## The closest of each kind\n",
        markdown_table([_row(row, CLOSEST) for row in of_kind.to_dict("records")]),
    ]
    frame.save(to / "margins.md", "\n".join(lines) + "\n")
    return float(margins["share"].max())


def _row(row: dict[Hashable, Any], columns: Sequence[str]) -> dict[str, str]:
    """Format a row of a table: the given columns, then the largest and the RMS error as shares of their limits."""
    shares = {"largest error": f"{row['largest']:.2f}", "RMS error": f"{row['rms']:.2f}"}
    return {name: str(row[name]) for name in columns} | shares


if __name__ == "__main__":
    typer.run(main)
