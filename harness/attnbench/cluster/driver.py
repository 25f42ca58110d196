"""Hand out the shares of a plan to the hosts of a Ray cluster, and merge what they measured.

A host is a node with the resource `bench_slot`; its actor holds that, so that no other actor is there. Of each kind of
host so many measure a share as were asked for, each into a journal of its own. While hosts measure, the driver sleeps:
it wakes when a share ends or a host is lost, and looks for new hosts now and then. All that it knows is on disk, in the
folder of the run or on the hosts, so that it may be killed at any moment.

Source of the idea that an actor holds a machine: Kernel Tuner, https://github.com/KernelTuner/kernel_tuner/pull/328.
"""

import fcntl
import logging
import math
import os
import re
import socket
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from attnbench.cluster.host import NAME, REPORT_EVERY_S, Answer, Host, HowFar, Known, Receiver
from attnbench.cluster.merge import finished, journal_path, merge
from attnbench.cluster.shares import Share, split
from attnbench.processes.sides import current_commit
from attnbench.processes.stages import now
from attnbench.storage import events
from attnbench.storage.events import SCHEMA, DamagedError, Plan
from attnbench.storage.files import put
from attnbench.storage.journal import HOSTS, JOURNAL
from attnbench.storage.journal import events as read_events
from attnbench.units import plain

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
MOST_NAMED = 8
"""Of more hosts at work, so many are named."""
DIVISION = "shares.json"
ACCELERATOR = "accelerator_type:"
"""How Ray's name of a resource begins that says which accelerator a node has."""
NICENESS = ("RAY_worker_niceness", "0")
"""Ray gives its workers a niceness of 15, with which whatever else runs on a host goes before what is measured."""
LOCAL = re.compile(r"local:([1-9]\d?)")
REMOTE = re.compile(r"(?:ray://)?([\w.-]+):(\d{1,5})")
CONNECT_S = 10.0
LOCAL_MEMORY_BYTES = 80_000_000
"""Of each node's object store, the least that Ray allows: messages are small."""
ALLOWED = "auto (the cluster that this machine is part of), HOST:PORT, ray://HOST:PORT, or local:N"


class Division(msgspec.Struct, frozen=True, kw_only=True):
    """How a run was divided when it began, which stays, however many hosts there are later."""

    at_once: float  # so many shares are measured at once, as in shares.split
    hosts_per_cell: int
    kinds: dict[str, str]  # of each host that has taken part, by name; kept up to date


@dataclass
class Node:
    """A node that measures, and what it is doing."""

    actor: Any
    accelerators: tuple[str, ...] = ()
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


def start_receiver(ray: Any) -> Any:  # noqa: ANN401 - likewise
    """The actor to which hosts report how far they are: on a node that measures nothing, or else on the own one."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    quiet = (node["NodeID"] for node in ray.nodes() if node["Alive"] and not node["Resources"].get(SLOT))
    place = next(quiet, None) or ray.get_runtime_context().get_node_id()
    where = NodeAffinitySchedulingStrategy(place, soft=True)
    return ray.remote(Receiver).options(num_cpus=0, scheduling_strategy=where).remote()


def hosts_of(ray: Any) -> dict[str, dict[str, Any]]:  # noqa: ANN401 - likewise
    """The nodes that are alive and have a bench_slot, by id."""
    return {node["NodeID"]: node for node in ray.nodes() if node["Alive"] and node["Resources"].get(SLOT)}


def sweep(plan: Plan, folder: Path, address: str, note: Callable[[str], None], hosts_per_cell: int = 1) -> None:
    """Start a run on a cluster in `folder`, or go on with the one that is there, to its end.

    Of each kind of host, `hosts_per_cell` measure each cell, or as many as there are; a run that is gone on with keeps
    its number. `note` is given in words who joined, what was finished and who was lost.

    Raises:
        ValueError: no ray, no cluster, no host, or another process drives this run; the message says what to do.
        OSError: the folder cannot be written.
    """
    with connected(address) as ray:
        folder.mkdir(parents=True, exist_ok=True)
        with _only_driver(folder):
            Driver(ray, plan, folder, note, hosts_per_cell).run()


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

    def __init__(
        self,
        ray: Any,  # noqa: ANN401 - ray has no types of its own
        plan: Plan,
        folder: Path,
        note: Callable[[str], None],
        hosts_per_cell: int = 1,
    ) -> None:
        """Take what a run is; `run` reads what is finished already."""
        self.ray, self.plan, self.folder, self.note = ray, plan, folder, note
        self.hosts_per_cell = hosts_per_cell
        self.nodes: dict[str, Node] = {}
        self.refused: set[str] = set()  # nodes that cannot take part
        self.deaths = Counter[str]()  # of the actors of a node
        self.waits: dict[Any, str] = {}  # what is waited for, and the node that it comes from
        self.kinds: dict[str, str] = {}  # of each host that has ever taken part
        self.shares: list[Share] = []
        self.done: defaultdict[str, set[str]] = defaultdict(set)  # the hosts that have finished a share
        self.begun: defaultdict[str, set[str]] = defaultdict(set)  # the hosts that were lost with a share
        self.failed: set[tuple[str, str]] = set()  # a share, and a host on which it ended with an error
        self.tries = Counter[tuple[str, str]]()  # of a share on hosts of a kind
        self.why: dict[str, str] = {}  # what happened last to a share
        self.given_up: dict[tuple[str, str], str] = {}  # a share on a kind of host, and why
        self.few: dict[str, int] = {}  # the kinds of which there are fewer hosts than were asked for, as it was said
        self.receiver: Any = None
        self._merged_s = self._said_s = time.monotonic()
        self.started = self._started(plan)

    def _started(self, plan: Plan) -> events.RunStarted:
        path = self.folder / JOURNAL
        if path.exists():
            first = next(iter(read_events(path)))
            assert isinstance(first, events.RunStarted)
            return first
        return events.RunStarted(schema=SCHEMA, run=self.folder.name, time=now(), commit=current_commit(), plan=plan)

    def run(self) -> None:
        """Hand out shares until each is finished as often as it can be, or lost."""
        try:
            self._divide()
            self._measure()
        except BaseException:
            if self.shares:
                self._merge(is_over=False)
            raise
        finally:
            for actor in (self.receiver, *(node.actor for node in self.nodes.values())):
                with suppress(Exception):  # its host may be gone
                    self.ray.kill(actor)
        self._merge(is_over=True)

    def _divide(self) -> None:
        """Make the shares, which stay those that the run began with: hosts have journals of them."""
        path = self.folder / HOSTS / DIVISION
        if (found := self._division()) is not None:
            at_once, self.hosts_per_cell, self.kinds = found.at_once, found.hosts_per_cell, dict(found.kinds)
            self._wait_for_first_hosts()
        elif not hosts_of(self.ray):
            raise ValueError(NO_HOST)
        else:
            self._wait_for_first_hosts()
            most = Counter(self.kinds[node.name] for node in self.nodes.values() if node.name)
            numbers = most.values() or [max(1, len(self.nodes))]  # all are busy, and of no kind yet
            at_once = min(number / min(number, self.hosts_per_cell) for number in numbers)
        self.shares = split(self.plan, self.folder.name, at_once)
        put(path, msgspec.json.encode(Division(at_once=at_once, hosts_per_cell=self.hosts_per_cell, kinds=self.kinds)))
        for share in self.shares:
            self.done[share.name] |= set(finished(self.folder, share))
        self._merge(is_over=False)  # so that it can be gone on with from here

    def _division(self) -> Division | None:
        """What the run was divided into; None where it begins.

        Raises:
            ValueError: that cannot be read.
        """
        path = self.folder / HOSTS / DIVISION
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Division)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path} is damaged, or of another version ({error}): start a new run") from None

    def _wait_for_first_hosts(self) -> None:
        """Until each host that is there has said what it is, or is busy with other work.

        Raises:
            ValueError: there are some, and none takes part.
        """
        self._look_for_hosts()
        while any(self._is_expected(node) for node in self.nodes.values()):
            self._wait()
            self._look_for_hosts()
        if not self.nodes and hosts_of(self.ray):
            raise ValueError("no host of the cluster takes part: see the reasons above")

    def _is_expected(self, node: Node) -> bool:
        """Whether a node is likely to say soon what it is; one that is busy may do so at any time, or never."""
        return not node.name and math.isfinite(node.asked_s)

    def _measure(self) -> None:
        alone_s, looked_s = time.monotonic(), -math.inf
        while self._is_open():
            if time.monotonic() - looked_s >= NODES_EVERY_S or not self.waits:
                self._look_for_hosts()
                looked_s = time.monotonic()
            self._say_where_few()
            self._hand_out()
            if self._is_at_work() or (self.waits and any(not self.done[share.name] for share in self.shares)):
                alone_s = time.monotonic()
            elif time.monotonic() - alone_s > WAIT_S:
                return
            self._wait()
            self._say_how_far()
            if time.monotonic() - self._merged_s > MERGE_EVERY_S:
                self._merge(is_over=False)

    def _wait(self) -> None:
        """Until something ends; not for ever."""
        if not self.waits:
            time.sleep(min(1.0, WAIT_S))
            return
        ended, _ = self.ray.wait(list(self.waits), num_returns=1, timeout=NODES_EVERY_S)
        for each in ended:
            self._take(each)

    def _is_at_work(self) -> bool:
        """Whether somebody measures, or is about to say whether it can."""
        return any(node.share is not None or self._is_expected(node) for node in self.nodes.values())

    def _is_open(self) -> bool:
        """Whether anything is to be measured that some host has, may have, or may come back to."""
        if self._is_at_work():
            return True
        live = {node.name for node in self.nodes.values()}
        for share in self.shares:
            if not self.done[share.name] and not any(name == share.name for name, _ in self.given_up):
                return True
            for host in (live | self.begun[share.name]) - {""}:
                if (share.name, host) not in self.failed and self._needs(share, host):
                    return True
        return False

    def _needs(self, share: Share, host: str, others: frozenset[str] = frozenset()) -> bool:
        """Whether a share is to be measured by a host that has not done so, if `others` are about to."""
        kind = self.kinds[host]
        has = self.done[share.name] | others
        alike = sum(self.kinds.get(each) == kind for each in has - {host})
        return (
            host not in self.done[share.name]
            and alike < self.hosts_per_cell
            and (share.name, kind) not in self.given_up
        )

    def _merge(self, *, is_over: bool) -> None:
        none = f"no host was left for it, and none joined within {WAIT_S:g} s"
        lost = {}
        for share in self.shares if is_over else ():
            gone = [why for (name, _), why in self.given_up.items() if name == share.name]
            reasons = gone or [*filter(None, [self.why.get(share.name)]), none]
            if not self.done[share.name]:
                lost[share.name] = "; ".join(dict.fromkeys(reasons))
                self.note(f"share {share.name} is lost: {lost[share.name]}")
            elif missing := self._missing(share):
                self.note(f"share {share.name} was measured on fewer hosts than it was to be: {missing}")
        merge(self.folder, self.started, self.shares, lost, is_over=is_over)
        self._merged_s = time.monotonic()

    def _missing(self, share: Share) -> str:
        """Of which kinds fewer hosts have finished a share than there are, in words."""
        parts = []
        for kind, hosts in self._by_kind().items():
            number = len(hosts & self.done[share.name])
            if number < min(self.hosts_per_cell, len(hosts)):
                why = self.given_up.get((share.name, kind), self.why.get(share.name, ""))
                parts.append(f"{number} of {kind}{': ' * bool(why)}{why}")
        return "; ".join(parts)

    def _by_kind(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {}
        for host, kind in self.kinds.items():
            found.setdefault(kind, set()).add(host)
        return found

    def _look_for_hosts(self) -> None:
        for key, found in hosts_of(self.ray).items():
            if key not in self.nodes and key not in self.refused:
                has = tuple(sorted(name for name in found["Resources"] if name.startswith(ACCELERATOR)))
                node = Node(actor=start_actor(self.ray, found, self.folder.name), accelerators=has)
                self.nodes[key] = node
                self.waits[node.actor.known.remote()] = key

        for key, node in self.nodes.items():
            if not node.name and time.monotonic() - node.asked_s > BUSY_S:
                node.asked_s = math.inf
                self.note(f"node {key[:8]} does not begin yet: other work of the cluster has its {SLOT} or processors")

    def _say_where_few(self) -> None:
        """Once for each kind that has fewer hosts than were asked for; hosts may join later."""
        for kind, hosts in self._by_kind().items():
            number = len(hosts)
            if number < self.hosts_per_cell and self.few.get(kind) != number:
                self.few[kind] = number
                few = f"{number} host{'s' * (number > 1)} of {kind}"
                self.note(f"there {'are' if number > 1 else 'is'} {few}: each cell is measured on {number} of "
                          f"these, and not on {self.hosts_per_cell}")  # fmt: skip

    def _say_how_far(self) -> None:
        """Now and then, what those that measure have reported."""
        if self.receiver is None or time.monotonic() - self._said_s < REPORT_EVERY_S:
            return
        self._said_s = time.monotonic()
        with suppress(self.ray.exceptions.RayError):  # without it a sweep goes on in silence
            news = self.ray.get(self.receiver.news.remote(), timeout=NODES_EVERY_S)
            found = sorted((msgspec.json.decode(each, type=HowFar) for each in news), key=lambda each: each.host)
            said = [
                f"{each.host} share {each.share}, {each.stage} {100 * min(1.0, each.done / (each.total or 1.0)):.0f} %"
                for each in found[:MOST_NAMED]
            ]
            if said:
                more = f"; and {len(found) - len(said)} more" if len(found) > len(said) else ""
                self.note(f"at work: {'; '.join(said)}{more}")

    def _hand_out(self) -> None:
        """One share to each host that waits for one."""
        for key, node in self.nodes.items():
            if node.name and node.share is None and (share := self._next(node)) is not None:
                node.share = share
                self.receiver = self.receiver or start_receiver(self.ray)
                self.waits[node.actor.measure.remote(msgspec.json.encode(share), self.receiver)] = key

    def _next(self, node: Node) -> Share | None:
        """What a host is given: what it has begun, then what fewest have, then what a lost host had begun.

        It never is what the host has measured, nor what as many of its kind have, or have begun, as were asked for.
        """
        here = {each.name for each in self.nodes.values()}

        def is_own(share: Share) -> bool:
            return share.name in node.held or node.name in self.begun[share.name]

        def is_free(share: Share) -> bool:
            name = share.name
            busy = {each.name for each in self.nodes.values() if each.share is share}
            if not is_own(share):  # else two that have begun it would wait for one another
                holders = {each.name for each in self.nodes.values() if name in each.held} | self.begun[name]
                busy |= {each for each in holders & here if (name, each) not in self.failed}
            is_allowed = node.name not in busy and (name, node.name) not in self.failed
            return is_allowed and self._needs(share, node.name, frozenset(busy - {""}))

        def rank(share: Share) -> tuple[int, int]:
            return 0 if is_own(share) else 2 if self.begun[share.name] else 1, len(self.done[share.name])

        return min(filter(is_free, self.shares), key=rank, default=None)

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
            self._again(share, node.name, f"on {node.name}: {answer.error}")
            return
        path = journal_path(self.folder, node.name, share.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        put(path, answer.journal)
        if not self._is_finished(share, node.name):
            path.unlink()
            self.failed.add((share.name, node.name))
            self._again(share, node.name, f"on {node.name}: its journal came damaged or unfinished")
            return
        self.done[share.name].add(node.name)
        self.note(f"{node.name} has finished share {share.name}: {self._progress()}")

    def _is_finished(self, share: Share, host: str) -> bool:
        """Whether a host's journal of a share is whole."""
        try:
            return host in finished(self.folder, share)
        except DamagedError:
            return False

    def _progress(self) -> str:
        """How much is finished, of what the hosts that have taken part can do: "3 of 8"."""
        done = sum(map(len, self.done.values()))
        asked = sum(min(self.hosts_per_cell, len(hosts)) for hosts in self._by_kind().values())
        text = f"{done} of {len(self.shares) * asked}"
        return text if asked == 1 else f"{text} ({len(self.shares)} shares, each on {asked} hosts)"

    def _join(self, key: str, node: Node, known: Known) -> None:
        here = version("attnbench")
        if known.attnbench != here or not NAME.fullmatch(known.host):
            self.refused.add(key)
            del self.nodes[key]
            self.ray.kill(node.actor)
            why = f"it has attnbench {known.attnbench}, and here it is {here}"
            if known.attnbench == here:
                why = "its name is none: letters, digits, dots, dashes and underscores"
            self.note(f"{plain(known.host)} takes no part: {why}")
            return
        node.name, node.held = known.host, known.held
        self.kinds[node.name] = ", ".join([known.kind, *(name.removeprefix(ACCELERATOR) for name in node.accelerators)])
        if (found := self._division()) is not None:
            path = self.folder / HOSTS / DIVISION
            put(path, msgspec.json.encode(msgspec.structs.replace(found, kinds=self.kinds)))
        self.note(f"{node.name} has joined")
        if known.niceness > os.nice(0):
            advice = f"start Ray there with {'='.join(NICENESS)} in its environment"
            self.note(f"warning: {node.name} measures with niceness {known.niceness}: {advice}")

    def _lose(self, node: Node, why: str) -> None:
        if node.share is None:
            self.note(f"{node.name or 'a host'} was lost: {why}")
        else:
            self.begun[node.share.name].add(node.name)
            self._again(node.share, node.name, f"{node.name} was lost while it measured this: {why}")

    def _again(self, share: Share, host: str, why: str) -> None:
        """A share goes back to the others of the host's kind, but for one that was tried too often."""
        self.note(f"share {share.name} is tried again: {why}")
        self.why[share.name] = why
        place = share.name, self.kinds[host]
        self.tries[place] += 1
        if self.tries[place] >= MOST_TRIES:
            self.given_up[place] = why
            self.note(f"share {share.name} is given up on {self.kinds[host]}: {why}")
