"""`python -m studies.scaling --to DIR`: strong and weak scaling of attention over ranks, checked before it is timed.

Times of ranks are those of the slowest, from when all are ready to when each has its own result; the whole call also
shares out the inputs and collects the output, and is shown next to it. Each rank has one thread, as one process has, so
that efficiency is one process's time / (ranks x time of the slowest). PyTorch's context parallelism is checked, too.
"""

import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

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
from studies.scaling.point import Point
from studies.scaling.theory import THEORY, bytes_sent

MASKS = ("none", "causal")
DIRECTIONS = ("inference", "forward_backward")
CONTEXT_PARALLEL = "context_parallel"
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


def measured(kind: str, name: str, made: Implementation, workload: Workload, num_calls: int) -> Point:
    """Check the implementation, then call it so often."""
    point = Point(kind=kind, name=name, workload=workload)
    if reason := reason_against(made, workload):
        return replace(point, problem=reason)
    if problem := verdict(made, workload):
        return replace(point, problem=problem)
    case, calls_s, slowest_s, straggling_s, sent = (
        build(workload, made, place(draw_normal(workload, 0), workload)),
        [],
        [],
        [],
        0,
    )
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
    return replace(
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


def points(worlds: list[int], length: int, num_calls: int) -> Iterator[Point]:
    """Strong scaling shares out one length; weak scaling has as many tokens for each rank."""
    known = plugs("attnbench.implementations", "IMPLEMENTATION")
    for mask in MASKS:
        for direction in DIRECTIONS:
            for name in THEORY:
                solo_s = 0.0
                for kind in ("strong", "weak"):
                    for world_size in worlds:
                        tokens = length if kind == "strong" else length // max(worlds) * world_size
                        workload = Workload(
                            seq_len=tokens, num_kv_heads=4, mask=mask, direction=direction, world_size=world_size
                        )
                        point = measured(kind, name, known[name], workload, num_calls)
                        if world_size == 1:
                            solo_s = point.slowest_s
                        if not point.problem and solo_s:
                            work = 1 if kind == "strong" else world_size**2  # pairs grow with the square of the length
                            point = replace(point, efficiency=work * solo_s / (world_size * point.slowest_s))
                        yield point


def table(found: list[Point]) -> str:
    """A row for each point."""
    rows = []
    for each in found:
        point, theory = each.workload, ""
        if not each.problem:
            theory = "equal" if each.num_bytes == bytes_sent(each.name, point) else "DIFFERS"
        whole = [show(each.call_s, "s"), show(each.slowest_s, "s"), percent(each.efficiency)]
        rest = [show(each.straggling_s, "s"), f"{each.num_bytes:,}", theory]
        place_of = [each.kind, each.name, point.mask, point.direction, str(point.seq_len), str(point.world_size)]
        rows.append([*place_of, *([each.problem] + [MISSING] * 5 if each.problem else whole + rest)])
    return markdown_table([dict(zip(HEAD, row, strict=True)) for row in rows])


def of_pytorch(length: int) -> str:
    """What the check says of PyTorch's context parallelism with two ranks; unequal widths have its math backend."""
    made = plugs("attnbench.implementations", "IMPLEMENTATION")[CONTEXT_PARALLEL]
    rows = []
    for mask in MASKS:
        for direction in DIRECTIONS:
            for words, axes in {"usual": {}, "V != K": {"value_dim": 32}, "G < H": {"num_kv_heads": 4}}.items():
                workload = Workload(seq_len=length, mask=mask, direction=direction, world_size=2, **axes)  # type: ignore[arg-type]
                rows.append([mask, direction, words, verdict(made, workload) or "agrees"])
    return markdown_table([dict(zip(("mask", "direction", "sizes", "the check"), row, strict=True)) for row in rows])


def scaling(
    to: Annotated[Path, typer.Option(help="The folder to write scaling.md and scaling.png to.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, 1 first.")] = "1,2",
    length: Annotated[int, typer.Option(help="Tokens of strong scaling, and of the most ranks in weak scaling.")] = 512,
    num_calls: Annotated[int, typer.Option("--calls", help="Calls of each.")] = 9,
    pytorch_length: Annotated[
        int, typer.Option(help="Tokens for PyTorch's context parallelism; 0: leave it out.")
    ] = 16,
) -> None:
    """Measure, and write a table and a picture."""
    torch.set_num_threads(1)
    to.mkdir(parents=True, exist_ok=True)
    found = list(points([int(each) for each in ranks.split(",")], length, num_calls))
    made_of = f"PyTorch {torch.__version__}, gloo on one machine, one thread for each rank, float32, H=8 G=4 K=64"
    parts = [
        "# Attention over several ranks",
        f"{made_of}; medians of {num_calls} calls. It says nothing about GPUs, networks, or more ranks than are here.",
        NOTE,
        table(found),
    ]
    if pytorch_length:
        parts += ["## PyTorch's context_parallel, two ranks on the CPU", of_pytorch(pytorch_length)]
    (to / "scaling.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    draw([each for each in found if not each.problem], to / "scaling.png")


if __name__ == "__main__":
    typer.run(scaling)
