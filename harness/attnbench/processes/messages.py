"""The protocol between the coordinator and a worker: requests and replies as JSON lines, and the heartbeat.

Each request gets one reply: of a type in ANSWERS, or Failed. The worker updates the heartbeat before each step; it
survives a crash.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, Union

import msgspec

from attnbench.storage.events import (
    ArmSamples,
    CeilingsMeasured,
    CellChecked,
    CellMeasured,
    CellProfiled,
    VisitFinished,
)
from attnbench.storage.records import PROBE, Arm, DeviceState, Environment, Sample, Status
from attnbench.timing.blocks import Visit
from attnbench.workloads.workload import Workload

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


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First request to a fresh worker. `layout` shifts memory, so that every epoch has a different layout."""

    layout: int = 0


class Evaluate(msgspec.Struct, frozen=True, kw_only=True, tag="evaluate"):
    """Call a function of the harness, as in module:name, outside of a run (worker/asides.py)."""

    function: str
    arguments: dict[str, msgspec.Raw]


class Evaluated(msgspec.Struct, frozen=True, kw_only=True, tag="evaluated"):
    """The result of a function."""

    result: msgspec.Raw


class Declared(msgspec.Struct, frozen=True, kw_only=True):
    """Built-in axes of an implementation, and why it cannot be loaded, or ""."""

    built_in: dict[str, int | float | str] = {}
    problem: str = ""


class CellRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request about one cell; `spec` is the source of the arm's implementation."""

    workload: Workload
    arm: Arm
    spec: str

    @property
    def names(self) -> dict[str, Any]:
        """Fields of an event that name the cell."""
        return {"workload": self.workload.id, "implementation": self.arm.implementation, "side": self.arm.side}


class LimitedRequest(CellRequest, frozen=True, kw_only=True):
    """A request about a cell that is not tried beyond these limits; if `is_rough`, a rough prediction is enough."""

    call_limit_s: float
    memory_limit_bytes: int
    is_rough: bool = False


class Prepare(LimitedRequest, frozen=True, kw_only=True, tag="prepare"):
    """Test whether a cell is supported and within the limits."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """Facts about an implementation on a workload that a check needs (contract.Implementation)."""

    has_dropout: bool
    executed_flops: int | None
    is_approximate: bool = False
    has_pack: bool = False  # its module maps canonical weights to its parameters
    call_s: float | None = None  # predicted seconds of one call; None without a shorter length


class Check(LimitedRequest, frozen=True, kw_only=True, tag="check"):
    """Check whether the implementation is right, and within the limits.

    The judge has the cell prepared first. `is_brief` compares only one kind of input and tries no rules: enough if the
    implementation has fully passed on a workload of the same kind.
    """

    seed: int
    is_brief: bool = False
    left_out: tuple[str, ...] = ()  # probe names
    rejects: tuple[str, ...] = ()  # see Plan


class Place(msgspec.Struct, frozen=True, kw_only=True):
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


class CandidateRequest(CellRequest, frozen=True, kw_only=True):
    """A request of the judge to the process with the candidate (processes/remote.py), through the coordinator.

    `exchange` is the path of the file with tensors, and `forget` lists modules that are no longer used. `random` is the
    state of each of the judge's generators, which the candidate draws from.
    """

    exchange: str
    random: tuple[bytes, ...]
    forget: tuple[int, ...]
    tensors: dict[str, Place]


class Call(CandidateRequest, frozen=True, kw_only=True, tag="call"):
    """Call a module forward; `needs` names the tensors that get gradients. `is_inference`: in torch.inference_mode.

    With `weights` the module is built first.
    """

    module: int
    call: int
    weights: dict[str, Place] = {}
    needs: tuple[str, ...]
    mask: str
    sizes: tuple[int, int, int]
    num_heads: int
    scale: float | None
    device: str
    dropout: float
    mask_form: str = ""
    world_size: int = 1
    is_inference: bool = False


class Backward(CandidateRequest, frozen=True, kw_only=True, tag="backward"):
    """Compute the gradients of a call from that of its output."""

    call: int


class Tensors(msgspec.Struct, frozen=True, kw_only=True, tag="tensors"):
    """The results of a call, and tensors changed in place: its inputs, and outputs of earlier calls.

    `faults` lists other changes by rule (checking/conduct.py). `random` is the state of each generator after the call.
    """

    tensors: dict[str, Place]
    changed: dict[str, Place]
    changed_outputs: dict[str, Place]
    faults: dict[str, str]
    random: tuple[bytes, ...]


class Observe(CellRequest, frozen=True, kw_only=True, tag="observe"):
    """Read a metric in a pass of its own."""

    metric: str


class Profile(CellRequest, frozen=True, kw_only=True, tag="profile"):
    """Profile the operators of a call; with `file`, trace some steps into it instead."""

    file: str = ""


class PrepareWitness(CellRequest, frozen=True, kw_only=True, tag="prepare_witness"):
    """Prepare `num_calls` calls, each on its own inputs drawn from `seed` (checking/witness.py).

    The implementation is first called `num_before` times, if there is time, to detect code that computes honestly only
    for a while.
    """

    num_before: int
    num_calls: int
    seed: int


class Witness(CellRequest, frozen=True, kw_only=True, tag="witness"):
    """Make the prepared calls from `first` up to, but not including, `last`; keep their results."""

    first: int
    last: int


class HandIn(CellRequest, frozen=True, kw_only=True, tag="hand_in"):
    """Send the results of the calls with these numbers, then drop the results of all calls."""

    numbers: tuple[int, ...]


class HandedIn(msgspec.Struct, frozen=True, kw_only=True, tag="handed_in"):
    """The places of outputs and gradients by number and name; empty if dropout makes them random."""

    exchange: str
    tensors: dict[str, Place]


class JudgeOutput(CellRequest, frozen=True, kw_only=True, tag="judge_output"):
    """Judge the outputs that were handed in; `row_seed` draws the rows."""

    handed: HandedIn
    seed: int
    numbers: tuple[int, ...]
    row_seed: int


class MeasureCeilings(msgspec.Struct, frozen=True, kw_only=True, tag="ceilings"):
    """Measure the ceilings of this machine for the workload's device, dtype and threads, in about `limit_s` seconds."""

    workload: Workload
    limit_s: float


class SampleBlocks(Visit, frozen=True, kw_only=True, tag="visit"):
    """Sample the blocks of a visit. `arms` pairs arms with their specs."""

    workload: Workload
    arms: tuple[tuple[Arm, str], ...]
    cache: str = "warm"
    launch: str = "eager"
    verifies: bool = True  # check the answers of all arms afterwards
    is_clocked: bool = False  # answer at once; the next request looks for changes of the process
    settles: bool = False  # answer only after all threads stopped spinning: another process follows

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


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The worker's environment; with two workers, the candidate's and the base's."""

    environment: Environment
    base: Environment | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The request succeeded; a judged output is right."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
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


def raised(error: Exception) -> dict[str, Any]:
    """Fields of Failed: the exception that the candidate raised."""
    return {"raised": type(error).__name__, "said": (str(error).splitlines() or [""])[0]}


Consulted = Prepare | Call | Backward
"""Requests of the judge to a candidate's process."""
Answer = Prepared | Tensors | Failed
"""Replies to the judge."""
Work = CellRequest | MeasureCeilings | SampleBlocks
"""Requests about a workload to a started worker."""
Request = Start | Evaluate | Work | Answer
Reply = msgspec.Struct
"""A reply; work that is an event of the run is answered by that event, ready for the journal (storage/events.py)."""
ANSWERS: dict[type[Request], tuple[type[Reply], ...]] = {
    Start: (Started,),
    Evaluate: (Evaluated,),
    Prepare: (Prepared,),
    Check: (CellChecked, Prepare, Call, Backward),
    **dict.fromkeys((Prepared, Tensors, Failed), (CellChecked, Call, Backward)),
    **dict.fromkeys((Call, Backward), (Tensors,)),
    Observe: (CellMeasured,),
    Profile: (CellProfiled, Done),
    HandIn: (HandedIn,),
    **dict.fromkeys((PrepareWitness, Witness, JudgeOutput), (Done,)),
    MeasureCeilings: (CeilingsMeasured,),
    SampleBlocks: (VisitFinished,),
}
"""Replies to each request besides Failed; any other reply counts as a crash."""
REQUESTS: Any = Union[tuple(ANSWERS)]  # noqa: UP007 - of a tuple


ENDS, GOES_ON = b"!", b" "
"""First byte of a line: whether the worker is unusable, because its device fails, or its state was changed."""


def enveloped(reply: Reply, *, ends: bool = False) -> bytes:
    """The line that a worker sends."""
    return (ENDS if ends else GOES_ON) + msgspec.json.encode(reply) + b"\n"


def opened(line: bytes, request: Request) -> tuple[Reply, bool]:
    """The reply to a request, and whether the worker is unusable.

    Raises:
        msgspec.DecodeError: the line is not an answer to this request.
    """
    allowed: Any = Union[(*ANSWERS[type(request)], Failed)]
    return msgspec.json.decode(line[1:], type=allowed), line.startswith(ENDS)


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
