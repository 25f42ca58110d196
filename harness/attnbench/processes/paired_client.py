"""Two workers that look like one: each side of a comparison in processes of its own, their blocks interleaved.

Every block is taken by both processes, one right after the other in a random order, while the other's threads sleep.
Both have the same arms, down to A/A control and interference probe: identical code is measured alike. A process has a
bias of its own, which its blocks share: what counts is one number for each pair of processes (docs/adr/0020). Knows
nothing of torch.
"""

import random
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import attrgetter
from typing import Self

import msgspec

from attnbench.processes.messages import Failed, MeasureCeilings, Reply, SampleBlocks, Started, Work
from attnbench.processes.worker_client import WorkerClient, WorkerLostError
from attnbench.storage.events import ArmSamples, VisitFinished
from attnbench.storage.records import BASE, PROBE, Arm, Role, Sample

Half = tuple[WorkerClient, tuple[tuple[Arm, str], ...]]
"""One of the two workers, and the arms that it samples."""


class PairedClient:
    """Asks the worker that an implementation belongs to; blocks are asked of both, in turn."""

    def __init__(self, base: WorkerClient, candidate: WorkerClient, seed: int) -> None:
        """Nothing is started yet."""
        self.base, self.candidate, self.seed = base, candidate, seed
        self._exits = ExitStack()

    @property
    def both(self) -> tuple[WorkerClient, WorkerClient]:
        """The base's worker and the candidate's."""
        return self.base, self.candidate

    @property
    def is_running(self) -> bool:
        """Whether both are there to be asked."""
        return all(client.is_running for client in self.both)

    def start(self, layout: int = 0) -> Started:
        """Start two fresh workers at the same time; which of two memory layouts is whose is drawn at random.

        Raises:
            ValueError: one cannot start.
        """
        layouts = [2 * layout, 2 * layout + 1]
        random.Random(f"{self.seed}/{layout}").shuffle(layouts)
        with ThreadPoolExecutor(len(self.both)) as pool:
            base, candidate = pool.map(lambda client, number: client.start(number), self.both, layouts)
        return Started(environment=candidate.environment, base=base.environment)

    def ask(self, request: Work) -> Reply:
        """The answer to a request.

        Raises:
            WorkerLostError: a worker crashed or hung; its index is that of the arm in the whole request.
        """
        if isinstance(request, SampleBlocks):
            return self._sample_blocks(request)
        is_base = not isinstance(request, MeasureCeilings) and request.arm.side == BASE
        return (self.base if is_base else self.candidate).ask(request)

    def _sample_blocks(self, request: SampleBlocks) -> Reply:
        draws = random.Random(request.seed)
        base = [(arm, spec) for arm, spec in request.arms if arm.side == BASE]
        candidate = [(arm, spec) for arm, spec in request.arms if arm.side != BASE and arm.role is Role.measured]
        candidate += [(arm.as_control(), spec) for arm, spec in candidate]  # as the base has them
        halves: list[Half] = [(self.base, (*base, (PROBE, ""))), (self.candidate, (*candidate, (PROBE, "")))]
        arms = [arm for arm, _ in request.arms]
        samples: dict[Arm, list[Sample]] = {arm: [] for arm in dict.fromkeys([*arms, *[arm for arm, _ in candidate]])}
        called_s = 0.0
        for step in _steps(request):
            taken: list[tuple[ArmSamples, ...]] = []
            for client, half in draws.sample(halves, len(halves)):
                asked = msgspec.structs.replace(step, arms=half, seed=draws.getrandbits(53))
                reply = _ask(client, asked, arms)
                if isinstance(reply, Failed):
                    return msgspec.structs.replace(reply, arm=_as_requested(reply.arm, arms))
                assert isinstance(reply, VisitFinished)
                called_s += reply.called_s
                taken.append(reply.arms)
            if step.num_blocks:
                for arm, sample in _merged(taken, len(samples[arms[0]])).items():
                    samples[arm].append(sample)
        sampled = tuple(ArmSamples(arm=arm, samples=tuple(own)) for arm, own in samples.items())
        return VisitFinished(
            workload=request.workload.id, epoch=request.epoch, visit=request.visit, arms=sampled, called_s=called_s
        )

    def stop(self) -> None:
        """End both, at once."""
        for client in self.both:
            client.stop()

    def __enter__(self) -> Self:
        """Itself."""
        for client in self.both:
            self._exits.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        """Stop both and clean up."""
        self._exits.close()


def _as_requested(arm: Arm, arms: Collection[Arm]) -> Arm:
    """The arm as the request has it, which knows nothing of the candidate's A/A control."""
    return arm if arm in arms else arm.as_measured()


def _steps(request: SampleBlocks) -> Iterator[SampleBlocks]:
    """What both sides are asked, one after the other: to make ready, each block by itself, and to verify the answers.

    What is not sampling is no part of a block: its two halves would lie far apart.
    """
    ready = msgspec.structs.replace(request, num_blocks=0, verifies=False, settles=True)
    yield ready
    for _ in range(request.num_blocks):
        yield msgspec.structs.replace(ready, num_blocks=1)
    if request.verifies:
        yield msgspec.structs.replace(ready, verifies=True)


def _ask(client: WorkerClient, request: SampleBlocks, arms: Sequence[Arm]) -> Reply:
    """The answer; where the worker is lost, with the arm's index among all arms."""
    try:
        return client.ask(request)
    except WorkerLostError as lost:
        if lost.arm >= len(request.arms):
            raise
        arm = request.arms[lost.arm][0]
        raise WorkerLostError(lost.status, arms.index(_as_requested(arm, arms)), str(lost)) from None


def _merged(taken: Sequence[tuple[ArmSamples, ...]], block: int) -> dict[Arm, Sample]:
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
