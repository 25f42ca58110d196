"""Several workers behind the interface of one: each runs some of the arms (implementations) in its part of each block.

All blocks of a process share the bias of that process. A comparison of arms in two processes therefore gets only one
number from each epoch, that is, from each start of fresh processes (docs/adr/0020).
"""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from operator import attrgetter
from types import NoneType
from typing import Any, Self, cast

import msgspec

from attnbench.processes.messages import Failed, FailedError, HandedIn, SampleBlocks, Started, T, Target
from attnbench.processes.worker_client import ProcessClient, WorkerClient
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import BASE, CANDIDATE, PROBE, Arm, DeviceState, Sample, Status
from attnbench.timing.blocks import known
from attnbench.workloads.counts import compulsory_bytes
from attnbench.workloads.workload import Workload

SHARED = ""  # name of the worker of all trusted arms
TURN_S = 80e-3
"""Least total seconds of the samples in one turn of a worker, divided among its arms. It is long compared with the
20 ms of untimed calls at the start of a turn (`WARM_S`)."""
LEAST_S, MOST_S = 1e-9, 1e9
"""The shortest and the longest call, in seconds, that an untrusted process may report."""
REFEREED_S = 20e-3
"""Least seconds of a sample that a `Referee` takes: long compared with the 0.1 ms that coordinator and worker need to
wake each other."""
REFEREED_BYTES = 2**28
"""Most bytes for the inputs and outputs of all calls in one sample of a `Referee`. This limits the number of calls, but
not to fewer than two. The actual number is random, up to twice as large, so that code cannot predict it."""
NUM_JUDGED_FIRST, NUM_JUDGED = 3, 1  # judged outputs of a cell's first sample in a visit, and of each later sample
NUM_LOOKS, IDLE_S, BUSY_SHARE = 4, 0.05, 0.5
"""An untrusted process must be nearly idle between requests. It is watched up to NUM_LOOKS times, for IDLE_S seconds
each, and must use less than the share BUSY_SHARE of one processor in at least one of these times."""
DRAWS = random.SystemRandom()
"""Random numbers for the samples of a `Referee`; code under test cannot predict them."""


@dataclass
class Part:
    """One worker's part of a visit (a few timed blocks of a workload): its client, and the arms that it samples."""

    client: WorkerClient
    arms: tuple[tuple[Arm, str], ...]  # each with the spec of its implementation
    owner: Arm | None = None  # the arm of an untrusted worker, responsible for all failures there; None: trusted

    @property
    def num_arms(self) -> int:
        """The number of arms, not counting the interference probe."""
        return sum(arm != PROBE for arm, _ in self.arms)

    def ask(self, function: str, result: type[T], /, **arguments: object) -> T:
        """Call a function of the worker; return the result.

        Raises:
            FailedError: the request has failed.
        """
        reply = self.client.ask(function, result, **arguments)
        if isinstance(reply, Failed):
            raise FailedError(msgspec.structs.replace(reply, arm=self.owner or reply.arm))
        return reply

    def sample(self, request: SampleBlocks) -> VisitFinished:
        """Sample blocks; require that the reply of an untrusted worker has the requested arms and possible times.

        Raises:
            FailedError: the request has failed, or the reply is invalid.
        """
        reply = self.ask("sample_blocks", VisitFinished, visit=request)
        arms, samples = [arm for arm, _ in self.arms], [sample for taken in reply.arms for sample in taken.samples]
        is_whole = [taken.arm for taken in reply.arms] == arms and len(samples) == request.num_blocks * len(arms)
        is_possible = all(LEAST_S <= each.value <= MOST_S and each.num_calls > 0 for each in samples)
        if self.owner is not None and not (is_whole and is_possible):
            message = "its process sent other samples than requested, or an impossible time, such as 0 s"
            raise FailedError(Failed(arm=self.owner, status=Status.invalid, message=message))
        return reply


def take_turns(request: SampleBlocks, parts: list[Part]) -> VisitFinished:
    """Time the blocks of a visit: in each block the workers sample their parts one by one, in a random order.

    Every turn begins with untimed calls, because the worker was asleep. If the time of any arm is unknown, a first
    block is sampled and dropped, so that all workers derive their settings from the same times of all arms.

    In each block, the slowest sample of the interference probe by a trusted worker counts. The positions in a
    block are numbered across workers. An untrusted worker affects only the times of its own arms. Workers prepare
    before the first block and verify their answers after the last one, so that the parts of a block are close in time.

    Raises:
        FailedError: a worker has failed.
    """
    draws = random.Random(request.seed)
    arms = [arm for part in parts for arm, _ in part.arms]
    samples: dict[Arm, list[Sample]] = {}
    for arm in (*(arm for arm, _ in request.arms), *arms):
        samples.setdefault(arm, [])
    called_s, states = 0.0, list[DeviceState]()
    seconds = dict(request.known)
    is_known = all(arm in seconds for arm in samples if arm != PROBE)
    sample_s = TURN_S / max(part.num_arms for part in parts)
    usual = {"verifies": False, "settles": True, "sample_s": max(request.sample_s, sample_s)}
    ready = msgspec.structs.replace(request, num_blocks=0 if is_known else 1, **usual)
    cool = msgspec.structs.replace(ready, num_blocks=0, sustained_s=0.0)  # the device stays hot after the first step
    block = msgspec.structs.replace(cool, num_blocks=1)
    last = msgspec.structs.replace(cool, verifies=request.verifies)
    most, num_taken = request.num_blocks, 0
    for step in [ready, *request.num_blocks * [block], last]:
        if step is block and num_taken == most:
            continue
        taken: dict[Arm, Sample] = {}
        num_before = 0
        for part in draws.sample(parts, len(parts)):
            fields = {"arms": part.arms, "seed": draws.getrandbits(53), "known": tuple(seconds.items())}
            reply = part.sample(msgspec.structs.replace(step, **fields))
            if part.owner is None:
                called_s += reply.called_s
                states += reply.states
            for each in reply.arms if step.num_blocks else ():
                if part.owner is not None and each.arm == PROBE:
                    continue
                (sample,) = each.samples
                placed = _placed(sample, request, len(samples[each.arm]), num_before + sample.slot)
                taken[each.arm] = max(placed, taken.get(each.arm, placed), key=attrgetter("value"))
            num_before += len(reply.arms)
        if step is ready:
            seconds |= dict(known({arm: [sample] for arm, sample in taken.items()}))
            continue
        for arm, sample in taken.items():
            samples[arm].append(sample)
        num_taken += step is block
        if request.longest_s and taken:  # a request has one block, so a worker cannot keep to the limit by itself
            block_s = sum(each.value * each.num_calls for each in taken.values())
            most = max(1, min(most, int(request.longest_s / block_s)))
    return request.finished(samples, called_s, states)


def _placed(sample: Sample, request: SampleBlocks, block: int, slot: int) -> Sample:
    """Return the sample with its process (epoch), visit, block and position in the block (slot) filled in."""
    return msgspec.structs.replace(sample, epoch=request.epoch, visit=request.number, block=block, slot=slot)


class Referee:
    """A timer that samples the blocks of a visit with the coordinator's clock, for code that may cheat.

    A sample is the time of one request, in which a worker makes prepared calls, each on new random inputs. Afterwards
    the judge checks randomly chosen outputs of untrusted code. Times that the worker reports are not used, so a
    sample includes the 0.1 ms that coordinator and worker need to wake each other.
    """

    def __init__(self, judge: WorkerClient, now: Callable[[], float]) -> None:
        self.judge, self.now = judge, now

    def visit(self, request: SampleBlocks, parts: Sequence[Part]) -> VisitFinished:
        """Time the blocks of a visit, each with the arms in a random order.

        Raises:
            FailedError: a worker has failed, an untrusted one is busy between requests, or an output is wrong.
        """
        for part in parts:
            if part.owner is not None:
                _require_idle(cast("ProcessClient", part.client), part.owner)
        cells = [
            (part, Target(workload=request.workload, arm=arm, spec=spec))
            for part in parts
            for arm, spec in part.arms
            if arm != PROBE
        ]
        seconds = dict(request.known)
        for part, cell in cells:
            seconds.setdefault(cell.arm, self._typical_s(part, cell))
        samples: dict[Arm, list[Sample]] = {cell.arm: [] for _, cell in cells}
        num_judged = dict.fromkeys(samples, NUM_JUDGED_FIRST)
        start_s, most = self.now(), request.num_blocks
        for block in range(request.num_blocks):
            if block == most:
                break
            for slot, (part, cell) in enumerate(DRAWS.sample(cells, len(cells))):
                number = _num_calls(request.workload, seconds[cell.arm])
                sample = self._sample(part, cell, DRAWS.randint(number, 2 * number), num_judged[cell.arm])
                samples[cell.arm].append(_placed(sample, request, block, slot))
                num_judged[cell.arm] = NUM_JUDGED
            if request.longest_s:
                most = max(1, int(request.longest_s * (block + 1) / (self.now() - start_s)))
        called_s = sum(sample.value * sample.num_calls for taken in samples.values() for sample in taken)
        return request.finished(samples, called_s)

    def _typical_s(self, part: Part, cell: Target) -> float:
        """Estimate the seconds of a call: raise the number of calls of a sample until the sample is long enough.

        The first sample does not count, because its calls may compile.
        """
        number = 2
        self._sample(part, cell, number, NUM_JUDGED_FIRST)
        while True:
            call_s = self._sample(part, cell, number, NUM_JUDGED).value
            if (most := _num_calls(cell.workload, call_s)) <= 2 * number:
                return call_s
            number = min(4 * number, most)

    def _sample(self, part: Part, cell: Target, number: int, num_judged: int) -> Sample:
        """Time `number` calls, and judge `num_judged` of their outputs if the code is untrusted.

        Raises:
            FailedError: the calls fail, or an output is wrong.
        """
        seed = DRAWS.getrandbits(53)
        part.ask("prepare_calls", NoneType, cell=cell, num_calls=number, seed=seed)
        start_s = self.now()
        part.ask("make_calls", NoneType, cell=cell)
        spent_s = self.now() - start_s
        is_foreign = part.owner is not None
        chosen = tuple(DRAWS.sample(range(number), min(num_judged, number) if is_foreign else 0))
        handed = part.ask("hand_in", HandedIn, cell=cell, numbers=chosen)
        if is_foreign:
            drawn = {"seed": seed, "numbers": chosen, "row_seed": DRAWS.getrandbits(53)}
            Part(self.judge, part.arms, part.owner).ask("judge_output", NoneType, cell=cell, handed=handed, **drawn)
        return Sample(value=spent_s / number, num_calls=number, start_s=start_s)


def _num_calls(workload: Workload, call_s: float) -> int:
    """Return the number of calls that last REFEREED_S, or fewer if their data exceeds REFEREED_BYTES; at least 2."""
    held_bytes = compulsory_bytes(workload) * workload.num_heads // workload.num_kv_heads  # heads may be repeated
    return max(2, min(math.ceil(REFEREED_S / call_s), REFEREED_BYTES // held_bytes))


class WorkerPool(WorkerClient):
    """Several workers behind the interface of one: for two states of the code, or for trusted and untrusted arms.

    The first form compares two states of the code, each in its own worker. In the second, a shared worker runs all
    trusted arms, and each untrusted arm has its own worker, which starts at its first request in an epoch (the time
    from one `start` to the next). The workers in `clients` start at the beginning of each epoch. `runner` maps an arm
    to the name of its worker. Every worker also times the interference probe, so that identical code is timed in the
    same way in all workers.
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
        self.layout = 0
        self._exits = ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether all workers that `start` starts are running."""
        return all(self.clients[name].is_running for name in self.first)

    def start(self, layout: int = 0) -> Started:
        """Start fresh workers at the same time, each with a memory layout of its own that depends on `layout`.

        Raises:
            ValueError: a worker cannot start.
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

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - their types depend on the function
        """Call a function of the worker that runs the cell's arm; in a visit, all workers sample in turn."""
        if function == "sample_blocks":
            return cast("T | Failed", self._sample_blocks(arguments["visit"]))
        if function == "measure_ceilings":
            return self.clients[self.first[-1]].ask(function, result, **arguments)
        return self._client(self.runner(arguments["cell"].arm)).ask(function, result, **arguments)

    def _client(self, name: str) -> WorkerClient:
        """Return the client of the worker with that name; start the worker if necessary."""
        if name not in self.clients:
            self.clients[name] = self._exits.enter_context(cast("ProcessClient", self.clients[SHARED]).sibling())
        if not self.clients[name].is_running:
            self._start(name)
        return self.clients[name]

    def _sample_blocks(self, request: SampleBlocks) -> VisitFinished | Failed:
        parts = self._parts(request)
        if len(parts) == 1 and not request.is_refereed:
            return parts[0].client.ask("sample_blocks", VisitFinished, visit=request)
        try:
            if request.is_refereed:
                return Referee(self.clients[self.first[-1]], self.now).visit(request, parts)
            return take_turns(request, parts)
        except FailedError as error:
            failed = error.failed
            for part in parts:
                if part.owner is not None and part.owner == failed.arm:
                    part.client.stop()  # threads that it left running would disturb the others
            return failed

    def _parts(self, request: SampleBlocks) -> list[Part]:
        """Divide a visit by worker or, for a `Referee`, by arm; each part also has the interference probe."""
        by_runner: dict[str, list[tuple[Arm, str]]] = {SHARED: []} if SHARED in self.clients else {}
        for arm, spec in request.arms:
            if arm != PROBE:
                by_runner.setdefault(self.runner(arm), []).append((arm, spec))
        parts = list[Part]()
        for name in sorted(by_runner, key=lambda name: name not in self.first):
            arms, is_trusted = by_runner[name], name == SHARED or (name in self.first and not request.is_refereed)
            for group in [[each] for each in arms] if request.is_refereed else [arms]:
                owner = None if is_trusted else group[0][0]
                parts.append(Part(self._client(name), (*group, (PROBE, "")), owner))
        return parts

    def abandon(self) -> None:
        """Make the requests in progress fail, and start no more processes."""
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


class ByThreads(WorkerClient):
    """One worker for each number of threads, because a process keeps the number of threads with which it started."""

    def __init__(self, clients: Mapping[int, WorkerClient]) -> None:
        self.clients, self.latest, self.layout = dict(clients), next(iter(clients)), 0

    @property
    def is_running(self) -> bool:
        """Whether the worker of the latest request is running."""
        return self.clients[self.latest].is_running

    def start(self, layout: int = 0) -> Started:
        """End all workers and start the first one; the others start at their first request.

        Raises:
            ValueError: the first worker cannot start.
        """
        self.stop()
        self.layout, self.latest = layout, next(iter(self.clients))
        return self.clients[self.latest].start(layout)

    def ask(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - their types depend on the function
        """Call a function of the worker with the workload's number of threads."""
        about = arguments.get("visit") or arguments.get("cell")
        workload: Workload = arguments["workload"] if about is None else about.workload
        self.latest = workload.num_threads
        client = self.clients[self.latest]
        if not client.is_running:
            client.start(self.layout)
        return client.ask(function, result, **arguments)

    def abandon(self) -> None:
        """Make the requests in progress fail, and start no more processes."""
        for client in self.clients.values():
            client.abandon()

    def stop(self) -> None:
        """Stop all workers at once."""
        for client in self.clients.values():
            client.stop()

    def __enter__(self) -> Self:
        self._exits = ExitStack()
        for client in self.clients.values():
            self._exits.enter_context(client)
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()


def _require_idle(client: ProcessClient, arm: Arm) -> None:
    """Require that an untrusted process, with its threads and children, is nearly idle between its requests.

    Raises:
        FailedError: in each of NUM_LOOKS looks, it uses at least the share BUSY_SHARE of a processor.
    """
    for _ in range(NUM_LOOKS):
        before_s = client.processor_s
        time.sleep(IDLE_S)
        if (share := (client.processor_s - before_s) / IDLE_S) < BUSY_SHARE:
            return
    message = f"between its calls it keeps using {share:.0%} of a processor, in threads or processes"
    raise FailedError(Failed(arm=arm, status=Status.error, message=message))
