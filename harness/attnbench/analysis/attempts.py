"""The calls that check a prediction: asked of a worker, one near either side of the limit, none that lasts too long."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from attnbench.analysis.growth import Growth, Outcome
from attnbench.devices import device
from attnbench.processes.messages import Attempt, Attempted, Failed
from attnbench.processes.worker_client import WorkerClient
from attnbench.storage.memory_events import Timeline
from attnbench.storage.records import Arm, Status
from attnbench.units import duration

SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(2**17)}
"""Of the worker: large blocks come from the system and go back to it, so that the limit is on what is in use
(mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html)."""
SHARE_OF_FREE = 0.75
"""What is tried where no limit is given."""


@dataclass(frozen=True, kw_only=True)
class Followed:
    """One call of an implementation at one length, event by event."""

    growth: Growth
    length: int
    timeline: Timeline


@dataclass(frozen=True, kw_only=True)
class Asking:
    """Asks for calls; `specs` say where each implementation comes from, `say` receives what is under way."""

    client: WorkerClient
    specs: dict[str, str]
    call_limit_s: float
    say: Callable[[str], object]

    def limited(self, growths: Sequence[Growth], limit_bytes: float, *, tries: bool) -> list[Growth]:
        """The same with the limit, and the outcomes of calls near it; without a limit, what is free is shared out."""
        return [self._limited(growth, limit_bytes, tries=tries) for growth in growths]

    def _limited(self, growth: Growth, limit_bytes: float, *, tries: bool) -> Growth:
        if growth.fit is None:
            return growth
        longest = growth.fit.lengths[-1]
        base = self._ask(growth, longest) if tries or not limit_bytes else None
        if isinstance(base, Attempted):
            limit_bytes = limit_bytes or SHARE_OF_FREE * base.free_bytes
        found = replace(growth, limit_bytes=limit_bytes)
        if not tries:
            return found
        outcomes = [self._try(found, outcome, base, longest) for outcome in found.tries()]
        return replace(found, outcomes=tuple(outcomes))

    def _try(self, growth: Growth, outcome: Outcome, base: Attempted | Failed | None, longest: int) -> Outcome:
        """A call, unless it is predicted to last too long: twice the length is four times the work, at the most."""
        if not isinstance(base, Attempted):
            text = "" if base is None else f"not even T={longest} could be called again: {base.message}"
            return msgspec.structs.replace(outcome, message=text)
        call_s = base.call_s * (outcome.length / longest) ** 2
        if call_s > self.call_limit_s:
            text = f"one call is predicted to last {duration(call_s)}, over the limit of {duration(self.call_limit_s)}"
            return msgspec.structs.replace(outcome, message=text)
        found = self._ask(growth, outcome.length, limit_bytes=int(growth.limit_bytes))
        if isinstance(found, Attempted):
            return msgspec.structs.replace(outcome, status=Status.ok, measured_bytes=float(found.peak_bytes))
        status = None if found.status is Status.unsupported else found.status
        return msgspec.structs.replace(outcome, status=status, message=found.message)

    def followed(self, growths: Sequence[Growth], length: int) -> Iterator[Followed]:
        """Each implementation's call at that length; one that fails, or is not on the host, is named and left out."""
        for growth in growths:
            found = self._ask(growth, length)
            if isinstance(found, Attempted) and found.timeline is not None:
                yield Followed(growth=growth, length=length, timeline=found.timeline)
            else:
                reason = found.message if isinstance(found, Failed) else "allocations are seen on the CPU alone"
                self.say(f"no timeline of {growth.implementation}: {reason}")

    def snapshots(self, growths: Sequence[Growth], folder: Path) -> Iterator[Path]:
        """The memory snapshot of each implementation at its longest length."""
        for growth in growths:
            workload = growth.workload(growth.points[-1][0])
            path = (folder / f"snapshot-{workload.id}-{growth.implementation}.pickle").absolute()
            if not device(workload.device).has_caching_allocator:
                self.say(f"no snapshot of {growth.implementation} on {workload.device}: no allocator keeps a history")
                continue
            found = self._ask(growth, growth.points[-1][0], snapshot=str(path))
            if isinstance(found, Failed):
                self.say(f"no snapshot of {growth.implementation}: {found.message}")
            else:
                yield path

    def _ask(self, growth: Growth, length: int, *, limit_bytes: int = 0, snapshot: str = "") -> Attempted | Failed:
        self.say(f"{growth.implementation}: one call at {growth.panel.axis} {length}")
        arm, spec = Arm(implementation=growth.implementation), self.specs[growth.implementation]
        workload = growth.workload(length)
        if not self.client.is_running:
            self.client.start()
        reply = self.client.ask(
            Attempt(workload=workload, arm=arm, spec=spec, limit_bytes=limit_bytes, snapshot=snapshot)
        )
        assert isinstance(reply, Attempted | Failed)
        return reply
