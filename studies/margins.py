"""`python -m studies.margins`: distance of honest code from the limits, on every kind of processor available.

Each seed draws a small workload and two kinds of input, answered by every bundled implementation that needs no
compiler. A separate process, with one or two threads, does so for each instruction set that PyTorch can be limited to.
Rerun the command to resume.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pandas as pd
import torch
import typer

from attnbench import plugins
from attnbench.case import reason_against
from attnbench.checking.probes import VacuousError
from attnbench.checking.reference import UncheckableError, ask, errors, reference_for_probe
from attnbench.contract import Implementation
from attnbench.contract.loading import implementation
from attnbench.units import markdown_table
from attnbench.workloads.workload import Workload
from studies import frame
from studies.frame import Piece, Row

CAPABILITIES = ("default", "avx2", "avx512")
THREADS = (1, 2)
CLOSEST = ("dtype", "tensor", "implementation", "workload", "probe")
MOST_SHARE = 0.5
"""Honest code may use at most this share of a limit."""
DTYPES = ("float32", "float32", "bfloat16", "float16", "float64")
MASKS = ("none", "causal", "causal", "padding", "window(15,0)")
SIZES = ((1, 64, 2, 64), (2, 64, 4, 16), (2, 96, 2, 32), (1, 131, 4, 16), (1, 160, 2, 32), (2, 13, 4, 8))
"""Batch rows, tokens, heads, width."""
CONTEXTS = (None, None, 40, 2048)
"""Numbers of keys; None for as many as queries. Masks need as many."""
PROBES = ("normal", "equal", "large", "shifted")
"""One of these is tried along with needles, which come nearest to a limit."""
SKIPPED = ("context_parallel",)
"""It needs a GPU for each rank."""


class Margin(msgspec.Struct, frozen=True):
    """One implementation's errors in one tensor, as shares of the limits."""

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


def workload_of(seed: int) -> Workload:
    """Draw the workload of a seed; one in five has scope `module`."""
    draws = random.Random(seed)
    batch_size, seq_len, num_heads, head_dim = draws.choice(SIZES)
    scope = draws.choice(("attention",) * 4 + ("module",))
    mask, kv_len = draws.choice(MASKS), draws.choice(CONTEXTS)
    return Workload(
        batch_size=batch_size,
        seq_len=seq_len,
        num_heads=num_heads,
        num_kv_heads=draws.choice((num_heads, num_heads // 2)),
        head_dim=head_dim,
        dtype=draws.choice(DTYPES),
        mask="none" if kv_len else mask,
        kv_len=kv_len or seq_len,
        direction="forward_backward",
        scope=scope,
        seed=seed,
    )


def margins_of(seed: int, every: dict[str, Implementation], place: tuple[str, int]) -> Iterator[Margin]:
    """Measure every implementation with one seed."""
    workload = workload_of(seed)
    for probe in ("needles", PROBES[seed % len(PROBES)]):
        try:
            reference = reference_for_probe(workload, probe, seed)
        except VacuousError:
            continue
        for name, tried in every.items():
            reference.workload = msgspec.structs.replace(workload, world_size=2) if tried.distributes else workload
            if reason_against(tried, reference.workload) is not None:
                continue
            try:
                observed = ask(tried, reference).compared
            except UncheckableError:
                continue
            for each in errors(observed, reference):
                kind = "weights" if each.tensor.endswith(" weights") else each.tensor
                peak = each.error / each.allowed if each.error is not None and each.allowed else float("inf")
                rms = each.rms / each.allowed_rms if each.rms is not None and each.allowed_rms else float("inf")
                yield Margin(*place, seed, workload.id, probe, name, workload.dtype, kind, peak, rms)


def measure(to: Path, seeds: int, place: tuple[str, int]) -> None:
    """Measure the seeds that are missing at one place."""
    torch.set_num_threads(place[1])
    found = {name: implementation(name) for name in plugins.stems(plugins.PACKAGE) if name not in SKIPPED}
    every = {name: each for name, each in found.items() if not each.compiles}

    def make(seed: int) -> list[Row]:
        return [msgspec.to_builtins(each) for each in margins_of(seed, every, place)]

    frame.complete([Piece(name=f"{place[0]} {place[1]}", make=make, size=seeds)], to)


def capabilities() -> list[str]:
    """List the instruction sets that PyTorch can be limited to here, up to its own choice."""
    here = torch.backends.cpu.get_cpu_capability().lower()
    return list(CAPABILITIES[: CAPABILITIES.index(here) + 1]) if here in CAPABILITIES else ["default"]


def main(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/margins"),
    seeds: Annotated[int, typer.Option(min=1, help="Seeds for each instruction set and number of threads.")] = 300,
    only: Annotated[str, typer.Option(metavar="NAME,N", help="One instruction set and number of threads.")] = "",
) -> None:
    """Find the largest share of a limit that honest code uses; exit 1 above one half."""
    if only:
        name, _, number = only.partition(",")
        measure(to, seeds, (name, int(number)))
        return
    rows = []
    for capability, threads in product(capabilities(), THREADS):
        settings = {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}
        again = [sys.executable, "-m", "studies.margins", "--to", str(to), "--seeds", str(seeds)]
        subprocess.run(  # noqa: S603 - this very program
            [*again, "--only", f"{capability},{threads}"], env=os.environ | settings, check=True
        )
        rows += frame.rows(to, f"{capability} {threads}")
    worst = write(pd.DataFrame(rows), to, seeds)
    typer.echo(json.dumps({"closest": round(worst, 3), "seeds": seeds, "written to": str(to)}))
    raise typer.Exit(int(worst > MOST_SHARE))


def write(margins: pd.DataFrame, to: Path, seeds: int) -> float:
    """Write the table of every implementation and dtype, and a page; return the largest share."""
    places = ["capability", "threads"]
    margins["share"] = margins[["largest", "rms"]].max(axis=1)
    table = margins.loc[margins.groupby(["implementation", "dtype"])["share"].idxmax()].round({"largest": 3, "rms": 3})
    columns = ["implementation", "dtype", "tensor", "probe", *places, "seed", "largest", "rms"]
    table[columns].to_csv(to / "margins.csv", index=False)
    of_place = margins.groupby(places)[["largest", "rms"]].max().reset_index()
    numbers = margins.groupby(places)["seed"].nunique()
    of_kind = margins.loc[margins.groupby(["dtype", "tensor"])["share"].idxmax()]
    beyond = margins[margins["share"] > MOST_SHARE].sort_values("share", ascending=False)
    about = (
        f"{numbers.min()} to {numbers.max()} of {seeds} seeds for each instruction set and number of threads: "
        "`python -m studies.margins`. Errors as shares of their limits (checking/tolerance.py); "
        "[every implementation](margins.csv).\n"
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
    """Format a row of a table: some columns, and the shares."""
    shares = {"largest error": f"{row['largest']:.2f}", "RMS error": f"{row['rms']:.2f}"}
    return {name: str(row[name]) for name in columns} | shares


if __name__ == "__main__":
    typer.run(main)
