"""Hand out the shares of a plan to the hosts of a Ray cluster; nothing here reads or writes files.

A host is a node with the resource `bench_slot`. Each share is a Ray task that occupies this resource. If a task
fails, Ray repeats it at most twice.

Source of the idea that a task occupies a machine: Kernel Tuner, https://github.com/KernelTuner/kernel_tuner/pull/328.
"""

import json
import logging
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from attnbench.cluster.host import examine, measure
from attnbench.devices import device
from attnbench.storage.events import Plan

SLOT = "bench_slot"
NO_HOST = (
    f"no node of the cluster has the resource {SLOT}: start each host that is to measure with "
    f"""ray start --address=HEAD:PORT --resources='{{"{SLOT}": 1}}'"""
)
NODES_EVERY_S = 5.0  # seconds between queries of the list of nodes; a query disturbs only the head node, and no host
WAIT_S = 60.0  # seconds without any host after which open shares are given up
EXAMINED_S = 300.0  # time limit of `attnbench doctor` on a host, in seconds; a slower host is busy measuring, or gone
CONNECT_S = 10.0  # time limit of the connection to a cluster, in seconds
ALLOWED = "auto (the cluster that this machine is part of), HOST:PORT or ray://HOST:PORT"


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Provide the module ray, which is connected to the cluster at `address` (see ALLOWED) inside the context.

    Raises:
        ValueError: ray is not installed, nothing answers at the address, or no node is a host.
    """
    try:
        import ray
    except ImportError:
        raise ValueError("a cluster needs Ray: pip install -e '.[cluster]' in the checkout") from None
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
    """Return Ray's descriptions of the hosts, which are live nodes with a bench_slot, by node id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get(SLOT)}


def examined(address: str) -> dict[str, list[dict[str, str]] | str]:
    """Run `attnbench doctor` on every host; return each host's findings, or its error message, by "ADDRESS (ID)".

    Raises:
        ValueError: ray is not installed, no cluster answers, or the cluster has no host.
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
    cause = getattr(error, "cause", None) or error  # the cause of an exception in a task has no traceback in its text
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)


def measured(ray: Any, plans: Mapping[str, Plan]) -> Iterator[tuple[str, str, bytes | str]]:  # noqa: ANN401 - ray has no types of its own
    """Measure named plans, each on one host; yield a tuple (name, host, journal) for each plan.

    If a plan could not be measured, the tuple is (name, "", reason).
    """
    names = {workload.device for plan in plans.values() for workload in plan.workloads}
    work = ray.remote(measure).options(
        resources={SLOT: 1},
        num_cpus=1,
        num_gpus=int(any(not device(name).is_host for name in names)),
        max_retries=2,
        retry_exceptions=True,
    )
    here = version("attnbench"), str(Path.cwd())
    tasks = {work.remote(msgspec.json.encode(plan), *here): share for share, plan in plans.items()}
    seen_s = time.monotonic()
    while tasks:
        if hosts_of(ray):
            seen_s = time.monotonic()
        elif time.monotonic() - seen_s > WAIT_S:
            why = f"no host was left for it, and none joined within {WAIT_S:g} s"
            yield from ((share, "", why) for share in tasks.values())
            return
        for task in ray.wait(list(tasks), num_returns=1, timeout=min(WAIT_S, NODES_EVERY_S))[0]:
            share = tasks.pop(task)
            try:
                yield share, *ray.get(task)
            except (ray.exceptions.RayError, ValueError) as error:
                yield share, "", _first_line(error)
