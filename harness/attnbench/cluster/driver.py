"""Hand out the shares of a plan to the hosts of a Ray cluster, and merge what they measured.

A host is a node with the resource `bench_slot`; its actor holds that, so that no other actor is there. While hosts
measure, the driver sleeps: it wakes when a share ends or a host is lost, and looks for new hosts now and then. All that
it knows is on disk, in the folder of the run or on the hosts, so that it may be killed at any moment.

Source of the idea that an actor holds a machine: Kernel Tuner, https://github.com/KernelTuner/kernel_tuner/pull/328.
"""

import fcntl
import logging
import math
import os
import re
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from attnbench.cluster.host import NAME, Answer, Host, Known
from attnbench.cluster.merge import HOSTS, finished, journal_path, merge
from attnbench.cluster.shares import Share, split
from attnbench.processes.sides import current_commit
from attnbench.processes.stages import now
from attnbench.storage import events
from attnbench.storage.events import SCHEMA, Plan
from attnbench.storage.files import put
from attnbench.storage.journal import JOURNAL
from attnbench.storage.journal import events as read_events

SLOT = "bench_slot"
LABEL = "attnbench-host"
"""The label of a node that names its host: `ray start --labels=attnbench-host=NAME`."""
NO_HOST = (
    f"no node of the cluster has the resource {SLOT}: start each host that is to measure with "
    f"""ray start --address=HEAD:PORT --resources='{{"{SLOT}": 1}}'"""
)
BUSY_S = 30.0
"""A host whose actor has not started for so long is busy with other work of the cluster, which is said."""
NODES_EVERY_S = 10.0
"""So often the driver asks the head, and no host, which nodes there are."""
WAIT_S = 60.0
"""Where no host is left, so long one may join before what is open is lost."""
MOST_TRIES = 3
"""A share with which so many hosts or their actors were lost may be the reason, and is given to no other."""
MOST_DEATHS = 5
"""Of the actors of one node, which then takes no part any more."""
MERGE_EVERY_S = 60.0
SHARES = "shares.json"
NICENESS = ("RAY_worker_niceness", "0")
"""Ray gives its workers a niceness of 15, with which whatever else runs on a host goes before what is measured."""
LOCAL = re.compile(r"local:([1-9]\d?)")
REMOTE = re.compile(r"(?:ray://)?([\w.-]+):(\d{1,5})")
CONNECT_S = 10.0
LOCAL_MEMORY_BYTES = 80_000_000
"""Of each node's object store, the least that Ray allows: messages are small."""
ALLOWED = "auto (the cluster that this machine is part of), HOST:PORT, ray://HOST:PORT, or local:N"


@dataclass
class Node:
    """A node that measures, and what it is doing."""

    actor: Any
    name: str = ""  # of its host; empty until it has said
    share: Share | None = None
    held: dict[str, bool] = field(default_factory=dict)
    asked_s: float = field(default_factory=time.monotonic)


@contextmanager
def connected(address: str) -> Iterator[Any]:
    """Within: the module ray, connected to a cluster; one with local:N is started, and ended afterwards.

    Raises:
        ValueError: ray is not installed, or nobody answers at the address.
    """
    try:
        import ray
    except ImportError:
        raise ValueError('a cluster needs Ray: install it with pip install "attnbench[cluster]"') from None
    logging.getLogger("ray").setLevel(logging.ERROR)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if (local := LOCAL.fullmatch(address)) is not None:
        with _local(int(local[1])) as own:
            ray.init(address=own, **quiet)
            try:
                yield ray
            finally:
                ray.shutdown()
        return
    if address != "auto":
        _require_listener(address)
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"no Ray cluster answers at {address} ({reason}): give {ALLOWED}") from None
    try:
        yield ray
    finally:
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Check in seconds what Ray tries for minutes.

    Raises:
        ValueError: it is no address, or nobody listens there.
    """
    found = REMOTE.fullmatch(address)
    if found is None or address.startswith("local:"):
        raise ValueError(f"--cluster {address} is not allowed: give {ALLOWED}")
    try:
        socket.create_connection((found[1], int(found[2])), timeout=CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ValueError(f"no Ray cluster answers at {address} ({error}): give {ALLOWED}") from None


@contextmanager
def _local(number: int) -> Iterator[str]:
    """A cluster of so many hosts on this machine, which take turns; its address."""
    from ray.cluster_utils import Cluster

    os.environ.setdefault(*NICENESS)
    node: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": LOCAL_MEMORY_BYTES}
    cluster: Any = Cluster()
    try:
        try:
            for place in range(1, number + 1):
                cluster.add_node(resources={SLOT: 1}, labels={LABEL: f"local-{place}"}, **node)
        except Exception as error:  # Ray raises no other
            reason = str(error).strip().partition(". ")[0]
            raise ValueError(f"no cluster of {number} nodes could start here: {reason}; stop other work") from error
        yield cluster.address
    finally:
        cluster.shutdown()


def start_actor(ray: Any, node: Mapping[str, Any], run: str) -> Any:  # noqa: ANN401 - ray has no types of its own
    """The actor of a node, which holds its bench_slot and all its processors and GPUs, as far as Ray counts them."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    has = node["Resources"]
    label = node.get("Labels", {}).get(LABEL, "")
    return (
        ray.remote(Host)
        .options(
            num_cpus=has.get("CPU", 0),
            num_gpus=has.get("GPU", 0),
            resources={SLOT: 1},
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        )
        .remote(run, label if NAME.fullmatch(label) else "")
    )


def hosts_of(ray: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - likewise
    """The nodes that are alive and have a bench_slot, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get(SLOT)}


def sweep(plan: Plan, folder: Path, address: str, note: Callable[[str], None]) -> None:
    """Start a run on a cluster in `folder`, or go on with the one that is there, to its end.

    `note` is given in words who joined, what was finished and who was lost.

    Raises:
        ValueError: no ray, no cluster, no host, or another process drives this run; the message says what to do.
        OSError: the folder cannot be written.
    """
    with connected(address) as ray:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_driver(folder):
            Driver(ray, plan, folder, note).run()


@contextmanager
def _only_driver(folder: Path) -> Iterator[None]:
    (folder / HOSTS).mkdir(exist_ok=True)
    with (folder / HOSTS / "driver.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"{folder} is being driven by another process: wait for its end, or stop it") from None
        yield


class Driver:
    """One sweep over a cluster."""

    def __init__(self, ray: Any, plan: Plan, folder: Path, note: Callable[[str], None]) -> None:  # noqa: ANN401
        """Read what is finished already."""
        self.ray, self.folder, self.note = ray, folder, note
        self.nodes: dict[str, Node] = {}
        self.refused: set[str] = set()  # nodes that cannot take part
        self.deaths = Counter[str]()  # of the actors of a node
        self.waits: dict[Any, str] = {}  # what is waited for, and the node that it comes from
        self.tries: dict[str, int] = {}
        self.failed: set[tuple[str, str]] = set()  # a share, and a host on which it ended with an error
        self.why: dict[str, str] = {}  # what happened last to a share that is open
        self.lost: dict[str, str] = {}
        self.begun: dict[str, str] = {}  # the host that began a share and was lost with it
        self._merged_s = time.monotonic()
        self.started = self._started(plan)
        self.shares = self._shares(plan)
        self.open = [share for share in self.shares if finished(folder, share) is None]

    def _started(self, plan: Plan) -> events.RunStarted:
        path = self.folder / JOURNAL
        if path.exists():
            first = next(iter(read_events(path)))
            assert isinstance(first, events.RunStarted)
            return first
        return events.RunStarted(schema=SCHEMA, run=self.folder.name, time=now(), commit=current_commit(), plan=plan)

    def _shares(self, plan: Plan) -> list[Share]:
        """Those that the run began with, however many hosts there are now: hosts have journals of them."""
        path = self.folder / HOSTS / SHARES
        if path.exists():
            number = msgspec.json.decode(path.read_bytes(), type=int)
        else:
            number = len(hosts_of(self.ray))
            if not number:
                raise ValueError(NO_HOST)
            put(path, msgspec.json.encode(number))
        shares = split(plan, self.folder.name, number)
        merge(self.folder, self.started, shares, {}, is_over=False)  # so that it can be gone on with from here
        return shares

    def run(self) -> None:
        """Hand out shares until each is finished or lost."""
        alone_s, looked_s = time.monotonic(), -NODES_EVERY_S
        try:
            while self.open:
                if time.monotonic() - looked_s >= NODES_EVERY_S or not self.waits:
                    self._look_for_hosts()
                    looked_s = time.monotonic()
                self._hand_out()
                if self.waits:
                    alone_s = time.monotonic()
                    done, _ = self.ray.wait(list(self.waits), num_returns=1, timeout=NODES_EVERY_S)
                    for each in done:
                        self._take(each)
                elif time.monotonic() - alone_s > WAIT_S:
                    none = f"no host was left for it, and none joined within {WAIT_S:g} s"
                    for share in self.open:
                        self._give_up(share, "; ".join(filter(None, [self.why.get(share.name), none])))
                else:
                    time.sleep(min(1.0, WAIT_S))
                if time.monotonic() - self._merged_s > MERGE_EVERY_S:
                    self._merge(is_over=False)
        except BaseException:
            self._merge(is_over=False)
            raise
        finally:
            for node in self.nodes.values():
                with suppress(Exception):  # its host may be gone
                    self.ray.kill(node.actor)
        self._merge(is_over=True)

    def _merge(self, *, is_over: bool) -> None:
        merge(self.folder, self.started, self.shares, self.lost, is_over=is_over)
        self._merged_s = time.monotonic()

    def _look_for_hosts(self) -> None:
        for key, found in hosts_of(self.ray).items():
            if key not in self.nodes and key not in self.refused:
                node = self.nodes[key] = Node(actor=start_actor(self.ray, found, self.folder.name))
                self.waits[node.actor.known.remote()] = key

        for key, node in self.nodes.items():
            if not node.name and time.monotonic() - node.asked_s > BUSY_S:
                node.asked_s = math.inf
                self.note(f"node {key[:8]} does not begin yet: other work of the cluster has its {SLOT} or processors")

    def _hand_out(self) -> None:
        """One share to each host that waits for one."""
        for key, node in self.nodes.items():
            if node.name and node.share is None and (share := self._next(node)) is not None:
                node.share = share
                self.waits[node.actor.measure.remote(msgspec.json.encode(share))] = key

    def _next(self, node: Node) -> Share | None:
        """What a host is given: what it has begun, then what nobody has, then what a lost host had begun."""
        taken = {each.share.name for each in self.nodes.values() if each.share is not None}
        others = {each.name for each in self.nodes.values()} - {node.name, ""}
        free = [each for each in self.open if each.name not in taken and (each.name, node.name) not in self.failed]

        def rank(share: Share) -> int:
            if share.name in node.held or self.begun.get(share.name) == node.name:
                return 0
            holders = {each.name for each in self.nodes.values() if share.name in each.held} & others
            if holders or self.begun.get(share.name) in others:
                return 3
            return 2 if share.name in self.begun else 1

        return min((share for share in free if rank(share) < 3), key=rank, default=None)  # noqa: PLR2004 - see rank

    def _take(self, ended: Any) -> None:  # noqa: ANN401 - an ObjectRef
        """What has come from a host, or that it was lost."""
        key = self.waits.pop(ended)
        node = self.nodes[key]
        try:
            text = self.ray.get(ended)
        except self.ray.exceptions.RayError as error:
            del self.nodes[key]
            with suppress(Exception):  # it may be there, and only out of reach: the next one needs its slot
                self.ray.kill(node.actor)
            self.deaths[key] += 1
            if self.deaths[key] > MOST_DEATHS:
                self.refused.add(key)
            self._lose(node, str(error).strip().splitlines()[0])
            return
        if not node.name:
            self._join(key, node, msgspec.json.decode(text, type=Known))
            return
        answer, share = msgspec.json.decode(text, type=Answer), node.share
        assert share is not None
        node.share = None
        if answer.error:
            self.failed.add((share.name, node.name))
            self._again(share, f"on {node.name}: {answer.error}")
            return
        path = journal_path(self.folder, node.name, share.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, answer.journal)
        self.open = [each for each in self.open if each is not share]
        done = len(self.shares) - len(self.open)
        self.note(f"{node.name} has finished share {share.name}: {done} of {len(self.shares)}")

    def _join(self, key: str, node: Node, known: Known) -> None:
        here = version("attnbench")
        if known.attnbench != here or not NAME.fullmatch(known.host):
            self.refused.add(key)
            del self.nodes[key]
            self.ray.kill(node.actor)
            self.note(f"{known.host} takes no part: it has attnbench {known.attnbench}, and here it is {here}")
            return
        node.name, node.held = known.host, known.held
        self.note(f"{node.name} has joined")
        if known.niceness > os.nice(0):
            advice = f"start Ray there with {'='.join(NICENESS)} in its environment"
            self.note(f"warning: {node.name} measures with niceness {known.niceness}: {advice}")

    def _lose(self, node: Node, why: str) -> None:
        if node.share is None:
            self.note(f"{node.name or 'a host'} was lost: {why}")
        else:
            self.begun[node.share.name] = node.name
            self._again(node.share, f"{node.name} was lost while it measured this: {why}")

    def _again(self, share: Share, why: str) -> None:
        """A share goes back to the others, but for one that was tried too often."""
        self.note(f"share {share.name} is tried again: {why}")
        self.why[share.name] = why
        self.tries[share.name] = self.tries.get(share.name, 0) + 1
        if self.tries[share.name] >= MOST_TRIES:
            self._give_up(share, why)

    def _give_up(self, share: Share, why: str) -> None:
        self.lost[share.name] = why
        self.note(f"share {share.name} is lost: {why}")
        self.open = [each for each in self.open if each is not share]
