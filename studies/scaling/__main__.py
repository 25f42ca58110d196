"""`python -m studies.scaling --to DIR`: strong and weak scaling of attention over ranks, checked before it is timed.

Times of ranks are those of the slowest, from when all are ready to when each has its own result; the whole call also
shares out the inputs and collects the output, and is shown next to it. Each rank has one thread, as one process has, so
that efficiency is one process's time / (ranks x time of the slowest). Points are kept in DIR/parts as they come, so
that what was stopped goes on. About three minutes on two cores, which nothing else should use.
"""

import shutil
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer

from attnbench.checking.agreement import ask_oracle, check
from attnbench.checking.case import build, draw_normal, place, reason_against
from attnbench.contract import Implementation
from attnbench.contract.rank_group import group_of
from attnbench.plugins import plugs
from attnbench.units import MISSING, markdown_table, percent, show
from attnbench.workloads.workload import Workload
from studies.scaling.chart import draw
from studies.scaling.point import Point, Scaled
from studies.scaling.theory import THEORY, bytes_sent

MASKS = ("none", "causal")
DIRECTIONS = ("inference", "forward_backward")
KINDS = ("strong", "weak")
FOLDER = "parts"
NOTE = """Efficiency is the time of one process / (ranks x time of the slowest rank); in weak scaling for as many pairs.
The whole call includes sharing out the inputs and collecting the output through shared memory."""
HEAD = (
    "scaling",
    "implementation",
    "mask",
    "direction",
    "T",
    "ranks",
    "whole call",
    "slowest rank",
    "efficiency",
    "straggling",
    "bytes sent",
    "theory",
)


def measured(name: str, made: Implementation, workload: Workload, num_calls: int) -> Point:
    """Check the implementation, then call it so often."""
    point = Point(name=name, workload=workload)
    if problem := reason_against(made, workload) or verdict(made, workload):
        return msgspec.structs.replace(point, problem=problem)
    case = build(workload, made, place(draw_normal(workload, 0), workload))
    calls_s, slowest_s, straggling_s, sent = [], [], [], 0
    group = group_of(workload.world_size, "cpu")
    with case.grad_mode():
        call = case.call()
        call()
        for _ in range(num_calls):
            group.reports.clear()
            start = time.perf_counter()
            call()
            calls_s.append(time.perf_counter() - start)
            if workload.world_size == 1:
                slowest_s.append(calls_s[-1])
                straggling_s.append(0.0)
                continue
            busy = [[rank.call_s - rank.waited_s for rank in each] for each in group.reports]
            slowest_s.append(sum(max(rank.call_s for rank in each) for each in group.reports))
            straggling_s.append(sum(max(each) - min(each) for each in busy))
            sent = sum(rank.bytes_sent for each in group.reports for rank in each)
    return msgspec.structs.replace(
        point,
        call_s=statistics.median(calls_s),
        slowest_s=statistics.median(slowest_s),
        straggling_s=statistics.median(straggling_s),
        num_bytes=sent,
    )


def verdict(made: Implementation, workload: Workload) -> str:
    """What is wrong with it, or ""."""
    try:
        found = check(ask_oracle(workload, 0), made)
    except Exception as error:  # noqa: BLE001 - whatever somebody's code raises is a finding
        return f"error: {(str(error).splitlines() or [type(error).__name__])[0]}"
    return "" if found.agrees else f"disagrees: {found.diagnosis}"


def planned(worlds: Sequence[int], length: int) -> list[tuple[str, str, Workload]]:
    """Kind, implementation and workload: strong scaling shares out one length, weak has as many tokens for each rank.

    With the most ranks both are the same.
    """
    found = []
    for mask in MASKS:
        for direction in DIRECTIONS:
            for name in THEORY:
                for kind in KINDS:
                    for world_size in worlds:
                        tokens = length if kind == "strong" else length // max(worlds) * world_size
                        workload = Workload(
                            seq_len=tokens, num_kv_heads=4, mask=mask, direction=direction, world_size=world_size
                        )
                        found.append((kind, name, workload))
    return found


def kept(folder: Path, name: str, made: Implementation, workload: Workload, num_calls: int) -> Point:
    """The point, measured unless it is there already."""
    file = folder / f"{name}-{workload.id}.json"
    if not file.exists():
        draft = file.with_suffix(".draft")
        draft.write_bytes(msgspec.json.encode(measured(name, made, workload, num_calls)))
        draft.rename(file)
    return msgspec.json.decode(file.read_bytes(), type=Point)


def scaled(kind: str, point: Point, solo: Point | None) -> Scaled:
    """The point with its efficiency, by the one of one rank."""
    if point.problem or solo is None or solo.problem:
        return Scaled(kind=kind, point=point)
    world_size = point.workload.world_size
    work = 1 if kind == "strong" else world_size**2  # pairs grow with the square of the length
    return Scaled(kind=kind, point=point, efficiency=work * solo.slowest_s / (world_size * point.slowest_s))


def table(found: Sequence[Scaled]) -> str:
    """A row for each point."""
    rows = []
    for each in found:
        point, workload = each.point, each.point.workload
        place_of = [each.kind, point.name, workload.mask, workload.direction]
        place_of += [str(workload.seq_len), str(workload.world_size)]
        if point.problem:
            rows.append([*place_of, point.problem, *[MISSING] * 5])
            continue
        theory = "equal" if point.num_bytes == bytes_sent(point.name, workload) else "DIFFERS"
        times = [show(point.call_s, "s"), show(point.slowest_s, "s"), percent(each.efficiency)]
        rows.append([*place_of, *times, show(point.straggling_s, "s"), f"{point.num_bytes:,}", theory])
    return markdown_table([dict(zip(HEAD, row, strict=True)) for row in rows])


def scaling(
    to: Annotated[Path, typer.Option(help="The folder to write scaling.md and scaling.png to.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, 1 first.")] = "1,2",
    length: Annotated[int, typer.Option(help="Tokens of strong scaling, and of the most ranks in weak scaling.")] = 512,
    num_calls: Annotated[int, typer.Option("--calls", help="Calls of each.")] = 9,
) -> None:
    """Measure, and write a table and a picture."""
    worlds = [int(each) for each in ranks.split(",")]
    if worlds[0] != 1:
        raise typer.BadParameter(f"--ranks {ranks}: efficiency is in proportion to one rank: begin with 1")
    torch.set_num_threads(1)
    folder = to / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    known = plugs("attnbench.implementations", "IMPLEMENTATION")
    found: list[Scaled] = []
    solo: Point | None = None
    for kind, name, workload in planned(worlds, length):
        point = kept(folder, name, known[name], workload, num_calls)
        solo = point if workload.world_size == 1 else solo
        found.append(scaled(kind, point, solo))
        print(f"{kind} {name} {workload.id}", file=sys.stderr, flush=True)  # noqa: T201 - progress
    made_of = f"PyTorch {torch.__version__}, gloo on one machine, one thread for each rank, float32, H=8 G=4 K=64"
    parts = [
        "# Attention over several ranks",
        f"{made_of}; medians of {num_calls} calls. It says nothing about GPUs, networks, or more ranks than are here.",
        NOTE,
        table(found),
    ]
    (to / "scaling.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    draw([each for each in found if not each.point.problem], to / "scaling.png")
    shutil.rmtree(folder)


if __name__ == "__main__":
    typer.run(scaling)
