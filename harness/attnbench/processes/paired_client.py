"""Two workers that look like one: each side of a comparison in processes of its own, their blocks interleaved.

Every block is taken by both processes, one right after the other in an order drawn anew, while the other's threads
sleep. Both have the same arms, down to twin and canary, so that where the code is the same nothing tells them apart.
A process has a bias of its own, which its blocks share: what counts is one number for each pair of processes
(docs/adr/0020). Knows nothing of torch.
"""

import os
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import Self

import msgspec

from attnbench.plugins import split
from attnbench.processes.isolation import hides, places
from attnbench.processes.messages import (
    Attempt,
    Check,
    Failed,
    FindCeilings,
    Hello,
    Observe,
    Profile,
    Ready,
    Reply,
    Request,
    TakeVisit,
    Trace,
    Visited,
)
from attnbench.processes.worker_client import ROOT, Crew, WorkerLostError
from attnbench.storage.events import ArmSamples, Plan, Side
from attnbench.storage.records import BASE, PROBE, Arm, Role, Sample

SHORT_SPIN = {"GOMP_SPINCOUNT": "20000", "KMP_BLOCKTIME": "1"}
"""Threads that wait for work spin for a millisecond at most, as between the operators of a call, and then sleep.

A process hands over when its threads sleep, so that they take none of the other's cores."""
FOLDER = "sides"
"""Below a run's folder, as long as the run is at work: what was checked out, and where the workers find us."""
PACKAGE = "attnbench"

Taken = tuple[ArmSamples, ...]
Half = tuple[Crew, tuple[tuple[Arm, str], ...]]


def apart(plan: Plan, folder: Path, settings: Mapping[str, str]) -> "PairedCrew":
    """The two workers of a plan with sides: this harness in both, and each side's own files and interpreter."""
    assert plan.sides is not None
    spin = {name: value for name, value in SHORT_SPIN.items() if name not in os.environ}
    ours = _ours_alone(folder / FOLDER / "modules")

    def crew(side: Side, name: str) -> Crew:
        own = _own_of(side, list(side.implementations.values()), folder / FOLDER / f"{name}_modules")
        log = folder / f"{name}.log"
        return Crew(log, plan.timeout_s, {**spin, **settings}, python=side.python, folders=[ours, *own])

    base = crew(plan.sides.base, "worker_base")
    return PairedCrew(base, crew(plan.sides.candidate, "worker"), plan.seed)


def _own_of(side: Side, specs: Sequence[str], target: Path) -> list[Path]:
    """Where a process looks for its side's own packages, before those that are installed.

    A folder that is a package is left out: what lies in it is imported by the package's name. In place of one with
    what would hide Python's own modules or torch, there is a folder below `target` with links to the rest.
    """
    files = [file for spec in specs if (file := split(spec)[0]) is not None]
    if not side.root or not files:
        return []
    top = Path(side.root).resolve()
    found = dict.fromkeys(place for file in files for place in places(file, top))
    kept = [
        place
        for place in sorted(found, key=lambda place: len(place.parts))
        if place.is_dir() and (place in {top, top / "src"} or not (place / "__init__.py").exists())
    ]
    return [_without_hiding(place, target / str(number)) for number, place in enumerate(kept)]


def _without_hiding(place: Path, target: Path) -> Path:
    entries = sorted(place.iterdir())
    if not any(map(hides, entries)):
        return place
    target.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        link = target / entry.name
        if not hides(entry) and not link.is_symlink():
            link.symlink_to(entry)
    return target.resolve()


def _ours_alone(folder: Path) -> Path:
    """A folder with this harness and nothing else: where it is installed there are other packages beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / PACKAGE
    if not link.is_symlink():
        link.symlink_to(ROOT / PACKAGE, target_is_directory=True)
    return folder.resolve()


class PairedCrew(Crew):
    """Asks the worker to whom an implementation belongs; a visit is asked of both, block by block."""

    def __init__(self, base: Crew, candidate: Crew, seed: int) -> None:
        """Nobody is at work yet."""
        self.base, self.candidate, self.seed = base, candidate, seed

    @property
    def both(self) -> tuple[Crew, Crew]:
        """The base's worker and the candidate's."""
        return self.base, self.candidate

    def hello(self, layout: int = 0) -> Ready:
        """Start two fresh workers at once; which of two memory layouts is whose is drawn.

        Raises:
            ValueError: one cannot start.
        """
        layouts = [2 * layout, 2 * layout + 1]
        random.Random(f"{self.seed}/{layout}").shuffle(layouts)
        with ThreadPoolExecutor(len(self.both)) as pool:
            base, candidate = pool.map(lambda crew, number: crew.hello(number), self.both, layouts)
        return Ready(environment=candidate.environment, base=base.environment)

    def ask(self, request: Request, timeout_s: float | None = None) -> Reply:
        """The answer to a request.

        Raises:
            WorkerLostError: a worker crashed or hung; its index is that of the arm in the whole request.
        """
        match request:
            case TakeVisit():
                return self._visit(request, timeout_s)
            case FindCeilings():
                return self.candidate.ask(request, timeout_s)
            case Check() | Profile() | Observe() | Trace() | Attempt():
                crew = self.base if request.side == BASE else self.candidate
                return crew.ask(request, timeout_s)
            case Hello():
                return self.hello(request.layout)

    def _visit(self, request: TakeVisit, timeout_s: float | None) -> Reply:
        draws = random.Random(request.seed)
        base = [(arm, spec) for arm, spec in request.arms if arm.side == BASE]
        rival = [(arm, spec) for arm, spec in request.arms if arm.side != BASE and arm.role is Role.measured]
        rival += [(arm.as_control(), spec) for arm, spec in rival]  # as the base has them
        halves: list[Half] = [(self.base, (*base, (PROBE, ""))), (self.candidate, (*rival, (PROBE, "")))]
        arms = [arm for arm, _ in request.arms]
        samples: dict[Arm, list[Sample]] = {arm: [] for arm in dict.fromkeys([*arms, *[arm for arm, _ in rival]])}
        called_s = 0.0
        for step in _steps(request):
            taken: list[Taken] = []
            for crew, half in draws.sample(halves, len(halves)):
                asked = msgspec.structs.replace(step, arms=half, seed=draws.getrandbits(53))
                reply = _ask(crew, asked, timeout_s, arms)
                if isinstance(reply, Failed):
                    return msgspec.structs.replace(reply, arm=_known(reply.arm, arms))
                assert isinstance(reply, Visited)
                called_s += reply.called_s
                taken.append(reply.arms)
            if step.num_blocks:
                for arm, sample in _merged(taken, len(samples[arms[0]])).items():
                    samples[arm].append(sample)
        visited = tuple(ArmSamples(arm=arm, samples=tuple(own)) for arm, own in samples.items())
        return Visited(arms=visited, called_s=called_s)

    @property
    def is_at_work(self) -> bool:
        """Whether both are there to be asked."""
        return all(crew.is_at_work for crew in self.both)

    def dismiss(self) -> None:
        """End both, at once."""
        for crew in self.both:
            crew.dismiss()

    def __enter__(self) -> Self:
        """Itself."""
        for crew in self.both:
            crew.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        """End both and clean up."""
        for crew in self.both:
            crew.__exit__()


def _known(arm: Arm, asked: Collection[Arm]) -> Arm:
    """The arm as the request has it, which knows nothing of the candidate's A/A control."""
    return arm if arm in asked else arm.as_measured()


def _steps(request: TakeVisit) -> Iterator[TakeVisit]:
    """What both sides are asked, one after the other: to make ready, each block by itself, and to verify the answers.

    What is not sampling is no part of a block: its two halves would lie far apart.
    """
    ready = msgspec.structs.replace(request, num_blocks=0, verifies=False, settles=True)
    yield ready
    for _ in range(request.num_blocks):
        yield msgspec.structs.replace(ready, num_blocks=1)
    if request.verifies:
        yield msgspec.structs.replace(ready, verifies=True)


def _ask(crew: Crew, request: TakeVisit, timeout_s: float | None, arms: Sequence[Arm]) -> Reply:
    """The answer; where the worker is lost, with the arm's place among all arms."""
    try:
        return crew.ask(request, timeout_s)
    except WorkerLostError as lost:
        if lost.arm >= len(request.arms):
            raise
        arm = request.arms[lost.arm][0]
        raise WorkerLostError(lost.status, arms.index(_known(arm, arms)), str(lost)) from None


def _merged(taken: Sequence[Taken], block: int) -> dict[Arm, Sample]:
    """One sample for each arm of a block, slots counted through; of the interference probes the slower one."""
    merged: dict[Arm, Sample] = {}
    before = 0
    for half in taken:
        for each in half:
            (sample,) = each.samples
            placed = msgspec.structs.replace(sample, block=block, slot=before + sample.slot)
            merged[each.arm] = max(placed, merged.get(each.arm, placed), key=attrgetter("value"))
        before += len(half)
    return merged
