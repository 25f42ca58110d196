"""A group of processes, one per rank, that compute one call together. The group starts once and serves many calls.

Tensors pass through a shared memory file that all processes map; messages are JSON on one socket per rank. Nothing that
a rank sends is executed. The ranks are forked from a process that has imported torch and computed nothing (process.py),
and they end with this process, however it ends.
"""

import math
import mmap
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache

import msgspec
import torch
from torch import Tensor

from attnbench.ranks.rank import Rank
from attnbench.workloads.workload import RANKS_TIMEOUT

TIMEOUT_S = 30.0  # time limit of a pass in seconds, if the environment sets none
START_TIMEOUT_S = 50.0  # time limit of a start in seconds: the import of torch is slow on a busy machine
PATIENCE = 0.5
"""A rank waits for another rank for at most this share of a pass's time limit, so that it can report in time."""
GRACE_S = 1.0  # seconds for the other ranks to report after one has failed
LARGEST_MESSAGE = 2**16  # bytes
MOST_REPORTS = 64  # latest passes whose reports are kept
ALIGNMENT = 64  # bytes; each tensor in shared memory starts at a multiple of this
Size = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape of a tensor


class RankLostError(RuntimeError):
    """A rank's process has died."""


class RankSilentError(RuntimeError):
    """A rank did not answer in time."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request to call a function on every rank; the function's last argument is `rank` with that rank's number."""

    module: str
    function: str
    file: str  # loaded if the module cannot be imported
    rank: Rank
    keeps_graph: bool  # a backward pass may follow


class SharedTensor(msgspec.Struct, frozen=True, kw_only=True):
    """The place in shared memory of a whole tensor, with the tokens of all ranks; the tokens are axis 2."""

    dtype: str  # name in torch
    shape: tuple[int, ...]
    offset: int  # in bytes

    @property
    def num_bytes(self) -> int:
        """The tensor's size in bytes."""
        return math.prod(self.shape) * int(getattr(torch, self.dtype).itemsize)

    def within(self, memory: Tensor) -> Tensor:
        """Return the tensor as a view of `memory`, the shared bytes: uint8 (N,)."""
        raw = memory[self.offset : self.offset + self.num_bytes]
        return raw.view(getattr(torch, self.dtype)).view(self.shape)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one pass: a forward call, or the backward pass of an earlier call.

    `given` has the places of the inputs in shared memory, `made` those where the results are written, and `forget` the
    numbers of the calls whose autograd graphs are freed. `memory_bytes` is the size of a new shared memory file that
    comes with the message; 0 if the file is unchanged.
    """

    call: int
    asked: Asked | None  # None: a backward pass
    given: tuple[SharedTensor, ...]
    made: tuple[SharedTensor, ...]
    forget: tuple[int, ...]
    memory_bytes: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's report of one pass."""

    error: str = ""  # "" if there is none
    is_communication: bool = False  # the error is that another rank is late or has died
    call_s: float = 0.0  # seconds from the moment when all ranks are ready until the rank has its own result
    waited_s: float = 0.0  # part of `call_s` spent on sending, receiving and waiting for other ranks
    bytes_sent: int = 0  # to other ranks


class RankGroup:
    """`world_size` processes that compute together; they start at the first call, and again after a failure.

    A failed pass raises an error as `over_ranks` does, and ends all processes. `reports` contains one list for each of
    the latest MOST_REPORTS passes: the reports of all ranks, in order of the ranks. Callers may clear `reports`.
    """

    def __init__(self, world_size: int, device: str = "cpu", timeout_s: float | None = None) -> None:
        """Describe the group; its processes start at the first call.

        `device` is torch's device type: ranks communicate by gloo on the CPU, and by NCCL on CUDA. `timeout_s` is the
        limit of a forward or backward pass in seconds; None: the environment variable that RANKS_TIMEOUT names, or
        TIMEOUT_S.
        """
        self.world_size, self.device = world_size, device
        self.timeout_s = float(os.environ.get(RANKS_TIMEOUT, TIMEOUT_S)) if timeout_s is None else timeout_s
        self.reports: deque[list[Report]] = deque(maxlen=MOST_REPORTS)
        self.processes: list[int] = []
        self._lines: list[socket.socket] = []
        self._stop: Callable[[], object] | None = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._num_calls = 0
        self._first_call = 0  # number of the first call that the current processes have computed
        self._forget: list[int] = []

    def forward(self, tensors: Sequence[Tensor], asked: Asked) -> tuple[int, Tensor]:
        """Compute a call of query, key and value; return its number and its output (B, H, T, V)."""
        query, _, value = tensors
        self._num_calls += 1
        shape = (*query.shape[:3], value.shape[3])
        (output,) = self._pass(self._num_calls, asked, tensors, [(query.dtype, shape)])
        return self._num_calls, output

    def backward(self, call: int, grad_output: Tensor, sizes: Sequence[Size]) -> list[Tensor]:
        """Compute the gradients of a call's query, key and value, which have the dtypes and shapes in `sizes`.

        `grad_output` (B, H, T, V) is the gradient of the output.
        """
        return self._pass(call, None, [grad_output], sizes)

    def forget(self, call: int) -> None:
        """Make the ranks free the autograd graph of a call at the next request."""
        self._forget.append(call)

    def stop(self) -> None:
        """End all processes; the next call starts new ones."""
        if self._stop is not None:
            self._stop()
        self._lines, self.processes, self._stop = [], [], None
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _start(self) -> None:
        folder = tempfile.mkdtemp(prefix="attnbench-ranks-")  # where the ranks find each other
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self.world_size)]
        theirs = [theirs.fileno() for _, theirs in pairs]
        patience_s = str(PATIENCE * self.timeout_s)
        asked = [str(os.getpid()), folder, self.device, patience_s]
        command = [sys.executable, "-m", "attnbench.ranks.process", *asked]
        launcher = subprocess.Popen(  # noqa: S603 - this Python, and our own module
            [*command, *map(str, theirs)],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        self._lines = [ours for ours, _ in pairs]
        for _, line in pairs:
            line.close()
        self._stop = weakref.finalize(self, _end, launcher, tuple(self._lines), folder)
        try:
            self.processes = [int(answer) for answer in self._answers("start", START_TIMEOUT_S)]
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _pass(self, call: int, asked: Asked | None, given: Sequence[Tensor], made: Sequence[Size]) -> list[Tensor]:
        if asked is None and (not self._lines or call < self._first_call):
            raise RuntimeError("the ranks that held the graph of this call are gone")
        try:
            return self._try_pass(call, asked, given, made)
        except BaseException:  # otherwise answers to an interrupted pass would be taken for answers to the next one
            self.stop()
            raise

    def _try_pass(self, call: int, asked: Asked | None, given: Sequence[Tensor], made: Sequence[Size]) -> list[Tensor]:
        if not self._lines:
            self._start()
            self._first_call = call
        places, needed, files = list[SharedTensor](), 0, list[int]()
        for dtype, shape in [*((each.dtype, tuple(each.shape)) for each in given), *made]:
            places.append(SharedTensor(dtype=str(dtype).removeprefix("torch."), shape=shape, offset=needed))
            needed += -(-max(1, places[-1].num_bytes) // ALIGNMENT) * ALIGNMENT
        if needed > len(self._memory):
            size = -(-needed // mmap.PAGESIZE) * mmap.PAGESIZE
            files = [os.memfd_create("attnbench-ranks")]
            os.ftruncate(files[0], size)
            self._memory = torch.frombuffer(mmap.mmap(files[0], size), dtype=torch.uint8)
        into, out_of = places[: len(given)], places[len(given) :]
        for tensor, place in zip(given, into, strict=True):
            place.within(self._memory).copy_(tensor.detach())
        request = Request(
            call=call,
            asked=asked,
            given=tuple(into),
            made=tuple(out_of),
            forget=tuple(self._forget),
            memory_bytes=len(self._memory) if files else 0,
        )
        self._forget = []
        message = msgspec.json.encode(request)
        try:
            for line in self._lines:
                with suppress(BrokenPipeError, ConnectionResetError):  # the rank has died; its missing answer shows it
                    socket.send_fds(line, [message], files)
        finally:
            for file in files:
                os.close(file)
        decoder = msgspec.json.Decoder(Report)
        what = "backward pass" if asked is None else "call"
        reports = [decoder.decode(answer) for answer in self._answers(what, self.timeout_s)]
        self.reports.append(reports)
        return [place.within(self._memory).to(given[0].device, copy=True) for place in out_of]

    def _answers(self, what: str, timeout_s: float) -> list[bytes]:
        """Read one answer from each rank, in order of the ranks; `what` names the awaited pass in messages.

        Raises:
            RankLostError: a rank has died; all ranks are ended.
            RankSilentError: a rank is silent; all ranks are ended.
            RuntimeError: a rank raised an error; all ranks are ended.
        """
        start = time.monotonic()
        deadline = start + timeout_s
        answers: dict[int, bytes] = {}
        lost: list[int] = []
        ranks = {line.fileno(): rank for rank, line in enumerate(self._lines)}
        poll = select.poll()
        for file in ranks:
            poll.register(file, select.POLLIN)
        while len(answers) + len(lost) < self.world_size and (left_s := deadline - time.monotonic()) > 0:
            for file, _ in poll.poll(math.ceil(1000 * left_s)):
                rank = ranks[file]
                poll.unregister(file)
                try:
                    answer = self._lines[rank].recv(LARGEST_MESSAGE)
                except ConnectionResetError:
                    answer = b""
                if answer:
                    answers[rank] = answer
                else:
                    lost.append(rank)
                is_failure = not answer or (answer.startswith(b"{") and _failure(answer) == "own")
                if is_failure:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        failed = {rank: _failure(answer) for rank, answer in answers.items() if answer.startswith(b"{")}
        silent = [rank for rank in range(self.world_size) if rank not in answers and rank not in lost]
        if not lost and not silent and not any(failed.values()):
            return [answers[rank] for rank in range(self.world_size)]
        self.stop()
        raised = [rank for rank, kind in failed.items() if kind == "own"] or [r for r, kind in failed.items() if kind]
        words = f"of {self.world_size}"
        if lost:
            raise RankLostError(f"rank {lost[0]} {words} is gone: its process was killed, or has crashed")
        if silent and not any(kind == "own" for kind in failed.values()):
            named = ("rank " if len(silent) == 1 else "ranks ") + " and ".join(map(str, silent))
            have = "has" if len(silent) == 1 else "have"
            waited_s = time.monotonic() - start
            raise RankSilentError(f"{named} {words} {have} not answered for {waited_s:.0f} s ({what})")
        error = msgspec.json.decode(answers[raised[0]], type=Report).error
        raise RuntimeError(f"rank {raised[0]} {words}: {error}")


def _failure(answer: bytes) -> str:
    """Classify a rank's report: "own" for its own failure, "another" for a failure of another rank, "" for success."""
    report = msgspec.json.decode(answer, type=Report)
    return "" if not report.error else "another" if report.is_communication else "own"


def _end(launcher: "subprocess.Popen[bytes]", lines: Sequence[socket.socket], folder: str) -> None:
    """End the process from which the ranks were forked; the system then ends the ranks (PR_SET_PDEATHSIG)."""
    for line in lines:
        line.close()
    launcher.kill()
    launcher.wait()
    shutil.rmtree(folder, ignore_errors=True)


@cache
def group_of(world_size: int, device: str) -> RankGroup:
    """Return the group for a number of ranks and a device type; this process has at most one such group."""
    return RankGroup(world_size, device)
