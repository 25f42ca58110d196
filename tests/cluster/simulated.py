"""A simulated Ray: hosts on a virtual clock that answer with made-up journals, die, come back and join late."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from attnbench.cluster import driver
from attnbench.cluster.host import Answer, HowFar, Known
from attnbench.cluster.shares import Share
from attnbench.storage.events import Plan
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import BOOT, Environment
from tests import journals

NAMES = ("sdpa", "fused", "chunked")


class LostError(Exception):
    """What Ray raises where a host is lost."""


@dataclass(kw_only=True)
class Machine:
    """A node: which host it is on, of which kind, and when it is there."""

    name: str
    kind: str = "old"
    takes_s: float = 20.0  # a share
    bias: float = 1.0  # all but the baseline take so many times as long there
    joins_s: float = 0.0
    dies_s: float = math.inf
    returns_s: float = math.inf
    held: dict[str, bool] = field(default_factory=dict)
    fails: bool = False  # whatever it is given ends with an error
    kept: int | None = None  # bytes of a journal that come

    def is_there(self, now_s: float) -> bool:
        """Whether it is alive."""
        return self.joins_s <= now_s < self.dies_s or now_s >= self.returns_s

    @property
    def environment(self) -> Environment:
        """As its workers say it."""
        return msgspec.structs.replace(journals.ENVIRONMENT, cpu=self.kind, moment={BOOT: self.name})


@dataclass(eq=False)
class Pending:
    """What a host was asked; it answers at a moment, if it lives until then."""

    machine: Machine
    begun_s: float
    ends_s: float
    share: Share | None = None


class SimulatedRay:
    """The part of Ray that a driver uses."""

    exceptions = SimpleNamespace(RayError=LostError)

    def __init__(self, machines: Sequence[Machine], folder: Path) -> None:
        """Take the machines, and a folder for journals that are made."""
        self.machines, self.folder = {f"node{n}": machine for n, machine in enumerate(machines)}, folder
        self.now_s = 0.0
        self.given: list[tuple[str, str]] = []  # host and share, each time that one was asked for
        self.measured: list[tuple[str, str]] = []  # and finished
        self.asked: list[Pending] = []
        self.receiver = SimpleNamespace(news=SimpleNamespace(remote=self.news))
        self._numbers = itertools.count()

    def nodes(self) -> list[dict[str, Any]]:
        """As ray.nodes."""
        return [
            {"NodeID": key, "Alive": machine.is_there(self.now_s), "Resources": {driver.SLOT: 1.0}}
            for key, machine in self.machines.items()
        ]

    def start_actor(self, _: Any, node: dict[str, Any], __: str) -> Any:
        """In place of driver.start_actor."""
        machine = self.machines[node["NodeID"]]

        def ask(share: bytes | None = None, receiver: Any = None) -> Pending:
            if share is None:
                return Pending(machine, self.now_s, self.now_s + 1.0)
            assert receiver is self.receiver
            asked = msgspec.json.decode(share, type=Share)
            assert (machine.name, asked.name) not in self.measured, f"{machine.name} is to measure {asked.name} twice"
            self.given.append((machine.name, asked.name))
            self.asked.append(Pending(machine, self.now_s, self.now_s + machine.takes_s, asked))
            return self.asked[-1]

        return SimpleNamespace(known=SimpleNamespace(remote=ask), measure=SimpleNamespace(remote=ask))

    def wait(self, pending: list[Pending], *, num_returns: int, timeout: float) -> tuple[list[Pending], list[Pending]]:
        """As ray.wait, on the virtual clock."""
        assert num_returns == 1

        def moment_s(each: Pending) -> float:
            dies_s = each.machine.dies_s if each.begun_s < each.machine.dies_s else math.inf
            return min(each.ends_s, dies_s)

        first = min(pending, key=moment_s)
        self.now_s = max(self.now_s, min(self.now_s + timeout, moment_s(first)))
        return ([first] if moment_s(first) <= self.now_s else []), []

    def start_receiver(self, _: Any) -> Any:
        """In place of driver.start_receiver."""
        return self.receiver

    def news(self) -> list[bytes]:
        """Of each host that measures how far it is, as the receiver would have it."""
        return [
            msgspec.json.encode(
                HowFar(
                    host=each.machine.name,
                    share=each.share.name,
                    stage="time",
                    done=self.now_s - each.begun_s,
                    total=each.ends_s - each.begun_s,
                )
            )
            for each in self.asked
            if each.share is not None and each.begun_s <= self.now_s < each.ends_s
        ]

    def get(self, asked: "Pending | list[bytes]", timeout: float = 0.0) -> Any:
        """As ray.get of what `wait` has returned, or of the receiver's news."""
        if isinstance(asked, list):
            return asked
        machine = asked.machine
        if asked.begun_s < machine.dies_s <= asked.ends_s:
            raise LostError(f"{machine.name} has died")
        if asked.share is None:
            return msgspec.json.encode(
                Known(
                    host=machine.name,
                    attnbench=version("attnbench"),
                    python="3",
                    time_s=self.now_s,
                    niceness=0,
                    kind=machine.kind,
                    held=machine.held,
                )
            )
        if machine.fails:
            return msgspec.json.encode(Answer(share=asked.share.name, error="no room"))
        self.measured.append((machine.name, asked.share.name))
        made = self.folder / str(next(self._numbers))
        journals.write(
            made,
            asked.share.plan.workloads,
            NAMES,
            num_visits=6,
            num_epochs=1,
            slowdown=machine.bias,
            seed=len(self.measured),
            environment=machine.environment,
        )
        return msgspec.json.encode(
            Answer(share=asked.share.name, journal=(made / JOURNAL).read_bytes()[: machine.kept])
        )

    def kill(self, _: Any) -> None:
        """Nothing runs."""

    def sleep(self, seconds: float) -> None:
        """In place of time.sleep."""
        self.now_s += seconds

    def monotonic(self) -> float:
        """In place of time.monotonic."""
        return self.now_s


def drive(
    monkeypatch: pytest.MonkeyPatch, folder: Path, machines: Sequence[Machine], hosts_per_cell: int, plan: Plan
) -> tuple[SimulatedRay, list[str]]:
    """A sweep to its end; what was asked of whom, and what was said."""
    made = folder.parent / f"made{len(list(folder.parent.glob('made*')))}"
    ray, said = SimulatedRay(machines, made), list[str]()
    monkeypatch.setattr(driver, "start_actor", ray.start_actor)
    monkeypatch.setattr(driver, "start_receiver", ray.start_receiver)
    monkeypatch.setattr(driver, "time", ray)
    folder.mkdir(exist_ok=True)
    (folder / "hosts").mkdir(exist_ok=True)
    driver.Driver(ray, plan, folder, said.append, hosts_per_cell).run()
    return ray, said
