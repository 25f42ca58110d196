"""The protocol between the coordinator and a worker: calls of functions as JSON lines, and the heartbeat.

The coordinator names a method of the worker (worker/answers.py) with its keyword arguments. The reply is the method's
result, or Failed. The worker updates the heartbeat before each step; it survives a crash.
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
NUMBER = struct.Struct("<i")
WORKERS, SPAWN = "ATTNBENCH_WORKERS", "spawn"
"""Environment variable for the way in which workers are started, and its only value."""
FOLDERS = "ATTNBENCH_FOLDERS"
"""Environment variable of workers: folders that are searched for modules before the installed ones."""
FILES = "ATTNBENCH_FILES"
"""Environment variable of workers: the folder of files for tensors, where files without names are missing."""
PRELOADED = "ATTNBENCH_PRELOADED"
"""Environment variable of a template: modules, joined by commas, to import if possible."""
FORK = 0
"""Asks the template (processes/worker/__main__.py) for a new worker; a process id asks it to end that worker."""


def spawns() -> bool:
    """Whether each worker is a new process, which takes seconds, in place of a fork.

    On macOS Linux's calls for nameless files are missing, and a fork of a process that has used Metal is unusable.
    """
    return os.environ.get(WORKERS) == SPAWN or not hasattr(os, "memfd_create")


class Started(msgspec.Struct, frozen=True, kw_only=True):
    """The worker's environment; with two workers, the candidate's and the base's."""

    environment: Environment
    base: Environment | None = None


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """Built-in axes of an implementation, and why it cannot be loaded, or ""."""

    built_in: dict[str, int | float | str] = {}
    problem: str = ""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """The workload and the arm that a request is about; `spec` is the source of the arm's implementation."""

    workload: Workload
    arm: Arm
    spec: str

    @property
    def names(self) -> dict[str, Any]:
        """Fields of an event that name the cell."""
        return {"workload": self.workload.id, "implementation": self.arm.implementation, "side": self.arm.side}


class Prepared(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an implementation on a workload that a check needs (contract.Implementation)."""

    has_dropout: bool
    executed_flops: int | None
    is_approximate: bool = False
    has_pack: bool = False  # its module maps canonical weights to its parameters
    has_cache: bool = False
    most_error: float = 0.0


class FirstCalls(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of the first call in a process, and of the first one at another length, if that is supported."""

    first_s: Annotated[float, Meta(ge=0)]
    longer_s: Annotated[float, Meta(ge=0)] | None


class TensorHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a tensor's storage in a file, and the tensor's layout in the storage, as in torch.

    `memory` is the address of the storage at the sender: tensors at one address share their memory. `same_as` is the
    first name of the tensor in its group: its own, unless one tensor has several names.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    at: int
    num_bytes: int
    memory: int
    same_as: str


class Backward(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A judge's request to the process with the candidate: the gradients of a call from that of its output.

    `exchange` is the path of the file with tensors, and `forget` lists modules that are no longer used. `random` is the
    state of each of the judge's generators, which the candidate draws from.
    """

    call: int
    exchange: str
    random: tuple[bytes, ...]
    forget: tuple[int, ...]
    tensors: dict[str, TensorHeader]


class Call(Backward, frozen=True, kw_only=True, tag=True):
    """A request for the forward call of a module; `needs` names the tensors that get gradients.

    `is_inference`, `is_training` and `chunks` are those of the mask. With `weights` the module is built first.
    """

    module: int
    weights: dict[str, TensorHeader] = {}
    needs: tuple[str, ...]
    mask: str
    sizes: tuple[int, int, int]
    num_heads: int
    scale: float | None
    dropout: float
    mask_form: str = ""
    world_size: int = 1
    is_inference: bool = False
    is_training: bool = False
    chunks: tuple[int, ...] = ()
    cache: Cache | None = None


class Tensors(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a call, and tensors changed in place: its inputs, and outputs of earlier calls.

    `faults` lists other changes by rule (checking/side_effects.py). `random` is the state of each generator after the
    call.
    """

    tensors: dict[str, TensorHeader]
    changed: dict[str, TensorHeader]
    changed_outputs: dict[str, TensorHeader]
    faults: dict[str, str]
    random: tuple[bytes, ...]


class HandedIn(msgspec.Struct, frozen=True, kw_only=True):
    """Results that a worker hands in: tensors by call number and name; none if dropout makes them random."""

    exchange: str
    tensors: dict[int, dict[str, TensorHeader]]


class SampleBlocks(Visit, frozen=True, kw_only=True):
    """The blocks of a visit that are sampled in one request. `arms` pairs arms with their specs."""

    workload: Workload
    arms: tuple[tuple[Arm, str], ...]
    cache: str = "warm"
    launch: str = "eager"
    verifies: bool = True  # check the answers of all arms afterwards
    settles: bool = False  # answer only after all threads stopped spinning: another process follows
    is_refereed: bool = False  # by the coordinator's clock (processes/worker_pool.py, `Referee`)

    def finished(
        self, samples: Mapping[Arm, Sequence[Sample]], called_s: float, states: Sequence[DeviceState] = ()
    ) -> VisitFinished:
        """The reply: each arm's samples in time order, the seconds inside their calls, and the device's states."""
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
    """The request failed at this arm; without an arm, or at the interference probe, the harness itself failed."""

    status: Status
    message: str
    arm: Arm = PROBE
    raised: str = ""  # name and message of the exception
    said: str = ""
    is_lost: bool = False  # the process ended, which foreign code may have caused
    is_predicted: bool = False  # a prediction; nothing was tried
    is_unloadable: bool = False  # the implementation cannot be loaded for any workload

    @property
    def is_full(self) -> bool:
        """Whether memory ran out, which earlier requests to the process may have caused."""
        return self.status is Status.out_of_memory and not self.is_predicted

    def __post_init__(self) -> None:
        """Refuse a failure that would pass for a check: foreign code can write to its worker's line."""
        if self.status is Status.ok:
            raise ValueError("a failure has no status ok")


class FailedError(Exception):
    """A request failed; `failed` is its reply."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class Request(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A call of a function of the worker, with its keyword arguments.

    A judge may first ask something of the process with the candidate: it answers a request by another one.
    """

    function: str
    arguments: dict[str, msgspec.Raw]


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The result of a request, or its failure."""

    result: msgspec.Raw = msgspec.Raw(b"null")
    failed: Failed | None = None
    ends: bool = False  # the worker is unusable: its device fails, or its state was changed

    def value(self, result: type[T]) -> T | Failed:
        """The result as this type, or the failure.

        Raises:
            msgspec.DecodeError: it is of another type.
        """
        return self.failed or msgspec.json.decode(self.result, type=result)


CONSULTED: dict[str, Any] = {"prepare": Prepared, "compute": Tensors}
"""Functions that a judge may call in the process with the candidate, and the types of their results."""
LEAN = {"make_calls", "compute"}
"""Functions without any preparation: timed by the coordinator, or frequent."""


class Ask(Protocol):
    """Call a function of a worker; return its result, or why there is none."""

    def __call__(self, function: str, result: type[T], /, **arguments: Any) -> T | Failed:  # noqa: ANN401 - of any function
        """Return the result as this type."""


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
    """The line of a message."""
    return msgspec.json.encode(message) + b"\n"


class Heartbeat:
    """Eight bytes of shared memory with the arm that a worker is trying; the worker writes, the coordinator reads.

    Writing takes less than a microsecond, so that even turns inside a block are announced. The file behind it has no
    name, so nothing remains of it after the processes end.
    """

    HARNESS, LOADING = 2**32 - 1, 2**32 - 2
    """Values without an arm: the harness's own work, and the loading of an implementation."""
    _LAYOUT = struct.Struct("<II")  # number of steps, index of the arm

    def __init__(self, file: int | None = None) -> None:
        """Map the open file of another process; without one, make a new file."""
        if file is None:
            with tempfile.TemporaryFile() as temporary:
                temporary.truncate(self._LAYOUT.size)
                file = os.dup(temporary.fileno())
        self.file = file
        self._memory = mmap.mmap(file, self._LAYOUT.size)

    def beat(self, arm: int = 0) -> None:
        """Announce a step of the arm with this index; 0 is the arm of a request about one implementation."""
        self._LAYOUT.pack_into(self._memory, 0, (self.read()[0] + 1) % 2**32, arm)

    def read(self) -> tuple[int, int]:
        """The number of announced steps, and the index of the current arm."""
        count, arm = self._LAYOUT.unpack_from(self._memory, 0)
        return count, arm

    def close(self) -> None:
        """Release the memory and the file."""
        self._memory.close()
        os.close(self.file)
