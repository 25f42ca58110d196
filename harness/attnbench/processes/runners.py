"""Several runners behind the interface of one worker: each holds some arms, and takes its part of each block.

A process has a bias that all its blocks share: across processes, each epoch of fresh processes gives one number
(docs/adr/0020).
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Self

import msgspec

from attnbench.devices import device
from attnbench.processes import messages
from attnbench.processes.worker_client import ProcessClient, WorkerClient
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import BASE, PROBE, Arm, DeviceState, Key, Role, Sample, Status
from attnbench.timing.blocks import MIN_SAMPLE_S, WARM_S, choose, known
from attnbench.units import show
from attnbench.workloads.counts import compulsory_bytes
from attnbench.workloads.workload import Workload

Specs = tuple[tuple[Arm, str], ...]
"""Arms with the source of each implementation."""
FEWEST_WITNESSES = 3
NUM_LOOKS = 4
"""Witness samples, the first included, before a cell is called invalid."""
WITNESS_S = 8e-3
"""Least duration of a witness sample: coordinator and runner wake each other in a tenth of a millisecond."""
NUM_HANDED = 3
"""Outputs of a witness sample that are judged: several reveal sooner that some calls skip work."""
NUM_BRACKETS = 4
"""Parts of a witness sample that the coordinator times separately."""
WAKING_S = 0.4e-3
"""Seconds that a request may take in addition to its calls."""
AROUND_S = 3e-3
"""Seconds for the work around a sample, such as collecting garbage."""
PAGING_S_PER_BYTE = 0.25e-9
"""Cost of uncached inputs, and of pages for a kept output."""
MOST_BEFORE, BEFORE_S = 256, 0.25
"""Calls before a cell's first witness sample, and the seconds for them, at most."""
WITNESS_BYTES = 2**28
"""Largest size of inputs and outputs of a witness sample, unless two calls need more."""
DRAWS = random.SystemRandom()
"""Random numbers for witness samples, unpredictable for code under test."""
HIDDEN, FAR = 1.25, 2.0
"""A call that takes this many times as long on the coordinator's clock as in its samples refutes the samples. On a
machine that is busy with other work only the larger factor does, after subtracting the time lost to that work."""
MOST_UNTIMED = 2.0
"""An untimed call before a sample counts as at most this many timed ones, so that it cannot hide work."""
QUIET_SHARE = 0.05
"""On a quiet machine trusted processes wait for a processor during at most this share of their requests: waking each
other costs some percent on an idle machine, and each busy neighbour tens of percent."""


class Part(NamedTuple):
    """One runner's part of a visit."""

    client: WorkerClient
    arms: Specs
    owner: Arm | None = None  # the arm of an untrusted runner: it is responsible for any failure there

    @property
    def is_foreign(self) -> bool:
        """Whether the runner is untrusted."""
        return self.owner is not None


def take_turns(
    request: messages.SampleBlocks,
    parts: list[Part],
    ask: Callable[[Part, messages.SampleBlocks], VisitFinished | messages.Failed],
) -> VisitFinished | messages.Failed:
    """Take the blocks of a visit: in each block the runners take their parts one after the other, in a random order.

    Every request begins with untimed calls, since its process was asleep. If an arm has no samples yet, a first block
    is taken and dropped, so that all runners choose their settings from the same times of all arms.

    The slower of the interference probes counts, and slots are numbered across runners. All work besides sampling
    happens outside of the blocks, so that their parts stay close: runners prepare first, and verify their answers at
    the end.
    """
    draws = random.Random(request.seed)
    arms = [arm for part in parts for arm, _ in part.arms]
    samples: dict[Arm, list[Sample]] = {arm: [] for arm in dict.fromkeys([*[arm for arm, _ in request.arms], *arms])}
    called_s, states = 0.0, list[DeviceState]()
    seconds = dict(request.known)
    is_known = all(arm in seconds for arm in samples if arm != PROBE)
    ready = msgspec.structs.replace(request, num_blocks=0 if is_known else 1, verifies=False, settles=True)
    cool = msgspec.structs.replace(ready, num_blocks=0, sustained_s=0.0)  # the device stays hot after the first step
    block = msgspec.structs.replace(cool, num_blocks=1, is_clocked=True)
    last = msgspec.structs.replace(cool, verifies=True) if request.verifies else cool
    for step in [ready, *request.num_blocks * [block], last]:
        taken: dict[Arm, Sample] = {}
        num_before = 0
        for part in draws.sample(parts, len(parts)):
            seed, known_seconds = draws.getrandbits(53), tuple(seconds.items())
            reply = ask(part, msgspec.structs.replace(step, arms=part.arms, seed=seed, known=known_seconds))
            if isinstance(reply, messages.Failed):
                return reply
            called_s += reply.called_s
            states += reply.states
            for each in reply.arms if step.num_blocks else ():
                (sample,) = each.samples
                placed = msgspec.structs.replace(sample, block=len(samples[each.arm]), slot=num_before + sample.slot)
                taken[each.arm] = max(placed, taken.get(each.arm, placed), key=attrgetter("value"))
            num_before += len(reply.arms)
        if step is ready:
            seconds |= dict(known({arm: [sample] for arm, sample in taken.items()}))
            continue
        for arm, sample in taken.items():
            samples[arm].append(sample)
    return request.finished(samples, called_s, states)


class PairedClient(WorkerClient):
    """Two workers behind the interface of one: each side of a comparison has its own processes.

    Both have the same arms, A/A control and interference probe included, so that identical code is measured alike.
    """

    def __init__(self, base: WorkerClient, candidate: WorkerClient, seed: int) -> None:
        self.base, self.candidate, self.seed = base, candidate, seed
        self.both = base, candidate
        self._exits = ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether both workers are running."""
        return all(client.is_running for client in self.both)

    def start(self, layout: int = 0) -> messages.Started:
        """Start two fresh workers at the same time; draw at random which one gets which memory layout.

        Raises:
            ValueError: one cannot start.
        """
        layouts = [2 * layout, 2 * layout + 1]
        random.Random(f"{self.seed}/{layout}").shuffle(layouts)
        with ThreadPoolExecutor(len(self.both)) as pool:
            base, candidate = pool.map(lambda client, number: client.start(number), self.both, layouts)
        return messages.Started(environment=candidate.environment, base=base.environment)

    def ask(self, request: messages.Work) -> messages.Reply:
        """Send a request to the worker of its implementation; both take blocks in turn."""
        if isinstance(request, messages.SampleBlocks):
            return self._sample_blocks(request)
        is_base = not isinstance(request, messages.MeasureCeilings) and request.arm.side == BASE
        return (self.base if is_base else self.candidate).ask(request)

    def _sample_blocks(self, request: messages.SampleBlocks) -> messages.Reply:
        base = tuple((arm, spec) for arm, spec in request.arms if arm.side == BASE)
        candidate = [(arm, spec) for arm, spec in request.arms if arm.side != BASE and arm.role is Role.measured]
        candidate += [(arm.as_control(), spec) for arm, spec in candidate]  # as on the base
        parts = [Part(self.base, (*base, (PROBE, ""))), Part(self.candidate, (*candidate, (PROBE, "")))]
        reply = take_turns(request, parts, _whole)
        arms = [arm for arm, _ in request.arms]
        if isinstance(reply, messages.Failed) and reply.arm not in arms:  # the candidate's control is unknown outside
            return msgspec.structs.replace(reply, arm=reply.arm.as_measured())
        return reply

    def stop(self) -> None:
        """Stop both workers at once."""
        for client in self.both:
            client.stop()

    def __enter__(self) -> Self:
        for client in self.both:
            self._exits.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()


class _FailedError(Exception):
    """A request failed; carries the reply."""

    def __init__(self, failed: messages.Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


def _require(reply: messages.Reply) -> messages.Reply:
    """The reply, unless it is a failure.

    Raises:
        _FailedError: it is.
    """
    if isinstance(reply, messages.Failed):
        raise _FailedError(reply)
    return reply


def _whole(part: Part, step: messages.SampleBlocks) -> VisitFinished | messages.Failed:
    reply = part.client.ask(step)
    assert isinstance(reply, VisitFinished | messages.Failed)
    return reply


def _own(
    part: Part, step: messages.SampleBlocks, reply: VisitFinished | messages.Failed
) -> VisitFinished | messages.Failed:
    """Validate the reply of an untrusted runner: the requested arms, with positive times; otherwise Failed.

    Any failure in its process is attributed to the implementation that it holds.
    """
    assert part.owner is not None
    requested = [arm for arm, _ in step.arms]
    blamed = next((arm for arm in requested if arm != PROBE), part.owner)
    if isinstance(reply, messages.Failed):
        return reply if reply.arm in requested and reply.arm != PROBE else msgspec.structs.replace(reply, arm=blamed)
    samples = [sample for taken in reply.arms for sample in taken.samples]
    is_asked = [taken.arm for taken in reply.arms] == requested
    is_whole = len(samples) == step.num_blocks * len(requested)
    if not is_asked or not is_whole or any(each.value <= 0 or each.num_calls < 1 for each in samples):
        message = "its process answers what was not asked, or that a call takes 0 s"
        return messages.Failed(arm=blamed, status=Status.invalid, message=message)
    return reply


Factors = tuple[float, float]
"""The time of a witnessed call over a claimed one: as read, and without time that other work explains."""


class Reading(NamedTuple):
    """A request on the coordinator's clock: its seconds, and those lost to other work on the processor."""

    spent_s: float
    lost_s: float


class Turn(NamedTuple):
    """A runner's part of a block: seconds of its timed calls, and the reading of its request without untimed calls.

    The interference probe counts as additional time, so that it cannot hide work.
    """

    claimed_s: float
    reading: Reading

    @property
    def beyond_s(self) -> float:
        """Seconds of the request beyond its calls."""
        return self.reading.spent_s - self.claimed_s


def turn(step: messages.SampleBlocks, reply: VisitFinished, reading: Reading) -> Turn:
    """Compare the reading of a request with its samples.

    Untimed calls count only up to the requested number: a warm-up, which ends with the calls of a sample, and a call
    before each sample. Time lost to other work is assumed to be spread evenly over the request.
    """
    samples = [sample for taken in reply.arms if taken.arm != PROBE for sample in taken.samples]
    settings = choose(dict(step.known), MIN_SAMPLE_S, is_cold=step.cache == "cold")
    seconds = [sample.value * sample.num_calls for sample in samples]
    most_s = settings.is_touched * MOST_UNTIMED * sum(sample.value for sample in samples)
    most_s += settings.is_warmed * (WARM_S + max(seconds, default=0.0))
    untimed_s = min(most_s, sum(sample.untimed_s for taken in reply.arms for sample in taken.samples))
    rest_s = reading.spent_s - untimed_s
    return Turn(sum(seconds), Reading(rest_s, reading.lost_s * max(0.0, rest_s) / reading.spent_s))


@dataclass
class Load:
    """Time that other work takes from requests of trusted processes, which code under test cannot influence."""

    spent_s: float = 0.0
    lost_s: float = 0.0

    def add(self, reading: Reading) -> None:
        """Add the reading of a trusted process."""
        self.spent_s += reading.spent_s
        self.lost_s += reading.lost_s

    @property
    def share(self) -> float:
        """Share of the time in which these processes, or the coordinator, wait for a processor."""
        return min(1.0, self.lost_s / self.spent_s) if self.spent_s else 0.0

    @property
    def is_busy(self) -> bool:
        """Whether the share exceeds that of a quiet machine."""
        return self.share > QUIET_SHARE

    def explained(self, spent_s: float, lost_s: float) -> float:
        """Seconds of a request that other work explains; 0 on a quiet machine."""
        return min(spent_s, max(lost_s, self.share * spent_s)) if self.is_busy else 0.0


@dataclass
class Evidence:
    """The coordinator's readings of a cell's calls, for comparison with the runner's claims.

    Each is a pair: as read, and without the time explained by other work on the machine.
    """

    hidden: list[tuple[float, float]] = field(default_factory=list)  # seconds of a block beyond the claimed ones
    claimed: list[float] = field(default_factory=list)  # claimed seconds of the timed calls of a block
    factors: list[Factors] = field(default_factory=list)  # of each visit: time of a witnessed call over a claimed one
    was_busy: bool = False

    def add(self, turns: Sequence[Turn], factors: Factors, load: Load) -> None:
        """Add the parts of a visit's blocks, and its witness sample."""
        self.was_busy |= load.is_busy
        for each in turns:
            self.hidden.append((each.beyond_s, each.beyond_s - load.explained(*each.reading)))
            self.claimed.append(each.claimed_s)
        self.factors.append(factors)

    def improve(self, factors: Factors) -> None:
        """Use another witness sample of the last visit if it is better: disturbances do not last."""
        last = self.factors[-1]
        self.factors[-1] = min(last[0], factors[0]), min(last[1], factors[1])

    def doubt(self, call_s: float, waited_s: float) -> str:
        """Why the samples may misrepresent the time of a call, or ""; see `_fault` for the parameters."""
        return self._fault(0, HIDDEN, call_s, waited_s)

    def finding(self, call_s: float, waited_s: float) -> str:
        """Why the samples are wrong even if other work explains lost time, or ""."""
        return self._fault(1, FAR if self.was_busy else HIDDEN, call_s, waited_s)

    def _fault(self, member: int, bar: float, call_s: float, waited_s: float) -> str:
        """The fault of the samples by this member of each pair, in words, or "".

        `call_s` is the time of a call by the samples, `waited_s` the usual extra time of requests, and `bar` the factor
        by which the clocks must differ.
        """
        if len(self.factors) < FEWEST_WITNESSES:
            return ""
        factor = quartile(pair[member] for pair in self.factors)
        if factor > bar + 1 / len(self.factors):  # a few may all be disturbed
            return (
                f"by the coordinator's clock, and on inputs of its own, a call takes {show(factor * call_s, 's')}: "
                f"{factor:.3g}x slower than in its samples, which skip work, keep answers or hide time"
            )
        hidden_s, claimed_s = quartile(pair[member] for pair in self.hidden), statistics.median(self.claimed)
        if hidden_s > max(AROUND_S, 2 * waited_s) + (bar - 1) * claimed_s:
            took, claimed = show(hidden_s + claimed_s, "s"), show(claimed_s, "s")
            return f"by the coordinator's clock its samples in a block take {took}, and by its own {claimed}"
        return ""


def quartile(values: Iterable[float]) -> float:
    """The first quartile: hidden time raises most values, and disturbances only few."""
    ordered = sorted(values)
    return ordered[len(ordered) // 4]


class _Stopwatch:
    """Reads the coordinator's clock around the requests of one visit."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.now = clock
        self.load = Load()
        self.waited_s: list[float] = []  # extra time of the trusted worker's requests for a block
        self.turns: dict[Arm, list[Turn]] = {}  # for each foreign arm: the blocks of its runner

    def ask(self, part: Part, step: messages.SampleBlocks) -> VisitFinished | messages.Failed:
        """Request the part of a block."""
        if part.is_foreign and step.verifies:  # the judge verifies, not the process with the code
            step = msgspec.structs.replace(step, verifies=False)
        reply, reading = self.read(part, step)
        assert isinstance(reply, VisitFinished | messages.Failed)
        if part.is_foreign:
            reply = _own(part, step, reply)
        if isinstance(reply, messages.Failed) or not step.is_clocked:
            return reply
        taken = turn(step, reply, reading)
        if not part.is_foreign:
            self.waited_s.append(taken.beyond_s)
            return reply
        for arm, _ in part.arms:
            if arm.role is Role.measured:
                self.turns.setdefault(arm, []).append(taken)
        return reply

    def read(self, part: Part, request: messages.Work) -> tuple[messages.Reply, Reading]:
        """Send a request; return the reply and the reading."""
        lost_s, start_s = part.client.delayed_s, self.now()
        reply = part.client.ask(request)
        spent_s = self.now() - start_s
        reading = Reading(spent_s, max(0.0, part.client.delayed_s - lost_s))  # an ended thread takes its count along
        if not part.is_foreign:
            self.load.add(reading)
        return reply, reading


class IsolatingClient(WorkerClient):
    """A worker for the shared arms, and one more for each untrusted arm, which has a process of its own.

    The untrusted ones are started at their first request in an epoch. The coordinator's clock brackets all their
    samples, and each has a *witness sample* in each visit: an unpredictable number of calls, each on its own inputs,
    some of whose outputs, chosen afterwards, go to the judge. If both clocks differ, the cell is invalid, unless other
    work on the machine explains the difference: then its time is doubtful. Clocks are compared only on the host: of
    other devices the coordinator sees nothing but its own waiting.
    """

    def __init__(
        self, shared: ProcessClient, runner: Callable[[Arm], str], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Keep the shared worker, and the function from an arm to its process; "" is the shared one."""
        self.shared, self.runner, self.now = shared, runner, clock
        self.alone: dict[str, ProcessClient] = {}
        self.evidence: dict[Key, Evidence] = {}
        self.waited_s: list[float] = []  # extra time of the shared worker's requests for a block
        self.begun: set[Key] = set()  # cells that have had a witness sample
        self.layout = 0
        self._exits = ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether the shared worker is running."""
        return self.shared.is_running

    def start(self, layout: int = 0) -> messages.Started:
        """Restart the shared worker; the others start at their first request.

        Raises:
            ValueError: it cannot start.
        """
        self.stop()
        self.layout = layout
        return self.shared.start(layout)

    def ask(self, request: messages.Work) -> messages.Reply:
        """Send a request to the worker of its implementation; several take blocks in turn."""
        if isinstance(request, messages.SampleBlocks):
            return self._sample_blocks(request)
        runner = "" if isinstance(request, messages.MeasureCeilings) else self.runner(request.arm)
        return self._client(runner).ask(request)

    def _client(self, runner: str) -> ProcessClient:
        """The running worker with that name."""
        if not runner:
            return self.shared
        if runner not in self.alone:
            self.alone[runner] = self._exits.enter_context(self.shared.sibling())
        client = self.alone[runner]
        if not client.is_running:
            client.start(random.Random(f"{self.layout}/{runner}").getrandbits(31))
        return client

    def _sample_blocks(self, request: messages.SampleBlocks) -> messages.Reply:
        by_runner: dict[str, list[tuple[Arm, str]]] = {}
        for arm, spec in request.arms:
            by_runner.setdefault("" if arm == PROBE else self.runner(arm), []).append((arm, spec))
        if len(by_runner) == 1:
            return self.shared.ask(request)
        shared = Part(self._client(""), tuple(by_runner.pop("")))
        parts = []
        for name, specs in by_runner.items():  # with controls, since the baseline has one
            arms = dict.fromkeys([*specs, *((arm.as_control(), spec) for arm, spec in specs), (PROBE, "")])
            parts.append(Part(self._client(name), tuple(arms), owner=specs[0][0].as_measured()))
        watch = _Stopwatch(self.now)
        visit = take_turns(request, [shared, *parts], watch.ask)
        if isinstance(visit, messages.Failed):
            return msgspec.structs.replace(visit, arm=visit.arm.as_measured()) if visit.arm != PROBE else visit
        self.waited_s += watch.waited_s
        try:
            return msgspec.structs.replace(visit, doubts=self._doubts(request.workload, shared, parts, visit, watch))
        except _FailedError as error:
            return error.failed

    def _doubts(
        self, workload: Workload, shared: Part, parts: Sequence[Part], visit: VisitFinished, watch: "_Stopwatch"
    ) -> dict[str, str]:
        """Compare both clocks for each untrusted arm; return reasons to distrust its times, by implementation.

        Raises:
            _FailedError: the times cannot be true, or an answer is wrong.
        """
        disturbed = 1.0, 1.0  # effect of other work on any witness; unknown without a trusted one
        for arm, spec in [each for each in shared.arms if each[0].role is Role.measured][:1]:
            cell = {"workload": workload, "arm": arm, "spec": spec}
            usual = self._witness(cell, shared, visit.samples(arm), watch)
            disturbed = max(1.0, usual[0]), max(1.0, usual[1])
        doubts: dict[str, str] = {}
        for part in parts:
            for arm, spec in part.arms:
                if arm.role is Role.measured:
                    cell = {"workload": workload, "arm": arm, "spec": spec}
                    if doubt := self._doubt(cell, part, visit.samples(arm), watch, disturbed):
                        doubts[arm.implementation] = doubt
        return doubts

    def _doubt(
        self,
        cell: Mapping[str, Any],
        part: Part,
        samples: Sequence[Sample],
        watch: "_Stopwatch",
        disturbed: Factors,
    ) -> str:
        """Why the samples of a cell are doubtful, or "".

        Raises:
            _FailedError: they cannot be true, or an answer is wrong.
        """

        def witness() -> Factors:
            factors = self._witness(cell, part, samples, watch)
            return factors[0] / disturbed[0], factors[1] / disturbed[1]

        factors = witness()
        if not device(cell["workload"].device).is_host:
            return ""
        evidence = self.evidence.setdefault((cell["workload"].id, cell["arm"]), Evidence())
        evidence.add(watch.turns[cell["arm"]], factors, watch.load)
        call_s, waited_s = statistics.median(sample.value for sample in samples), quartile(self.waited_s or [0.0])
        for _ in range(NUM_LOOKS - 1):
            if not evidence.doubt(call_s, waited_s):
                return ""
            evidence.improve(witness())
        if wrong := evidence.finding(call_s, waited_s):
            raise _FailedError(messages.Failed(arm=cell["arm"], status=Status.invalid, message=wrong))
        return evidence.doubt(call_s, waited_s)

    def _witness(self, cell: Mapping[str, Any], part: Part, samples: Sequence[Sample], watch: "_Stopwatch") -> Factors:
        """Take a cell's witness sample; foreign code is judged.

        Raises:
            _FailedError: a call fails, or an answer is wrong.
        """
        workload, runner = cell["workload"], part.client
        claimed_s = statistics.median(sample.value for sample in samples)
        call_bytes = compulsory_bytes(workload)
        least = max(1, min(math.ceil(WITNESS_S / claimed_s), WITNESS_BYTES // call_bytes))
        number, seed = DRAWS.randint(least, 2 * least), DRAWS.getrandbits(53)
        is_first = part.is_foreign and (workload.id, cell["arm"]) not in self.begun
        self.begun.add((workload.id, cell["arm"]))
        before = DRAWS.randint(MOST_BEFORE // 2, MOST_BEFORE) if is_first else 0
        prepare = messages.PrepareWitness(**cell, num_before=before, before_s=BEFORE_S, num_calls=number, seed=seed)
        _require(runner.ask(prepare))
        brackets, size = [], math.ceil(number / NUM_BRACKETS)
        for first in range(0, number, size):
            last = min(first + size, number)
            reply, reading = watch.read(part, messages.Witness(**cell, first=first, last=last))
            _require(reply)
            brackets.append((reading, last - first))
        chosen = DRAWS.sample(range(number), min(NUM_HANDED, number) if part.is_foreign else 1)
        for num_later, call in reversed(list(enumerate(chosen))):
            handed = _require(runner.ask(messages.HandIn(**cell, number=call, is_last=not num_later)))
            assert isinstance(handed, messages.HandedIn)
            if part.is_foreign:
                row_seed = DRAWS.getrandbits(53)
                to_judge = messages.JudgeOutput(**cell, handed=handed, seed=seed, number=call, row_seed=row_seed)
                _require(self.shared.judged(to_judge))
        paging_s = call_bytes * PAGING_S_PER_BYTE

        def factor(explained_s: Callable[[float, float], float]) -> float:
            times = [(spent - explained_s(spent, lost) - WAKING_S) / calls for (spent, lost), calls in brackets]
            return (statistics.median(times) - paging_s) / claimed_s

        return factor(lambda *_: 0.0), factor(watch.load.explained)

    def stop(self) -> None:
        """Stop all workers at once."""
        for client in (self.shared, *self.alone.values()):
            client.stop()

    def __enter__(self) -> Self:
        self._exits.enter_context(self.shared)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()
