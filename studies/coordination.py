"""What a coordinator costs, measured on journals that grow, and extrapolated to a size that nobody has run.

`python -m studies.hosts coordinator` writes the page. A coordinator decodes each visit that a host reports, appends it
to a journal and keeps its samples until the run ends; afterwards the journals are read and judged.
"""

import random
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from attnbench.analysis.comparisons import compared, comparisons
from attnbench.analysis.results import Results, read
from attnbench.cluster import driver
from attnbench.cluster.shares import split
from attnbench.storage import events
from attnbench.storage.events import Event, VisitFinished
from attnbench.storage.journal import JOURNAL, write
from attnbench.timing.schedule import State
from attnbench.units import markdown_table, show, significant
from studies import scale
from studies.simulated.cluster import NUM_LEASED, NUM_VISITS

SIZES = (100, 400, 1600)
"""Workloads of each run that is measured; each has a cell for each of three implementations, on one host."""
MANY_HOSTS, MANY_CELLS = 1000, 1_000_000
VISIT_S = 3.4
"""What a visit of the simulated hosts takes, on average: five arms, four blocks, calls of 0.2 s."""
MESSAGES = 1 + 2 / (NUM_LEASED * NUM_VISITS)
"""For each visit: its report, and its share of asking for a lease and of being given one."""
TEXT = """# What a coordinator costs

Nobody has run {hosts} hosts or {cells} cells with it: the last column continues straight lines from at most {measured}
cells, on one machine without a network. Connections, hosts that are lost, a disk that is slow and what Ray adds come on
top.

A cell is one implementation on one workload on one host, with {visits} visits of {blocks} blocks, which three
implementations share. Where each cell is measured on several hosts, there are as many times more of them.

{table}

- {hosts} hosts report {asked} visits a second ({rate}), each of {visit}; one core takes in {takes}.
- While a run is at work, its samples are kept in memory for the scheduler: {memory} for {cells} cells. What needs
  more than there is has to be split into several runs.
{over_ray}
Made by `python -m studies.hosts coordinator --to DIR`; times are processor time of one core, Ray's wall time.
"""
RAY = """- Ray {version} on one machine, medians of {calls} calls: an empty call to a host's actor takes {call} there
  and back, a share of {share} handed to it {handed}, a journal of {journal} fetched {fetched}, the list of
  nodes {nodes}; an actor answers {start} after it was asked for. `run --cluster` hands over and fetches once for
  each share on each host, and asks for the list every {every}.
"""
NUM_CALLS, NUM_LARGE = 200, 20
LIMIT_S = 120.0
"""An actor that has not answered for so long will not."""
T = TypeVar("T")


class Echo:
    """An actor that costs nothing by itself."""

    def take(self, given: bytes) -> int:
        """How many bytes it was given."""
        return len(given)

    def give(self, number: int) -> bytes:
        """So many bytes."""
        return bytes(number)


class RayCost(NamedTuple):
    """What Ray takes on this machine for what the driver of a sweep asks of it, as wall time."""

    version: str
    start_s: float  # from asking for a host's actor until it answers
    call_s: float  # an empty call and its answer
    handed_s: float  # a share, and an empty answer
    fetched_s: float  # an empty call, and a journal
    nodes_s: float
    share_bytes: int
    journal_bytes: int


class Cost(NamedTuple):
    """What one run of some size costs a coordinator."""

    num_cells: int
    num_visits: int
    journal_bytes: int
    message_bytes: int  # of the reports of visits alone, as they cross the network
    at_work_bytes: int  # what it holds while the run is at work
    taken_s: float  # decoding all reports, and adding them to what it holds
    read_bytes: int  # what it holds when the run was read
    read_s: float
    judged_s: float


def held(make: Callable[[], T]) -> tuple[T, int]:
    """What a call returns, and how many bytes more are held afterwards."""
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    made = make()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return made, after - before


def timed(make: Callable[[], T]) -> tuple[T, float]:
    """What a call returns, and the processor time that it took."""
    began_s = time.process_time()
    made = make()
    return made, time.process_time() - began_s


def cost(num_workloads: int, folder: Path) -> Cost:
    """Of a run with so many workloads, each visited as often as a host does."""
    history = scale.history(0, num_workloads, NUM_VISITS, random.Random(num_workloads))
    path = folder / str(num_workloads) / JOURNAL
    path.parent.mkdir()
    write(path, history)
    lines = [msgspec.json.encode(event) for event in history]
    decode = msgspec.json.Decoder(Event).decode

    def taken() -> State:
        state = State()
        for line in lines:
            state.apply(decode(line))
        return state

    def results() -> Results:
        return read(path.parent)

    state, taken_s = timed(taken)
    del state
    state, at_work_bytes = held(taken)
    del state
    found, read_s = timed(results)
    del found
    found, read_bytes = held(results)
    _, judged_s = timed(lambda: comparisons(found))
    comparisons.cache_clear()
    compared.cache_clear()
    visits = [len(line) for line, event in zip(lines, history, strict=True) if isinstance(event, VisitFinished)]
    return Cost(
        num_cells=sum(isinstance(event, events.CellChecked) for event in history),
        num_visits=len(visits),
        journal_bytes=path.stat().st_size,
        message_bytes=sum(visits),
        at_work_bytes=at_work_bytes,
        taken_s=taken_s,
        read_bytes=read_bytes,
        read_s=read_s,
        judged_s=judged_s,
    )


def over_ray(journal_bytes: int) -> RayCost | None:
    """What Ray adds, on a cluster of one node that is started for it; None where Ray is not installed."""
    if find_spec("ray") is None:
        return None
    with driver.connected("local:1") as ray:

        def typical(number: int, ask: Callable[[], object]) -> float:
            spent = []
            for _ in range(number):
                began_s = time.perf_counter()
                ray.get(ask(), timeout=LIMIT_S)
                spent.append(time.perf_counter() - began_s)
            return statistics.median(spent)

        (node,) = driver.hosts_of(ray).values()
        began_s = time.perf_counter()
        host = driver.start_actor(ray, node, "coordination")
        ray.get(host.ready.remote(), timeout=LIMIT_S)
        start_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        for _ in range(NUM_CALLS):
            driver.hosts_of(ray)
        nodes_s = (time.perf_counter() - began_s) / NUM_CALLS
        call_s = typical(NUM_CALLS, host.ready.remote)
        ray.kill(host)
        started = scale.history(0, NUM_LEASED, 1, random.Random(0))[0]
        assert isinstance(started, events.RunStarted)
        message = msgspec.json.encode(split(started.plan, "coordination", 0.25)[0])
        echo = ray.remote(Echo).options(num_cpus=0).remote()
        ray.get(echo.take.remote(b""), timeout=LIMIT_S)
        return RayCost(
            version=version("ray"),
            start_s=start_s,
            call_s=call_s,
            handed_s=typical(NUM_CALLS, lambda: echo.take.remote(message)),
            fetched_s=typical(NUM_LARGE, lambda: echo.give.remote(journal_bytes)),
            nodes_s=nodes_s,
            share_bytes=len(message),
            journal_bytes=journal_bytes,
        )


def slope(costs: Sequence[Cost], value: Callable[[Cost], float]) -> float:
    """By how much a value grows with each cell, by least squares: what is there without any cell is left out."""
    return float(np.polyfit([each.num_cells for each in costs], [value(each) for each in costs], 1)[0])


def rows(costs: Sequence[Cost]) -> list[dict[str, str]]:
    """Each cost at each size, for one cell, and for very many."""
    kinds: list[tuple[str, str, Callable[[Cost], float]]] = [
        ("messages", "", lambda cost: MESSAGES * cost.num_visits),
        ("bytes that cross the network", "bytes", lambda cost: cost.message_bytes),
        ("journal", "bytes", lambda cost: cost.journal_bytes),
        ("memory while the run is at work", "bytes", lambda cost: cost.at_work_bytes),
        ("processor time to take reports in", "s", lambda cost: cost.taken_s),
        ("memory when the run is read", "bytes", lambda cost: cost.read_bytes),
        ("processor time to read the journals", "s", lambda cost: cost.read_s),
        ("processor time of the verdicts", "s", lambda cost: cost.judged_s),
    ]
    made = []
    for what, unit, value in kinds:
        each = slope(costs, value)
        row = {"cost": what} | {f"{cost.num_cells:,} cells": _shown(value(cost), unit) for cost in costs}
        made.append(row | {"per cell": _shown(each, unit), f"{MANY_CELLS:,} cells": _shown(MANY_CELLS * each, unit)})
    return made


def _shown(value: float, unit: str) -> str:
    return show(value, unit) if unit else f"{value:,.0f}" if value >= 100 else significant(value, 3)  # noqa: PLR2004 - three digits


def page(costs: Sequence[Cost], ray: RayCost | None = None) -> str:
    """The table, with what it is worth before it, and what it means after it."""
    largest = costs[-1]
    asked, takes = MANY_HOSTS / VISIT_S, largest.num_visits / largest.taken_s
    rate = MANY_HOSTS / VISIT_S * largest.message_bytes / largest.num_visits
    memory = MANY_CELLS * slope(costs, lambda each: each.at_work_bytes)
    return TEXT.format(
        hosts=f"{MANY_HOSTS:,}",
        cells=f"{MANY_CELLS:,}",
        measured=f"{largest.num_cells:,}",
        visits=NUM_VISITS,
        blocks=scale.NUM_BLOCKS,
        table=markdown_table(rows(costs)),
        asked=f"{asked:,.0f}",
        rate=show(rate, "bytes"),
        visit=show(VISIT_S, "s"),
        takes=f"{takes:,.0f}",
        memory=show(memory, "bytes"),
        over_ray="" if ray is None else _of_ray(ray),
    )


def _of_ray(cost: RayCost) -> str:
    return RAY.format(
        version=cost.version,
        calls=NUM_CALLS,
        call=show(cost.call_s, "s"),
        share=show(cost.share_bytes, "bytes"),
        handed=show(cost.handed_s, "s"),
        journal=show(cost.journal_bytes, "bytes"),
        fetched=show(cost.fetched_s, "s"),
        nodes=show(cost.nodes_s, "s"),
        start=show(cost.start_s, "s"),
        every=show(driver.NODES_EVERY_S, "s"),
    )


def measure(sizes: Sequence[int] = SIZES) -> list[Cost]:
    """The costs at each size, of which none is 1."""
    with tempfile.TemporaryDirectory(prefix="attnbench-coordination-") as folder:
        cost(1, Path(folder))  # imports what judging needs
        return [cost(size, Path(folder)) for size in sizes]
