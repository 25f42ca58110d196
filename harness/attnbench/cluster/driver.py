"""Hand out the shares of a plan to the hosts of a Ray cluster, and merge the results.

A host is a node with the resource `bench_slot`; a task there holds it, with all processors and GPUs of the node. Each
share is measured by one host, into a journal of its own. All hosts of a run are of one kind: that of the first host to
finish a share. The state of the driver is on disk, so it may be killed at any moment.

Source of the idea that a task holds a machine: Kernel Tuner, https://github.com/KernelTuner/kernel_tuner/pull/328.
"""

import fcntl
import json
import logging
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from attnbench.cluster.host import NAME, Answer, examine, is_finished, measure
from attnbench.cluster.merge import finished, journal_path, merge
from attnbench.cluster.shares import Share, split
from attnbench.processes.sides import current_commit
from attnbench.processes.stages import now
from attnbench.storage import events
from attnbench.storage.events import SCHEMA, Plan
from attnbench.storage.files import put
from attnbench.storage.journal import HOSTS, JOURNAL
from attnbench.storage.journal import events as read_events
from attnbench.units import plain

SLOT = "bench_slot"
LABEL = "attnbench-host"
"""The label of a node with the name of its host: `ray start --labels=attnbench-host=NAME`."""
NO_HOST = (
    f"no node of the cluster has the resource {SLOT}: start each host that is to measure with "
    f"""ray start --address=HEAD:PORT --resources='{{"{SLOT}": 1}}'"""
)
NODES_EVERY_S = 5.0
"""Seconds between queries of the list of nodes: they go to the head, not to the hosts."""
WAIT_S = 60.0
"""Seconds to wait for a first host before open shares are given up."""
MOST_TRIES = 3
"""A share during which this many hosts were lost may be the cause, and is not tried again."""
EXAMINED_S = 300.0
"""Seconds for the self-examination of a host; a slower host is busy measuring, or gone."""
DIVISION = "shares.json"
ACCELERATOR = "accelerator_type:"
"""Prefix of Ray's resource that names the accelerator of a node."""
NICENESS = ("RAY_worker_niceness", "0")
"""Ray gives its workers a niceness of 15, which lets all other processes of a host run before the measurement."""
LOCAL = re.compile(r"local:([1-9]\d?)")
REMOTE = re.compile(r"(?:ray://)?([\w.-]+):(\d{1,5})")
CONNECT_S = 10.0
LOCAL_MEMORY_BYTES = 80_000_000
"""The smallest object store that Ray allows on a node; messages are small."""
ALLOWED = "auto (the cluster that this machine is part of), HOST:PORT, ray://HOST:PORT, or local:N"


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """The module ray, connected to a cluster; a cluster local:N is started, and stopped afterwards.

    Raises:
        ValueError: ray is not installed, or nothing answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise ValueError('a cluster needs Ray: install it with pip install "attnbench[cluster]"') from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    local = LOCAL.fullmatch(address)
    cluster = _local(int(local[1])) if local else None
    try:
        if cluster is None and address != "auto":
            _require_listener(address)
        try:
            where = address if cluster is None else cluster.address
            ray.init(address=where, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"no Ray cluster answers at {address} ({reason}): give {ALLOWED}") from None
        try:
            yield ray
        finally:
            ray.shutdown()
    finally:
        if cluster is not None:
            cluster.shutdown()


def _require_listener(address: str) -> None:
    """Check the address within seconds; Ray retries for minutes.

    Raises:
        ValueError: it is not an address, or nothing listens there.
    """
    found = REMOTE.fullmatch(address)
    if found is None or address.startswith("local:"):
        raise ValueError(f"--cluster {address} is not allowed: give {ALLOWED}")
    try:
        socket.create_connection((found[1], int(found[2])), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at {address} ({error}): give {ALLOWED}") from None


def _local(number: int) -> Any:  # noqa: ANN401 - ray has no types of its own
    """A cluster of that many hosts on this machine, which take turns.

    Raises:
        ValueError: it cannot start.
    """
    from ray.cluster_utils import Cluster

    os.environ.setdefault(*NICENESS)
    cluster: Any = Cluster()
    try:
        for place in range(1, number + 1):
            cluster.add_node(
                resources={SLOT: 1},
                labels={LABEL: f"local-{place}"},
                num_cpus=1,
                include_dashboard=False,
                object_store_memory=LOCAL_MEMORY_BYTES,
            )
    except Exception as error:  # Ray raises no narrower type
        cluster.shutdown()
        reason = str(error).strip().partition(". ")[0]
        raise ValueError(f"no cluster of {number} nodes could start here: {reason}; stop other work") from error
    return cluster


def hosts_of(ray: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - ray has no types of its own
    """Live nodes with a bench_slot, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get(SLOT)}


def start(ray: Any, node: Mapping[str, Any], work: Callable[..., Any], *given: object) -> Any:  # noqa: ANN401 - as above
    """Start a task on a node; it holds its bench_slot and all processors and GPUs that Ray counts."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    has = node["Resources"]
    options = {"num_cpus": has.get("CPU", 0), "num_gpus": has.get("GPU", 0), "resources": {SLOT: 1}, "max_retries": 0}
    where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    return ray.remote(work).options(**options, scheduling_strategy=where).remote(*given)


def examined(address: str) -> dict[str, list[dict[str, str]] | str]:
    """The findings of `attnbench doctor` on each host of a cluster, or why there are none, by address and id.

    Raises:
        ValueError: there is no ray, no cluster, or no host in it.
    """
    found: dict[str, list[dict[str, str]] | str] = {}
    with connected(address) as ray:
        if not (nodes := hosts_of(ray)):
            raise ValueError(NO_HOST)
        tasks = {f"{node['NodeManagerAddress']} ({key[:6]})": start(ray, node, examine) for key, node in nodes.items()}
        for name, task in tasks.items():
            try:
                found[name] = json.loads(ray.get(task, timeout=EXAMINED_S))
            except (ray.exceptions.RayError, ValueError) as error:
                found[name] = _first_line(error)
    return found


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def sweep(plan: Plan, folder: Path, address: str, note: Callable[[str], None]) -> None:
    """Start a run on a cluster in `folder`, or continue the one there, to its end.

    `note` receives messages about finished shares and lost hosts.

    Raises:
        ValueError: no ray, no cluster, no host, or another process drives this run; the message says what to do.
        OSError: the folder cannot be written.
    """
    with connected(address) as ray:
        (folder / HOSTS).mkdir(parents=True, exist_ok=True)
        with (folder / HOSTS / "driver.lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ValueError(f"{folder} is being driven by another process: wait for its end, or stop it") from None
            Driver(ray, plan, folder, note).run()


@dataclass
class Driver:
    """One sweep over a cluster."""

    ray: Any
    plan: Plan
    folder: Path
    note: Callable[[str], None]
    refused: set[str] = field(default_factory=set)  # nodes that cannot take part
    tries: Counter[str] = field(default_factory=Counter)  # by share: failures, and hosts lost with it
    why: dict[str, str] = field(default_factory=dict)  # by share: the last failure
    begun: dict[str, str] = field(default_factory=dict)  # by share: the node that was lost with it
    shares: list[Share] = field(default_factory=list)
    left: dict[str, Share] = field(default_factory=dict)  # open shares by name
    division: dict[str, Any] = field(default_factory=dict)  # number of hosts at the start, and their kind

    def run(self) -> None:
        """Hand out shares until all are finished or lost."""
        self._divide()
        self.shares = split(self.plan, self.folder.name, self.division["at_once"])
        self.left = {share.name: share for share in self.shares if not finished(self.folder, share)}
        path = self.folder / JOURNAL
        first = next(iter(read_events(path))) if path.exists() else None
        if first is None:
            first = events.RunStarted(
                schema=SCHEMA, run=self.folder.name, time=now(), commit=current_commit(), plan=self.plan
            )
        assert isinstance(first, events.RunStarted)
        merge(self.folder, first, self.shares, {}, is_over=False)  # allows to continue from here
        try:
            self._measure()
        except BaseException:
            merge(self.folder, first, self.shares, {}, is_over=False)
            raise
        none = f"no host was left for it, and none joined within {WAIT_S:g} s"
        lost = {}
        for name in self.left:
            reasons = [self.why.get(name, ""), none if self.tries[name] < MOST_TRIES else ""]
            lost[name] = "; ".join(filter(None, reasons))
            self.note(f"share {name} is lost: {lost[name]}")
        merge(self.folder, first, self.shares, lost, is_over=True)

    def _divide(self) -> None:
        """Read the division of the run if there is one, since journals of hosts follow it; else create it."""
        path = self.folder / HOSTS / DIVISION
        if path.exists():
            try:
                found = json.loads(path.read_bytes())
                self.division = {"at_once": float(found["at_once"]), "kind": str(found.get("kind", ""))}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path} is damaged, or of another version ({error}): start a new run") from None
        elif number := len(hosts_of(self.ray)):
            self.division = {"at_once": number, "kind": ""}
            put(path, json.dumps(self.division))
        else:
            raise ValueError(NO_HOST)

    def _obstacle(self, answer: Answer, accelerators: Sequence[str]) -> str:
        """Why a host takes no part, or ""; the first host to finish a share sets the kind of all."""
        if answer.is_refused or not NAME.fullmatch(answer.host):
            return answer.error or "its name is none"
        kind = ", ".join([answer.kind, *(name.removeprefix(ACCELERATOR) for name in accelerators)])
        if not self.division["kind"] and answer.journal:
            self.division["kind"] = kind
            put(self.folder / HOSTS / DIVISION, json.dumps(self.division))
        if self.division["kind"] in {"", kind}:
            return ""
        return f"it is another kind of host ({kind}) than the first ({self.division['kind']}): give it a run of its own"

    def _measure(self) -> None:
        waits: dict[Any, tuple[str, Share]] = {}  # node and share of each task
        alone_s = time.monotonic()
        while any(self.tries[name] < MOST_TRIES for name in self.left):
            nodes = {key: node for key, node in hosts_of(self.ray).items() if key not in self.refused}
            for key in nodes.keys() - {node for node, _ in waits.values()}:
                at_work = {share.name for _, share in waits.values()}
                free = [name for name in self.left if name not in at_work and self.tries[name] < MOST_TRIES]
                begun_elsewhere = {name for name, where in self.begun.items() if where != key}  # comes last
                name = min(free, key=begun_elsewhere.__contains__, default=None)
                if name is not None:
                    asked, label = msgspec.json.encode(self.left[name]), nodes[key].get("Labels", {}).get(LABEL, "")
                    waits[start(self.ray, nodes[key], measure, asked, label)] = key, self.left[name]
            if nodes or waits:
                alone_s = time.monotonic()
            elif time.monotonic() - alone_s > WAIT_S:
                return
            if not waits:
                time.sleep(min(1.0, WAIT_S))
                continue
            for task in self.ray.wait(list(waits), num_returns=1, timeout=NODES_EVERY_S)[0]:
                self._take(task, *waits.pop(task))

    def _take(self, task: Any, node: str, share: Share) -> None:  # noqa: ANN401 - an ObjectRef
        """Keep the journal of a share, or note why there is none."""
        try:
            answer = msgspec.json.decode(self.ray.get(task), type=Answer)
        except self.ray.exceptions.RayError as error:
            self.begun[share.name] = node
            self._again(share, f"node {node[:8]} was lost while it measured this: {_first_line(error)}")
            return
        resources = hosts_of(self.ray).get(node, {}).get("Resources", {})
        has = sorted(name for name in resources if name.startswith(ACCELERATOR))
        if why := self._obstacle(answer, has):
            self.refused.add(node)
            self.note(f"{plain(answer.host)} takes no part: {why}")
            return
        if not answer.error:
            path = journal_path(self.folder, answer.host, share.name)
            path.parent.mkdir(parents=True, exist_ok=True)
            put(path, answer.journal)
            if is_finished(path):
                self.left.pop(share.name, None)
                done = len(self.shares) - len(self.left)
                self.note(f"{answer.host} has finished share {share.name}: {done} of {len(self.shares)}")
                if answer.niceness > os.nice(0):
                    advice = f"start Ray there with {'='.join(NICENESS)} in its environment"
                    self.note(f"warning: {answer.host} measures with niceness {answer.niceness}: {advice}")
                return
            path.unlink()
        self._again(share, f"on {answer.host}: {answer.error or 'its journal came damaged or unfinished'}")

    def _again(self, share: Share, why: str) -> None:
        """Count a failure; give up a share that has failed too often."""
        self.tries[share.name] += 1
        self.why[share.name] = why
        end = "is given up" if self.tries[share.name] >= MOST_TRIES else "is tried again"
        self.note(f"share {share.name} {end}: {why}")
