"""The protocol between the coordinator and a worker: calls of functions as JSON lines, and the heartbeat.

A request names a method of the worker (worker/answers.py) and its keyword arguments. The reply is the method's result,
or Failed. Before each step the worker updates the heartbeat: shared memory that the coordinator can still read after
the worker has crashed.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta

from attnbench.storage.events import ArmSamples, VisitFinished
from attnbench.storage.records import PROBE, Arm, DeviceState, Environment, Sample, Status
from attnbench.timing.blocks import Visit
from attnbench.workloads.batch import Cache
from attnbench.workloads.workload import Workload

T = TypeVar("T")
NUMBER = struct.Struct("<i")  # a message to or from a template, the process that forks workers
WORKERS, SPAWN = "ATTNBENCH_WORKERS", "spawn"
"""With ATTNBENCH_WORKERS=spawn in the environment, each worker starts as a new process, not as a fork."""
FOLDERS = "ATTNBENCH_FOLDERS"
"""Environment variable of workers: folders to search for modules before installed packages, joined as in PYTHONPATH."""
FILES = "ATTNBENCH_FILES"
"""Environment variable of spawned workers: folder of the files through which workers exchange tensors. Forked workers
use anonymous files in memory instead."""
PRELOADED = "ATTNBENCH_PRELOADED"
"""Environment variable of a template: modules to import before the first fork, joined by commas. A module that is not
installed is left out."""
KEEPS_ANSWERS = "ATTNBENCH_KEEPS_ANSWERS"
"""Environment variable of a judge, the process that checks answers: if it is set, the judge keeps all right answers for
later checks of the same workloads."""
FORK = 0
"""Message to the template (processes/worker/__main__.py) that requests a new worker. Any other number is the process id
of a worker, and ends that worker."""


def spawns() -> bool:
    """Return whether each worker starts as a new process, which takes seconds, and not as a fork.

    The result is always True on macOS: it lacks memfd_create, and a fork of a process that has used Metal is unusable.
    """
    return os.environ.get(WORKERS) == SPAWN or not hasattr(os, "memfd_create")


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a fresh worker.

    If two states of the code are compared in separate workers, `base` is the environment of the base's worker.
    """

    environment: Environment
    base: Environment | None = None


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """The axis values that are built into an implementation, by axis; `problem` is why it cannot be loaded, or ""."""

    built_in: dict[str, int | float | str] = {}
    problem: str = ""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The cell that a request is about: a workload, and an arm (an implementation in a role).

    `spec`, a name or FILE.py:NAME, is the source of the implementation.
    """

    workload: Workload
    arm: Arm
    spec: str

    @property
    def names(self) -> dict[str, Any]:
        """The fields of an event that identify the cell: workload id, implementation and side."""
        return {"workload": self.workload.id, "implementation": self.arm.implementation, "side": self.arm.side}


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Facts that a check needs about an implementation on a workload; for the fields see contract.Implementation."""

    executed_flops: int | None
    is_approximate: bool = False
    has_cache: bool = False
    takes_context: bool = False  # it accepts a context whose length differs from that of the tokens
    most_error: float = 0.0


class FirstCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the first call in a process, and of the first calls that FIRST_OTHERS names, where supported."""

    first_s: Annotated[float, Meta(ge=0)]
    others_s: dict[str, Annotated[float, Meta(ge=0)]] = {}


class TensorHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a tensor's storage in a file, and the tensor's layout in that storage, in elements as in torch.

    The storage has `num_bytes` bytes and begins at byte `at` of the file. `memory` is the address of the storage in the
    sender's process; tensors with the same address share memory. `same_as` is the tensor's own name or, if one tensor
    is sent under several names, the first of these names.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    at: int
    num_bytes: int
    memory: int
    same_as: str


class Asked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A request of the judge, the process that checks answers, to the process with the candidate (code under test).

    `exchange` is the path of the file that contains `tensors`. `forget` lists the numbers of modules that are no longer
    used.
    """

    exchange: str
    forget: tuple[int, ...]
    tensors: dict[str, TensorHeader]


class Backward(Asked, frozen=True, kw_only=True, tag=True):
    """A request for the gradients of call number `call`, given the gradient of its output."""

    call: int


class Call(Asked, frozen=True, kw_only=True, tag=True):
    """A request for a call of module number `module`, as in checking/calls.py.

    If there are `weights`, they are loaded first. `workload` is JSON, so that its decoding can be cached: most calls
    have the same workload. The fields from `rule` on are those of the mask (contract.BoundMask) that may differ from
    the workload's.
    """

    module: int
    workload: msgspec.Raw
    weights: dict[str, TensorHeader] = {}
    frozen: tuple[str, ...]
    mode: str
    num_passes: int
    seed: int | None
    rule: str
    form: str
    scale: float | None
    is_training: bool
    chunks: tuple[int, ...]
    cache: Cache | None


class Tensors(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a request: the output and the gradients by name, or else `faults`.

    `faults` describes forbidden side effects, by name of the rule that they break (checking/side_effects.py). The
    other fields are as in checking/calls.py (Answer and Caller).
    """

    tensors: dict[str, TensorHeader] = {}
    number: int = 0
    overwritten: tuple[int, ...] = ()
    has_pack: bool = False
    faults: dict[str, str] = {}


class HandedIn(msgspec.Struct, frozen=True, kw_only=True):
    """Results of timed calls for the judge; none if dropout makes them random."""

    exchange: str  # path of the file that contains the tensors
    tensors: dict[int, dict[str, TensorHeader]]  # by number of the call, and by name


class SampleBlocks(Visit, frozen=True, kw_only=True):
    """A request to time a visit, a few blocks of one workload; `arms` pairs each arm with its implementation's spec."""

    workload: Workload
    arms: tuple[tuple[Arm, str], ...]
    cache: str = "warm"  # as in Plan
    launch: str = "eager"  # as in Plan
    verifies: bool = True  # check the answers of all arms afterwards
    settles: bool = False  # reply only when no thread spins any more, because another process runs next
    is_refereed: bool = False  # timed by the coordinator's clock (processes/worker_pool.py, `Referee`)

    def finished(
        self, samples: Mapping[Arm, Sequence[Sample]], called_s: float, states: Sequence[DeviceState] = ()
    ) -> VisitFinished:
        """Build the reply from each arm's samples in time order, the seconds inside all calls, and device states."""
        return VisitFinished(
            workload=self.workload.id,
            epoch=self.epoch,
            visit=self.number,
            arms=tuple(ArmSamples(arm=arm, samples=tuple(of_arm)) for arm, of_arm in samples.items()),
            called_s=called_s,
            states=tuple(states),
            probe=f"{self.workload.device}, {self.workload.num_threads} threads",
        )


class Failed(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a request while `arm` was running; if `arm` is PROBE, the harness itself failed."""

    status: Status
    message: str
    arm: Arm = PROBE
    raised: str = ""  # class name of the exception
    said: str = ""  # first line of the exception's message
    is_lost: bool = False  # the worker's process ended, perhaps because of foreign code
    is_predicted: bool = False  # the failure was predicted; nothing was tried
    is_unloadable: bool = False  # the implementation cannot be loaded for any workload

    @property
    def is_full(self) -> bool:
        """Whether memory ran out, which earlier requests to the process may have caused."""
        return self.status is Status.out_of_memory and not self.is_predicted

    def __post_init__(self) -> None:
        """Reject status ok: foreign code can write to its worker's socket, and could fake a passed check.

        Raises:
            ValueError: the status is ok.
        """
        if self.status is Status.ok:
            raise ValueError("a failure cannot have the status ok")


class FailedError(Exception):
    """The error of a request that failed; `failed` is the reply to the request."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of a method of the worker, with keyword arguments as JSON.

    Before a judge replies, it may itself send requests, which go to the process with the candidate (code under test).
    """

    function: str
    arguments: dict[str, msgspec.Raw]


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of a request, or its failure."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    failed: Failed | None = None
    ends: bool = False  # the worker must be replaced, because its device has failed or shared state was changed

    def value(self, result: type[T]) -> T | Failed:
        """Decode the result as type `result`, or return the failure.

        Raises:
            msgspec.DecodeError: the result has another type.
        """
        return self.failed or msgspec.json.decode(self.result, type=result)


CONSULTED: dict[str, Any] = {"prepare": Prepared, "compute": Tensors}
"""Functions that a judge may call in the process with the candidate, and the types of their results."""
LEAN = {"make_calls", "compute"}
"""Functions before which a worker does not renew its memory limit, because they are timed or frequent."""


class Ask(Protocol):
    """The signature of a function that calls a worker."""

    def __call__(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - their types depend on the function
        """Call the worker's method `function`; return its result as type `result`, or Failed."""


def request(function: str, arguments: Mapping[str, object]) -> Request:
    """Encode a call of a function for sending."""
    encoded = {name: msgspec.Raw(msgspec.json.encode(value)) for name, value in arguments.items()}
    return Request(function=function, arguments=encoded)


def reply(value: object, *, ends: bool = False) -> Reply:
    """Encode a result or a failure for sending."""
    if isinstance(value, Failed):
        return Reply(failed=value, ends=ends)
    return Reply(result=msgspec.Raw(msgspec.json.encode(value)), ends=ends)


def line(message: Request | Reply) -> bytes:
    """Encode a message as one line of JSON."""
    return msgspec.json.encode(message) + b"\n"


class Heartbeat:
    """Eight bytes of shared memory, in which a worker announces the arm that it runs, for the coordinator to read.

    Writing takes less than a microsecond, so the worker can announce every sample of a block. The memory is a file
    without a name, so nothing remains of it after the processes end.
    """

    HARNESS, LOADING = 2**32 - 1, 2**32 - 2
    """Values in place of an arm's index: the harness itself is running, or an implementation is being loaded."""
    _LAYOUT = struct.Struct("<II")  # number of steps, index of the arm

    def __init__(self, file: int | None = None) -> None:
        """Map the open file descriptor `file`, inherited from another process; None: make a new file."""
        if file is None:
            with tempfile.TemporaryFile() as temporary:
                temporary.truncate(self._LAYOUT.size)
                file = os.dup(temporary.fileno())
        self.file = file
        self._memory = mmap.mmap(file, self._LAYOUT.size)

    def beat(self, arm: int = 0) -> None:
        """Announce a step of the arm at index `arm` of the request; the index is 0 if the request has only one arm."""
        self._LAYOUT.pack_into(self._memory, 0, (self.read()[0] + 1) % 2**32, arm)

    def read(self) -> tuple[int, int]:
        """Return the number of announced steps, and the index of the current arm."""
        count, arm = self._LAYOUT.unpack_from(self._memory, 0)
        return count, arm

    def close(self) -> None:
        """Release the memory and the file."""
        self._memory.close()
        os.close(self.file)
