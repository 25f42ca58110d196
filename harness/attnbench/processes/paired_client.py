"""Two workers that look like one: each side of a comparison in processes of its own, their blocks interleaved.

Every block is taken by both processes, one right after the other in a random order, while the other's threads sleep.
Both have the same arms, down to A/A control and interference probe: identical code is measured alike. A process has a
bias of its own, which its blocks share: what counts is one number for each pair of processes (docs/adr/0020). Knows
nothing of torch.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from operator import attrgetter
from typing import Self

import msgspec

from attnbench.processes.messages import Failed, MeasureCeilings, Reply, SampleBlocks, Started, Work
from attnbench.processes.worker_client import WorkerClient, WorkerLostError
from attnbench.storage.events import ArmSamples, VisitFinished
from attnbench.storage.records import BASE, PROBE, Arm, Role, Sample


class PairedClient:
    """Asks the worker that an implementation belongs to; blocks are asked of both, in turn."""

    def __init__(self, base: WorkerClient, candidate: WorkerClient, seed: int) -> None:
        """Nothing is started yet."""
        self.base, self.candidate, self.seed = base, candidate, seed
        self.both = base, candidate
        self._exits = ExitStack()

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
        """The answer to a request; where a worker is lost, the index is that of the arm in the whole request."""
        if isinstance(request, SampleBlocks):
            return self._sample_blocks(request)
        is_base = not isinstance(request, MeasureCeilings) and request.arm.side == BASE
        return (self.base if is_base else self.candidate).ask(request)

    def _sample_blocks(self, request: SampleBlocks) -> Reply:
        draws = random.Random(request.seed)
        base = [(arm, spec) for arm, spec in request.arms if arm.side == BASE]
        candidate = [(arm, spec) for arm, spec in request.arms if arm.side != BASE and arm.role is Role.measured]
        candidate += [(arm.as_control(), spec) for arm, spec in candidate]  # as the base has them
        halves = [(self.base, (*base, (PROBE, ""))), (self.candidate, (*candidate, (PROBE, "")))]
        arms = [arm for arm, _ in request.arms]
        samples: dict[Arm, list[Sample]] = {arm: [] for arm in dict.fromkeys([*arms, *[arm for arm, _ in candidate]])}
        called_s = 0.0

        def as_requested(arm: Arm) -> Arm:  # the request knows nothing of the candidate's A/A control
            return arm if arm in arms else arm.as_measured()

        # What is not sampling is no part of a block, since its two halves would lie far apart: both make ready first,
        # and verify their answers in the end.
        ready = msgspec.structs.replace(request, num_blocks=0, verifies=False, settles=True)
        steps = [ready, *request.num_blocks * [msgspec.structs.replace(ready, num_blocks=1)]]
        steps += [msgspec.structs.replace(ready, verifies=True)] if request.verifies else []
        for step in steps:
            taken: dict[Arm, Sample] = {}  # slots are counted through; of the interference probes the slower counts
            num_before = 0
            for client, half in draws.sample(halves, len(halves)):
                try:
                    reply = client.ask(msgspec.structs.replace(step, arms=half, seed=draws.getrandbits(53)))
                except WorkerLostError as lost:
                    if lost.arm >= len(half):
                        raise
                    lost_arm = as_requested(half[lost.arm][0])
                    raise WorkerLostError(lost.status, arms.index(lost_arm), str(lost)) from None
                if isinstance(reply, Failed):
                    return msgspec.structs.replace(reply, arm=as_requested(reply.arm))
                assert isinstance(reply, VisitFinished)
                called_s += reply.called_s
                for each in reply.arms if step.num_blocks else ():
                    (sample,) = each.samples
                    placed = msgspec.structs.replace(
                        sample, block=len(samples[each.arm]), slot=num_before + sample.slot
                    )
                    taken[each.arm] = max(placed, taken.get(each.arm, placed), key=attrgetter("value"))
                num_before += len(reply.arms)
            for arm, sample in taken.items():
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
