"""Several runners behind the interface of one worker: each holds some arms, and takes its part of each block.

A process has a bias that all its blocks share: across processes, each epoch of fresh processes gives one number
(docs/adr/0020).
"""

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, Self, cast

import msgspec

from attnbench.devices import device
from attnbench.devices.waiting import longest_wait_s
from attnbench.processes.messages import Failed, FailedError, HandedIn, SampleBlocks, Started, T, Target
from attnbench.processes.worker_client import ProcessClient, WorkerClient
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import BASE, CANDIDATE, PROBE, Arm, DeviceState, Key, Role, Sample, Status
from attnbench.timing.blocks import known
from attnbench.units import show
from attnbench.workloads.counts import compulsory_bytes
from attnbench.workloads.workload import Workload

SHARED = ""  # the runner of all trusted arms
FEWEST_WITNESSES = 3
NUM_LOOKS = 4  # witness samples, the first included, before a cell is called invalid
NUM_OWN_LOOKS = 2
"""Witness samples of the trusted arm: the shortest counts, since its extra cost excuses others."""
WITNESS_S = 8e-3
"""Least duration of a witness sample: coordinator and runner wake each other in a tenth of a millisecond."""
NUM_HANDED = 3
"""Outputs of a witness sample that are judged: several reveal sooner that some calls skip work."""
NUM_BRACKETS = 4  # parts of a witness sample that the coordinator times separately
WAKING_S = 0.2e-3  # seconds that a request may take in addition to its calls
MOST_GUESS = 1.0
"""Cost of uncached inputs, as a share of the claimed time, if no trusted arm shows it."""
LEAST_S, MOST_S = 1e-9, 1e9
"""The shortest and the longest call that an untrusted process may report."""
MOST_BEFORE = 256  # calls before a cell's first witness sample
WITNESS_BYTES = 2**28
"""Largest size of inputs and outputs of a witness sample, unless two calls need more."""
IDLE_S, BUSY_SHARE = 0.05, 0.5
"""Seconds of watching an untrusted process between its requests, and the largest share of a processor it may use."""
DRAWS = random.SystemRandom()
"""Random numbers for witness samples, unpredictable for code under test."""
HIDDEN, HIDDEN_BACKWARD, FAR = 1.25, 2.0, 10.0
"""A call that is slower by this factor on the coordinator's clock than in its samples refutes the samples; the second
is for calls with a backward pass, which take up to 1.8 times as long for honest code (docs/trust.md). On a machine that
is busy with other work only the largest factor does; the smaller ones make the time doubtful."""
LEAST_DEVICE_S = 5e-3
"""On other devices than the host, shorter calls may wait for their launches, and clocks are not compared."""
QUIET_SHARE = 0.05
"""On a quiet machine trusted processes wait for a processor during at most this share of their requests: waking each
other costs some percent on an idle machine, and each busy neighbour tens of percent."""


@dataclass
class Part:
    """One runner's part of a visit.

    Other work takes `lost_s` of the `spent_s` of requests of a trusted process, which code under test cannot influence.
    """

    client: WorkerClient
    arms: tuple[tuple[Arm, str], ...]  # with the source of each implementation
    owner: Arm | None = None  # the arm of an untrusted runner: it is responsible for any failure there
    now: Callable[[], float] = time.perf_counter
    spent_s: float = 0.0
    lost_s: float = 0.0

    def ask(self, function: str, result: type[T], /, **arguments: object) -> tuple[T, float]:
        """Call a function of the runner; return its result, and the seconds on the coordinator's clock.

        Raises:
            FailedError: it has failed.
        """
        waits, start_s = self.client.waits, self.now()
        reply = self.client.ask(function, result, **arguments)
        spent_s = self.now() - start_s
        if self.owner is None and function in {"sample_blocks", "witness"}:  # others draw inputs in many threads
            self.spent_s += spent_s
            self.lost_s += longest_wait_s(waits, self.client.waits)
        if isinstance(reply, Failed):
            raise FailedError(msgspec.structs.replace(reply, arm=self.owner or reply.arm))
        return reply, spent_s

    def sample(self, request: SampleBlocks) -> VisitFinished:
        """Sample blocks; the reply of an untrusted runner must have the requested arms, with positive times.

        Raises:
            FailedError: it has failed.
        """
        reply, _ = self.ask("sample_blocks", VisitFinished, visit=request)
        arms, samples = [arm for arm, _ in self.arms], [sample for taken in reply.arms for sample in taken.samples]
        is_whole = [taken.arm for taken in reply.arms] == arms and len(samples) == request.num_blocks * len(arms)
        is_possible = all(LEAST_S <= each.value <= MOST_S and each.num_calls > 0 for each in samples)
        if self.owner is not None and not (is_whole and is_possible):
            message = "its process answers what was not asked, or that a call takes 0 s"
            raise FailedError(Failed(arm=self.owner, status=Status.invalid, message=message))
        return reply


def take_turns(request: SampleBlocks, parts: list[Part]) -> VisitFinished:
    """Take the blocks of a visit: in each block the runners take their parts one after the other, in a random order.

    Every request begins with untimed calls, since its process was asleep. If an arm has no samples yet, a first block
    is taken and dropped, so that all runners choose their settings from the same times of all arms.

    The slowest interference probe of the trusted runners counts, and slots are numbered across runners. An untrusted
    one decides nothing but the times of its own arms. All work besides sampling happens outside of the blocks, so that
    their parts stay close: runners prepare first, and verify their answers at the end.

    Raises:
        FailedError: a runner has failed.
    """
    draws = random.Random(request.seed)
    arms = [arm for part in parts for arm, _ in part.arms]
    samples: dict[Arm, list[Sample]] = {arm: [] for arm in dict.fromkeys([*[arm for arm, _ in request.arms], *arms])}
    called_s, states = 0.0, list[DeviceState]()
    seconds = dict(request.known)
    is_known = all(arm in seconds for arm in samples if arm != PROBE)
    ready = msgspec.structs.replace(request, num_blocks=0 if is_known else 1, verifies=False, settles=True)
    # the device stays hot after the first step, and samples stay long
    cool = msgspec.structs.replace(ready, num_blocks=0, sustained_s=0.0, has_long_samples=request.sustained_s > 0)
    block = msgspec.structs.replace(cool, num_blocks=1)
    last = msgspec.structs.replace(cool, verifies=request.verifies)
    most, num_taken = request.num_blocks, 0
    for step in [ready, *request.num_blocks * [block], last]:
        if step is block and num_taken == most:
            continue
        taken: dict[Arm, Sample] = {}
        num_before = 0
        for part in draws.sample(parts, len(parts)):
            verifies = step.verifies and part.owner is None  # the judge verifies, not the process with the code
            fields = {"arms": part.arms, "seed": draws.getrandbits(53), "known": tuple(seconds.items())}
            reply = part.sample(msgspec.structs.replace(step, verifies=verifies, **fields))
            if part.owner is None:
                called_s += reply.called_s
                states += reply.states
            for each in reply.arms if step.num_blocks else ():
                if part.owner is not None and each.arm == PROBE:
                    continue
                (sample,) = each.samples
                place = {"epoch": request.epoch, "visit": request.number, "block": len(samples[each.arm])}
                placed = msgspec.structs.replace(sample, **place, slot=num_before + sample.slot)
                taken[each.arm] = max(placed, taken.get(each.arm, placed), key=attrgetter("value"))
            num_before += len(reply.arms)
        if step is ready:
            seconds |= dict(known({arm: [sample] for arm, sample in taken.items()}))
            continue
        for arm, sample in taken.items():
            samples[arm].append(sample)
        num_taken += step is block
        if request.longest_s and taken:  # a request has one block, so its runner cannot leave any out
            block_s = sum(each.value * each.num_calls for each in taken.values())
            most = max(1, min(most, int(request.longest_s / block_s)))
    return request.finished(samples, called_s, states)


def beyond(factors: Sequence[float], bar: float) -> float | None:
    """The first quartile if it is beyond the bar: skipped work raises most values, and disturbances only few.

    The factors are those of a cell's witness samples, one for each visit: the time of a call over the claimed one.
    """
    if len(factors) < FEWEST_WITNESSES:
        return None
    factor = sorted(factors)[len(factors) // 4]
    return factor if factor > bar + 1 / len(factors) else None  # a few may all be disturbed


def in_words(factor: float, claimed_s: float) -> str:
    """Explain why a call gets no time if it is slower than in its samples by this factor."""
    return (
        f"by the coordinator's clock, and on inputs of its own, a call takes {show(factor * claimed_s, 's')}: "
        f"{factor:.3g}x slower than in its samples, which skip work, keep answers or hide time"
    )


class Runners(WorkerClient):
    """Several workers behind the interface of one: of the sides of a comparison, or of trusted and untrusted arms.

    `clients` start with each epoch, by the name that `runner` gives to their arms. If the shared one is among them,
    any other name means an untrusted arm, which has a process of its own, started at its first request in an epoch, and
    a *witness sample* in each visit: an unpredictable number of calls, each on its own inputs, timed on the
    coordinator's clock. Some of their outputs, chosen afterwards, are judged. If both clocks differ, the cell is
    invalid, unless other work on the machine explains the difference: then its time is doubtful. On other devices than
    the host only long calls are compared, and only a large difference counts: the host may take longer than the device.

    Each runner has A/A controls and the interference probe, so that identical code is measured alike.
    """

    def __init__(
        self,
        clients: Mapping[str, WorkerClient],
        runner: Callable[[Arm], str],
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.clients, self.runner, self.seed, self.now = dict(clients), runner, seed, clock
        self.first = tuple(clients)
        self.evidence: Mapping[Key, tuple[Sequence[float], bool]] = {}  # of all visits in the journal
        self.begun: set[Key] = set()  # cells that have had a witness sample
        self.layout = 0
        self._exits = ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether all workers that start with an epoch are running."""
        return all(self.clients[name].is_running for name in self.first)

    def start(self, layout: int = 0) -> Started:
        """Start fresh workers at the same time, each with a random memory layout.

        Raises:
            ValueError: one cannot start.
        """
        self.stop()
        self.layout = layout
        with ThreadPoolExecutor(len(self.first)) as pool:
            replies = dict(zip(self.first, pool.map(self._start, self.first), strict=True))
        if BASE in replies:
            return msgspec.structs.replace(replies[CANDIDATE], base=replies[BASE].environment)
        return replies[SHARED]

    def _start(self, name: str) -> Started:
        return self.clients[name].start(random.Random(f"{self.seed}/{self.layout}/{name}").getrandbits(31))

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - of any function
        """Call a function of the worker of its implementation; several take blocks in turn."""
        if function == "sample_blocks":
            return cast("T | Failed", self._sample_blocks(arguments["visit"]))
        if function == "measure_ceilings":
            return self.clients[self.first[-1]].ask(function, result, **arguments)
        return self._client(self.runner(arguments["cell"].arm)).ask(function, result, **arguments)

    def _client(self, name: str) -> WorkerClient:
        """The running worker with that name."""
        if name not in self.clients:
            self.clients[name] = self._exits.enter_context(cast("ProcessClient", self.clients[SHARED]).sibling())
        if not self.clients[name].is_running:
            self._start(name)
        return self.clients[name]

    def _sample_blocks(self, request: SampleBlocks) -> VisitFinished | Failed:
        parts = self._parts(request)
        if len(parts) == 1:
            return parts[0].client.ask("sample_blocks", VisitFinished, visit=request)
        try:
            return self._witnessed(request.workload, parts, take_turns(request, parts))
        except FailedError as error:
            failed = error.failed
            for part in parts:
                if part.owner is not None and part.owner == failed.arm.as_measured():
                    part.client.stop()  # what it left at work would disturb the others
            is_known = failed.arm in dict(request.arms)  # a control may be unknown outside
            return failed if is_known else msgspec.structs.replace(failed, arm=failed.arm.as_measured())

    def _parts(self, request: SampleBlocks) -> list[Part]:
        """The arms of each runner; each has the probe, and a control of each arm unless it has controls already."""
        by_runner: dict[str, list[tuple[Arm, str]]] = {SHARED: []} if SHARED in self.clients else {}
        for arm, spec in request.arms:
            if arm != PROBE:
                by_runner.setdefault(self.runner(arm.as_measured()), []).append((arm, spec))
        parts = list[Part]()
        for name in sorted(by_runner, key=lambda name: name not in self.first):
            arms, is_foreign = by_runner[name], name not in self.first
            if name != SHARED and all(arm.role is Role.measured for arm, _ in arms):
                arms = [*arms, *((arm.as_control(), spec) for arm, spec in arms)]
            owner = arms[0][0].as_measured() if is_foreign else None
            parts.append(Part(self._client(name), (*arms, (PROBE, "")), owner, self.now))
        return parts

    def _witnessed(self, workload: Workload, parts: Sequence[Part], visit: VisitFinished) -> VisitFinished:
        """Compare both clocks for each untrusted arm; add the factors, and reasons to distrust its times.

        Calls on uncached inputs, each with an output of its own, take longer than those of a sample. The fastest
        trusted arm shows how much longer: its heads may be grouped where others read repeated ones, and on a busy
        machine other work takes a share of each call. Without a trusted arm the cost of memory is a guess.
        """
        measured = [(part, cell) for part in parts for cell in part.arms if cell[0].role is Role.measured]
        cells = [(part, cell) for part, cell in measured if part.owner is not None]
        trusted = [(part, cell) for part, cell in measured if part.owner is None]
        own_s, extra_s = math.inf, None
        if cells and trusted:
            part, cell = min(trusted, key=lambda each: _claimed_s(visit, each[1][0]))
            own_s = _claimed_s(visit, cell[0])
            call_s = min(self._witness(workload, part, cell, visit) for _ in range(NUM_OWN_LOOKS))
            extra_s = max(0.0, call_s - own_s) * workload.num_heads / workload.num_kv_heads

        def is_busy() -> bool:
            """Whether trusted processes, or the coordinator, wait for a processor more than on a quiet machine."""
            return sum(part.lost_s for part in parts) > QUIET_SHARE * sum(part.spent_s for part in parts)

        def factor(part: Part, cell: tuple[Arm, str]) -> float:
            """The time of a call, without the extra cost, over the claimed time."""
            claimed_s, call_s = _claimed_s(visit, cell[0]), self._witness(workload, part, cell, visit)
            scale = max(1.0, claimed_s / own_s) if is_busy() else 1.0
            return (call_s - (MOST_GUESS * claimed_s if extra_s is None else extra_s * scale)) / claimed_s

        is_host = device(workload.device).is_host
        has_backward = workload.direction in {"backward", "forward_backward"}
        factors, least = dict[str, float](), (HIDDEN_BACKWARD if has_backward else HIDDEN) if is_host else FAR
        doubts: dict[str, str] = {}
        for part, cell in cells:
            _require_idle(cast("ProcessClient", part.client), cell[0])
            found = factor(part, cell)
            if not is_host and found * _claimed_s(visit, cell[0]) < LEAST_DEVICE_S:
                continue
            arm, (earlier, was_busy) = cell[0], self.evidence.get((workload.id, cell[0]), ((), False))
            for _ in range(NUM_LOOKS - 1):  # another look may be better: disturbances do not last
                if beyond([*earlier, found], least) is not None:
                    found = min(found, factor(part, cell))
            factors[arm.implementation], seen = found, [*earlier, found]
            if (doubtful := beyond(seen, least)) is None:
                continue
            doubts[arm.implementation] = in_words(doubtful, _claimed_s(visit, arm))
            if beyond(seen, FAR if was_busy or is_busy() or extra_s is None else least) is not None:
                raise FailedError(Failed(arm=arm, status=Status.invalid, message=doubts[arm.implementation]))
        return msgspec.structs.replace(visit, factors=factors, is_busy=is_busy(), doubts=doubts)

    def _witness(self, workload: Workload, part: Part, measured: tuple[Arm, str], visit: VisitFinished) -> float:
        """Take a cell's witness sample, and judge foreign code; return the seconds of a call."""
        arm, spec = measured
        cell, is_foreign = Target(workload=workload, arm=arm, spec=spec), part.owner is not None
        held_bytes = compulsory_bytes(workload) * workload.num_heads // workload.num_kv_heads  # heads may be repeated
        least = max(1, min(math.ceil(WITNESS_S / _claimed_s(visit, arm)), WITNESS_BYTES // held_bytes))
        number, seed = max(2, DRAWS.randint(least, 2 * least)), DRAWS.getrandbits(53)  # one may be finished afterwards
        is_first = is_foreign and (workload.id, arm) not in self.begun
        self.begun.add((workload.id, arm))
        before = DRAWS.randint(MOST_BEFORE // 2, MOST_BEFORE) if is_first else 0
        part.ask("prepare_witness", NoneType, cell=cell, num_before=before, num_calls=number, seed=seed)
        call_s, size = list[float](), math.ceil(number / NUM_BRACKETS)
        for first in range(0, number, size):
            last = min(first + size, number)
            _, spent_s = part.ask("witness", NoneType, cell=cell, first=first, last=last)
            call_s.append((spent_s - WAKING_S) / (last - first))
        chosen = tuple(DRAWS.sample(range(number), min(NUM_HANDED, number) if is_foreign else 1))
        handed, _ = part.ask("hand_in", HandedIn, cell=cell, numbers=chosen)
        if is_foreign:
            drawn = {"seed": seed, "numbers": chosen, "row_seed": DRAWS.getrandbits(53)}
            judge = Part(self.clients[SHARED], part.arms, part.owner)
            judge.ask("judge_output", NoneType, cell=cell, handed=handed, **drawn)
        return statistics.median(call_s)

    def abandon(self) -> None:
        """See WorkerClient."""
        for name in self.first:
            self.clients[name].abandon()

    def stop(self) -> None:
        """Stop all workers at once."""
        for client in self.clients.values():
            client.stop()

    def __enter__(self) -> Self:
        for name in self.first:
            self._exits.enter_context(self.clients[name])
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()


def _require_idle(client: ProcessClient, arm: Arm) -> None:
    """Check that neither threads nor children of an untrusted process use the processors between its requests.

    Raises:
        FailedError: one does, even on a second look.
    """
    for _ in range(NUM_LOOKS):
        before_s = client.processor_s
        time.sleep(IDLE_S)
        if (share := (client.processor_s - before_s) / IDLE_S) < BUSY_SHARE:
            return
    message = f"between its calls it goes on using {share:.0%} of a processor, in threads or processes"
    raise FailedError(Failed(arm=arm, status=Status.error, message=message))


def _claimed_s(visit: VisitFinished, arm: Arm) -> float:
    """The median seconds of a call in the samples of an arm."""
    return statistics.median(sample.value for sample in visit.samples(arm))
