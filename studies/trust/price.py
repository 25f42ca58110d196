"""`python -m studies.trust.price`: what isolation costs: errors on identical code, a small slowdown, a quick sweep.

Each session is a run of its own, with the candidate in a file: in a process of its own, and in the shared one.
"""

import csv
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import read
from attnbench.processes.execution import execute
from attnbench.processes.planning import build_plan
from attnbench.storage.records import Verdict

SOURCE = """
from torch.nn.functional import scaled_dot_product_attention as sdpa


def same(query, key, value, mask):
    return sdpa(query, key, value, attn_mask=mask)


def slower(query, key, value, mask):
    sdpa(query[:, :1], key[:, :1], value[:, :1], attn_mask=mask)
    return sdpa(query, key, value, attn_mask=mask)
"""
NUM_HEADS = 20
"""`slower` computes one head twice: a twentieth more."""
SETTINGS = (f"num_heads={NUM_HEADS}", "head_dim=64", "seq_len=256", "mask=none", "scope=attention", "dtype=float32")
ISOLATIONS = ("process", "shared")
AA_S, SLOWDOWN_S = 10.0, 15.0


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """What a run said of the candidate."""

    candidate: str
    isolation: str
    number: int
    ratio: float
    half_width: float
    verdict: str
    num_processes: int
    took_s: float


def price(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/trust"),
    num_sessions: Annotated[int, typer.Option("--sessions", help="Of each kind.")] = 20,
) -> None:
    """Measure what isolation costs, and write price.md and price.csv."""
    rows = []
    for number in range(num_sessions):
        for candidate, budget_s in (("same", AA_S), ("slower", SLOWDOWN_S)):
            for isolation in ISOLATIONS:
                rows.append(session(candidate, isolation, number, budget_s))
                typer.echo(msgspec.json.encode(rows[-1]).decode(), err=True)
    sweeps = {isolation: quick(isolation) for isolation in ISOLATIONS}
    to.mkdir(parents=True, exist_ok=True)
    with (to / "price.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(Session.__struct_fields__)
        writer.writerows(msgspec.structs.astuple(row) for row in rows)
    (to / "price.md").write_text(table(rows, sweeps), encoding="utf-8")
    typer.echo(table(rows, sweeps))


def session(candidate: str, isolation: str, number: int, budget_s: float) -> Session:
    """One run of `sdpa` against the candidate."""
    with tempfile.TemporaryDirectory(prefix="attnbench-price-") as name:
        folder = Path(name)
        (folder / "mine.py").write_text(SOURCE, encoding="utf-8")
        selection = build_plan(
            sweep="quick",
            settings=(*SETTINGS, "direction=inference", "batch_size=1", "num_threads=1"),
            is_exact=True,
            implementations=("sdpa", f"{folder / 'mine.py'}:{candidate}"),
            budget_s=budget_s,
            metrics=("latency",),
            seed=number,
            isolation=isolation,
        )
        execute(selection, folder / "run", lambda _: None, stages=("check", "time"))
        results = read(folder / "run")
        (found,) = comparisons(results)
        (record,) = (each for each in results.records if each.implementation == candidate)
        assert found.ratio is not None
        epochs = {sample.epoch for sample in record.measurements[0].samples}
        return Session(
            candidate=candidate,
            isolation=isolation,
            number=number,
            ratio=found.ratio,
            half_width=(found.high or found.ratio) / found.ratio - 1,
            verdict=str(found.verdict),
            num_processes=len(epochs),
            took_s=results.elapsed_s or 0.0,
        )


def quick(isolation: str) -> tuple[float, int, int]:
    """Seconds of a quick sweep with one function from a file, and how many of its comparisons are decided."""
    with tempfile.TemporaryDirectory(prefix="attnbench-price-") as name:
        folder = Path(name)
        (folder / "mine.py").write_text(SOURCE, encoding="utf-8")
        names = ("sdpa", "fused", "naive_loop", "module_list", "einsum", f"{folder / 'mine.py'}:same")
        execute(build_plan(sweep="quick", implementations=names, isolation=isolation), folder / "run", lambda _: None)
        results = read(folder / "run")
        found = comparisons(results)
        decided = sum(each.verdict is not Verdict.undecided for each in found)
        return results.elapsed_s or 0.0, decided, len(found)


def table(rows: list[Session], sweeps: dict[str, tuple[float, int, int]]) -> str:
    """The figures in Markdown."""
    lines = ["| | process of its own | shared process |", "| --- | --- | --- |"]

    def add(what: str, candidate: str, show: Callable[[list[Session]], str]) -> None:
        cells = [[row for row in rows if (row.candidate, row.isolation) == (candidate, each)] for each in ISOLATIONS]
        lines.append(f"| {what} | {' | '.join(map(show, cells))} |")

    large = "the largest of 19 in 20"
    add(
        "how far the ratio of identical code is from 1: median",
        "same",
        lambda own: f"{100 * statistics.median(error(row) for row in own):.2f} %",
    )
    add(f"... {large}", "same", lambda own: f"{100 * at(sorted(map(error, own)), 0.95):.2f} %")
    add("... called faster or slower", "same", lambda own: share(own, {"faster", "slower"}))
    add("... processes in each session", "same", lambda own: f"{statistics.median(row.num_processes for row in own):g}")
    add("a twentieth more work: called slower", "slower", lambda own: share(own, {"slower"}))
    add("... median ratio", "slower", lambda own: f"{statistics.median(row.ratio for row in own):.3f}")
    add(
        "... seconds to the verdict: median",
        "slower",
        lambda own: f"{statistics.median(row.took_s for row in own):.1f}",
    )
    add(f"... {large}", "slower", lambda own: f"{at(sorted(row.took_s for row in own), 0.95):.1f}")
    took = [f"{sweeps[each][0]:.0f} s, {sweeps[each][1]} of {sweeps[each][2]} decided" for each in ISOLATIONS]
    lines.append(f"| a quick sweep with one function from a file | {' | '.join(took)} |")
    return "\n".join(lines) + "\n"


def error(row: Session) -> float:
    """How far from 1 the ratio is."""
    return abs(row.ratio - 1)


def at(values: list[float], share: float) -> float:
    """The sorted value below which that share of them lies."""
    return values[min(len(values) - 1, int(share * len(values)))]


def share(rows: list[Session], verdicts: set[str]) -> str:
    """How many of the sessions have one of the verdicts."""
    return f"{sum(row.verdict in verdicts for row in rows)} of {len(rows)}"


if __name__ == "__main__":
    typer.run(price)
