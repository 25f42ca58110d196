"""Hand out the shares of a plan to the hosts of a Ray cluster, and merge the results.

A host is a node with the resource `bench_slot`. Each share is a Ray task that holds this resource, and that Ray tries
again if its process or node is lost. All state is in the journals, so that the driver may be killed at any moment.

Source of the idea that a task holds a machine: Kernel Tuner, https://github.com/KernelTuner/kernel_tuner/pull/328.
"""

import json
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from attnbench.cluster.host import NAME, examine, measure
from attnbench.cluster.shares import finished, journal_path, kind_of, merge, split
from attnbench.devices import device
from attnbench.processes.execution import now
from attnbench.processes.sides import current_commit
from attnbench.storage.events import SCHEMA, Plan, RunFinished, RunStarted
from attnbench.storage.files import put
from attnbench.storage.journal import HOSTS, JOURNAL, events

SLOT = "bench_slot"
NO_HOST = (
    f"no node of the cluster has the resource {SLOT}: start each host that is to measure with "
    f"""ray start --address=HEAD:PORT --resources='{{"{SLOT}": 1}}'"""
)
NODES_EVERY_S = 5.0  # between queries of the list of nodes: they go to the head, not to the hosts
WAIT_S = 60.0  # without any host before open shares are given up
EXAMINED_S = 300.0  # for the self-examination of a host; a slower host is busy measuring, or gone
CONNECT_S = 10.0
ALLOWED = "auto (the cluster that this machine is part of), HOST:PORT or ray://HOST:PORT"


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ray, connected to a cluster.

    Raises:
        ValueError: ray is not installed, nothing answers at the address, or no node is a host.
    """
    try:
        import ray
    except ImportError:
        raise ValueError('a cluster needs Ray: install it with pip install "attnbench[cluster]"') from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        if address != "auto":
            host, _, port = address.removeprefix("ray://").rpartition(":")
            socket.create_connection((host, int(port)), timeout=CONNECT_S).close()  # Ray itself retries for minutes
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ValueError(f"no Ray cluster answers at {address} ({_first_line(error)}): give {ALLOWED}") from None
    try:
        if not hosts_of(ray):
            raise ValueError(NO_HOST)
        yield ray
    finally:
        ray.shutdown()


def hosts_of(ray: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - ray has no types of its own
    """Live nodes with a bench_slot, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get(SLOT)}


def examined(address: str) -> dict[str, list[dict[str, str]] | str]:
    """The findings of `attnbench doctor` on each host of a cluster, or why there are none, by address and id.

    Raises:
        ValueError: there is no ray, no cluster, or no host in it.
    """
    results: dict[str, list[dict[str, str]] | str] = {}
    with connected(address) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        tasks = {}
        for key, node in hosts_of(ray).items():
            there = NodeAffinitySchedulingStrategy(key, soft=False)
            work = ray.remote(examine).options(resources={SLOT: 1}, scheduling_strategy=there)
            tasks[f"{node['NodeManagerAddress']} ({key[:6]})"] = work.remote()
        for name, task in tasks.items():
            try:
                results[name] = json.loads(ray.get(task, timeout=EXAMINED_S))
            except (ray.exceptions.RayError, ValueError) as error:
                results[name] = _first_line(error)
    return results


def _first_line(error: Exception) -> str:
    cause = getattr(error, "cause", None) or error  # of an exception in a task, without its traceback
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def sweep(plan: Plan, folder: Path, address: str, note: Callable[[str], None]) -> None:
    """Start a run on a cluster in `folder`, or continue the one there, to its end.

    `note` receives messages about finished and lost shares.

    Raises:
        ValueError: no ray, no cluster, or no host; the message says what to do.
        OSError: the folder cannot be written.
    """
    with connected(address) as ray:
        folder.mkdir(parents=True, exist_ok=True)
        started = RunStarted(schema=SCHEMA, run=folder.name, time=now(), commit=current_commit(), plan=plan)
        if (path := folder / JOURNAL).exists():
            started = next(event for event in events(path) if isinstance(event, RunStarted))
        shares = split(plan, len(hosts_of(ray)))
        merge(folder, started, shares)  # allows to continue from here
        lost = None
        try:
            lost = measured(ray, folder, shares, note)
        finally:
            merge(folder, started, shares, lost)


def measured(ray: Any, folder: Path, shares: Mapping[str, Plan], note: Callable[[str], None]) -> dict[str, str]:  # noqa: ANN401 - as above
    """Measure the open shares of a run; return the reasons for those that no host could measure, by name."""
    names = {workload.device for plan in shares.values() for workload in plan.workloads}
    work = ray.remote(measure).options(
        resources={SLOT: 1},
        num_cpus=1,
        num_gpus=int(any(not device(name).is_host for name in names)),
        max_retries=2,
        retry_exceptions=True,
    )
    here = version("attnbench"), str(Path.cwd())
    is_open = [name for name in shares if finished(folder, name) is None]
    tasks = {work.remote(msgspec.json.encode(shares[name]), *here): name for name in is_open}
    lost, seen_s = dict[str, str](), time.monotonic()
    while tasks:
        if hosts_of(ray):
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > WAIT_S:
            lost |= dict.fromkeys(tasks.values(), f"no host was left for it, and none joined within {WAIT_S:g} s")
            break
        for task in ray.wait(list(tasks), num_returns=1, timeout=min(WAIT_S, NODES_EVERY_S))[0]:
            share = tasks.pop(task)
            try:
                host, journal = ray.get(task)
                keep(folder, share, host, journal)
            except (ray.exceptions.RayError, ValueError) as error:
                lost[share] = _first_line(error)
                continue
            note(f"{host} has finished share {share}: {len(tasks)} of {len(shares)} are left")
    for share, why in lost.items():
        note(f"share {share} is lost: {why}")
    return lost


def keep(folder: Path, share: str, host: str, journal: bytes) -> None:
    """Store the journal of a share.

    Raises:
        ValueError: the journal is damaged or unfinished, or from another kind of host than the others; it is not
            stored.
    """
    if not NAME.fullmatch(host):
        raise ValueError("its host has no valid name")
    known = sorted((folder / HOSTS).glob(f"*/*/{JOURNAL}"))
    path = journal_path(folder, host, share)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrived = put(path.with_name("arrived.jsonl"), journal)
    history = list(events(arrived))
    if not history or not isinstance(history[-1], RunFinished):
        raise ValueError(f"{host} sent an unfinished journal")
    kind, first = kind_of(history), kind_of(events(known[0]) if known else history)
    if kind != first:
        other = f"it is another kind of host ({kind}) than the first ({first})"
        raise ValueError(f"{host} takes no part: {other}; give it a run of its own")
    arrived.replace(path)
