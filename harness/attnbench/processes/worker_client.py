"""The coordinator's side of workers: ask, wait, and say whose fault it was when no answer comes.

Knows nothing of torch. A worker that crashes or hangs costs the request that it was working on; whoever asks next
starts a fresh one.
"""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from multiprocessing.connection import wait
from operator import attrgetter
from pathlib import Path
from typing import Protocol, Self

import msgspec

from attnbench.processes import messages
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import BASE, PROBE, Arm, Role, Sample, Status

START_TIMEOUT_S = 120.0
POLL_S = 1.0
ROOT = Path(__file__).parents[2]


class WorkerClient(Protocol):
    """What a session asks its questions: a worker process, a pair of them, or a simulated one.

    Use it as a context manager, which stops the worker in the end.
    """

    @property
    def is_running(self) -> bool:
        """Whether a worker is there to be asked."""

    def start(self, layout: int = 0) -> messages.Started:
        """Start a fresh worker in place of the one that is there, with another memory layout for each number.

        Raises:
            ValueError: it cannot start.
        """

    def ask(self, request: messages.Work) -> messages.Reply:
        """The worker's answer.

        Where the worker crashed, or one of its steps lasted longer than the timeout, it is gone now, and the answer is
        Failed at the arm that it was trying.
        """

    def stop(self) -> None:
        """End the worker, at once."""

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the worker and clean up."""
        self.stop()


class ProcessClient(WorkerClient):
    """A worker process (processes/worker), one at a time."""

    def __init__(
        self,
        log: Path,
        timeout_s: float,
        settings: Mapping[str, str] | None = None,
        *,
        python: str = "",
        folders: Sequence[Path] = (ROOT,),
    ) -> None:
        """Keep `log` for what the worker prints, and how long a step may last without a heartbeat.

        `settings` are variables that the worker's environment has in addition to ours, `python` is its interpreter
        where that is not ours, and `folders` are where it looks for modules first, our own among them.
        """
        self.log = log
        self.settings = settings or {}
        self.python, self.folders = python or sys.executable, folders
        self.timeout_s = timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._heartbeat = messages.Heartbeat()

    @property
    def is_running(self) -> bool:
        """Whether a worker is there to be asked."""
        return self._process is not None

    def start(self, layout: int = 0) -> messages.Started:
        """Start a fresh worker, with another memory layout for each number, and return where it runs.

        Source: Mytkowicz et al., Producing Wrong Data Without Doing Anything Obviously Wrong, 2009,
        https://doi.org/10.1145/1508244.1508275: the size of the environment alone shifts the stack, and times with it.

        Raises:
            ValueError: it cannot start; the message quotes the last line that it printed.
        """
        self.stop()
        # -P and our own root first: a folder called attnbench in the current folder must not take our place
        command = [self.python, "-P", "-m", "attnbench.processes.worker", str(self._heartbeat.path)]
        path = os.pathsep.join(filter(None, [*map(str, self.folders), os.environ.get("PYTHONPATH")]))
        shift = random.Random(layout).randrange(4096)
        environment = {**os.environ, **self.settings, "PYTHONPATH": path, "ATTNBENCH_LAYOUT": "x" * shift}
        pipe = subprocess.PIPE
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603 - our own module, by this interpreter
                command, env=environment, stdin=pipe, stdout=pipe, stderr=log
            )
        reply = self._exchange(messages.Start(layout=layout), START_TIMEOUT_S)
        if isinstance(reply, messages.Failed):
            printed = self.log.read_text(errors="replace").strip().splitlines()
            last = printed[-1] if printed else "it printed nothing"
            message = f"the worker process cannot start ({reply.message}): {last}"
            raise ValueError(message)  # noqa: TRY004 - the reply is of another type, and nobody's argument
        assert isinstance(reply, messages.Started)
        return reply

    def ask(self, request: messages.Work) -> messages.Reply:
        """The worker's answer; Failed where there is none."""
        return self._exchange(request, self.timeout_s)

    def _exchange(self, request: messages.Request, timeout_s: float) -> messages.Reply:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._heartbeat.beat(messages.Heartbeat.HARNESS)
        with suppress(BrokenPipeError):  # a dead worker is noticed below
            process.stdin.write(msgspec.json.encode(request) + b"\n")
            process.stdin.flush()
        step, waited_s = self._heartbeat.read()[0], 0.0
        while not wait([process.stdout.fileno()], POLL_S):
            waited_s += POLL_S
            count, _ = self._heartbeat.read()
            if count != step:
                step, waited_s = count, 0.0
            elif waited_s >= timeout_s:
                return self._lost(request, Status.timeout, f"no end in sight after {timeout_s:g} s: killed")
        if line := process.stdout.readline():  # a whole one: a worker answers one request at a time
            answer = msgspec.json.decode(line, type=messages.Envelope)
            if answer.ends:
                self.stop()
            return answer.reply
        code = process.wait()
        how = f"exited with code {code}"
        if code < 0:
            name = signal.Signals(-code).name
            how = f"was killed by {name}{', perhaps by the system because memory ran out' * (name == 'SIGKILL')}"
        return self._lost(request, Status.crashed, f"the process {how}")

    def _lost(self, request: messages.Request, status: Status, message: str) -> messages.Failed:
        """End the worker; the arm that it was trying has failed."""
        _, index = self._heartbeat.read()
        self.stop()
        arms = request.arms if isinstance(request, messages.SampleBlocks) else ()
        return messages.Failed(arm=arms[index][0] if index < len(arms) else PROBE, status=status, message=message)

    def stop(self) -> None:
        """End the worker, at once."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        self._process = None

    def __exit__(self, *_: object) -> None:
        """Stop the worker and let go of the heartbeat."""
        self.stop()
        self._heartbeat.close()


class PairedClient(WorkerClient):
    """Two workers that look like one: each side of a comparison in processes of its own, their blocks interleaved.

    Every block is taken by both processes, one right after the other in a random order, while the other's threads
    sleep. Both have the same arms, down to A/A control and interference probe: identical code is measured alike. A
    process has a bias of its own, which its blocks share: what counts is one number for each pair of processes
    (docs/adr/0020).
    """

    def __init__(self, base: WorkerClient, candidate: WorkerClient, seed: int) -> None:
        """Nothing is started yet."""
        self.base, self.candidate, self.seed = base, candidate, seed
        self.both = base, candidate
        self._exits = ExitStack()

    @property
    def is_running(self) -> bool:
        """Whether both are there to be asked."""
        return all(client.is_running for client in self.both)

    def start(self, layout: int = 0) -> messages.Started:
        """Start two fresh workers at the same time; which of two memory layouts is whose is drawn at random.

        Raises:
            ValueError: one cannot start.
        """
        layouts = [2 * layout, 2 * layout + 1]
        random.Random(f"{self.seed}/{layout}").shuffle(layouts)
        with ThreadPoolExecutor(len(self.both)) as pool:
            base, candidate = pool.map(lambda client, number: client.start(number), self.both, layouts)
        return messages.Started(environment=candidate.environment, base=base.environment)

    def ask(self, request: messages.Work) -> messages.Reply:
        """The answer of the worker that an implementation belongs to; blocks are asked of both, in turn."""
        if isinstance(request, messages.SampleBlocks):
            return self._sample_blocks(request)
        is_base = not isinstance(request, messages.MeasureCeilings) and request.arm.side == BASE
        return (self.base if is_base else self.candidate).ask(request)

    def _sample_blocks(self, request: messages.SampleBlocks) -> messages.Reply:
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
                reply = client.ask(msgspec.structs.replace(step, arms=half, seed=draws.getrandbits(53)))
                if isinstance(reply, messages.Failed):
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
        return request.finished(samples, called_s)

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
