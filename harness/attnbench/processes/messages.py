"""The protocol between the coordinator and a worker: requests and replies as JSON lines, and the heartbeat.

Each request gets one reply, whose type ANSWERS lists, or Failed. The worker writes the heartbeat before each step; it
outlives a crash.
"""

import mmap
import os
import struct
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from attnbench.invariance.records import Certificate
from attnbench.models.records import Judged, ModelBuilt, ModelSpec, StepsTimed
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
PRELOADED = "ATTNBENCH_PRELOADED"
"""The variable in a template's environment that names modules, joined by commas, which it imports if it can."""
FORK = 0
"""Sent to the template (processes/worker/__main__.py) for a new worker; the process id of a worker ends it."""


class Start(msgspec.Struct, frozen=True, kw_only=True, tag="start"):
    """First request to a fresh worker. `layout` shifts where memory lies, so that no epoch is like another."""

    layout: int = 0


class Declare(msgspec.Struct, frozen=True, kw_only=True, tag="declare"):
    """Load an implementation."""

    spec: str


class Declared(msgspec.Struct, frozen=True, kw_only=True, tag="declared"):
    """The values of axes that an implementation has built in, and why it cannot be loaded, or ""."""

    built_in: dict[str, int | float | str] = {}
    problem: str = ""


class CellRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request about one cell; `spec` says from where the arm's implementation is loaded."""

    workload: Workload
    arm: Arm
    spec: str

    @property
    def names(self) -> dict[str, Any]:
        """The fields of an event that name the cell."""
        return {"workload": self.workload.id, "implementation": self.arm.implementation, "side": self.arm.side}


class LimitedRequest(CellRequest, frozen=True, kw_only=True):
    """A request about a cell that is not tried beyond these limits.

    With `is_rough` nothing more is measured once a call is certainly within them.
    """

    call_limit_s: float
    memory_limit_bytes: int
    is_rough: bool = False


class Prepare(LimitedRequest, frozen=True, kw_only=True, tag="prepare"):
    """See whether a cell is supported and within the limits."""


class Prepared(msgspec.Struct, frozen=True, kw_only=True, tag="prepared"):
    """Facts about an implementation at a workload that a check needs (contract.Implementation)."""

    has_dropout: bool
    executed_flops: int | None
    is_approximate: bool = False
    call_s: float | None = None  # predicted, of one call; None: from nothing that is shorter
    peak_bytes: float | None = None  # likewise; None where it is far from any limit, or the workload so short


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the oracle: a workload, and the probes that are left out; `is_brief` asks about one probe alone."""

    workload: Workload
    seed: int
    is_brief: bool = False
    left_out: tuple[str, ...] = ()


class Check(LimitedRequest, frozen=True, kw_only=True, tag="check"):
    """Check whether the implementation is right, and within the limits.

    A client prepares the cell first, and asks its judge with what that has shown. With `is_brief` one kind of input
    alone is compared, and no rules are tried: enough where the implementation has passed in full at a workload of the
    same kind. While the implementation is called, the oracle computes what the next check needs: `following`.
    """

    seed: int
    is_brief: bool = False
    left_out: tuple[str, ...] = ()  # probes
    rejects: tuple[str, ...] = ()  # see Plan
    prepared: Prepared | None = None
    following: Question | None = None

    @property
    def question(self) -> Question:
        """The question to the oracle that this check needs answered."""
        return Question(workload=self.workload, seed=self.seed, is_brief=self.is_brief, left_out=self.left_out)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """The place of a tensor's storage in a file, and the tensor's layout in it, as torch has them.

    `memory` is where the sender has the storage: what is sent twice from one place is one tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    at: int
    num_bytes: int
    memory: int


class CandidateRequest(CellRequest, frozen=True, kw_only=True):
    """A request of the judge to the process that holds a candidate (processes/remote.py), through the coordinator.

    `exchange` is the path of the file that tensors pass through, and `forget` has the modules that are no longer used.
    `random` is the state of each of the judge's generators, from which the candidate draws.
    """

    exchange: str
    random: tuple[bytes, ...]
    forget: tuple[int, ...]
    tensors: dict[str, Place]


class Build(CandidateRequest, frozen=True, kw_only=True, tag="build"):
    """Build a module with these weights."""

    module: int


class Call(CandidateRequest, frozen=True, kw_only=True, tag="call"):
    """Call a module forward; `needs` names the tensors that get gradients. `is_inference`: in torch.inference_mode.

    With `weights` the module is built first: a cell's first module alone is built by Build, which says what it offers.
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
    """The gradients of a call, from that of its output."""

    call: int


class Account(CellRequest, frozen=True, kw_only=True, tag="account"):
    """Look for changes of the process since the last look; a change is a failure."""


class Built(msgspec.Struct, frozen=True, kw_only=True, tag="built"):
    """The optional methods of the candidate's module, and the state of each generator after it was built."""

    has_attend: bool
    has_pack: bool
    random: tuple[bytes, ...]


class Tensors(msgspec.Struct, frozen=True, kw_only=True, tag="tensors"):
    """The results of a call, and the tensors that it changed in place: its inputs, and outputs of earlier calls.

    `faults` says what else it changed, and `notes` what else it did, by rule (checking/conduct.py). `random` is the
    state of each generator after it.
    """

    tensors: dict[str, Place]
    changed: dict[str, Place]
    changed_outputs: dict[str, Place]
    faults: dict[str, str]
    notes: dict[str, str]
    random: tuple[bytes, ...]


class Observe(CellRequest, frozen=True, kw_only=True, tag="observe"):
    """Read a metric that has a pass of its own."""

    metric: str


class Profile(CellRequest, frozen=True, kw_only=True, tag="profile"):
    """See which operators run."""


class PrepareWitness(CellRequest, frozen=True, kw_only=True, tag="prepare_witness"):
    """Prepare `num_calls` calls, each on inputs of its own, which follow from `seed` (checking/witness.py).

    First the implementation is called `num_before` times, or for `before_s` seconds: code that works honestly only for
    a while is seen afterwards.
    """

    num_before: int
    before_s: float
    num_calls: int
    seed: int


class Witness(CellRequest, frozen=True, kw_only=True, tag="witness"):
    """Make the prepared calls from `first` to before `last`, and keep what they return."""

    first: int
    last: int


class HandIn(CellRequest, frozen=True, kw_only=True, tag="hand_in"):
    """Send what the call with this number returned; after the last, forget all."""

    number: int
    is_last: bool


class HandedIn(msgspec.Struct, frozen=True, kw_only=True, tag="handed_in"):
    """The places of output and gradients, by name; none where dropout makes them random."""

    exchange: str
    tensors: dict[str, Place]


class JudgeOutput(CellRequest, frozen=True, kw_only=True, tag="judge_output"):
    """Whether an output that was handed in is right; `row_seed` draws the rows."""

    handed: HandedIn
    seed: int
    number: int
    row_seed: int


class Trace(CellRequest, frozen=True, kw_only=True, tag="trace"):
    """Trace some steps into `file`."""

    file: str


class Attempt(CellRequest, frozen=True, kw_only=True, tag="attempt"):
    """Make a call that may not fit, and see what it takes.

    `limit_bytes` is all that the call may take beyond its inputs; 0: as much as there is.
    """

    limit_bytes: int = 0


class Certify(CellRequest, frozen=True, kw_only=True, tag="certify"):
    """Try every law of invariance, then time prefill and decoding."""

    seed: int
    baseline: str  # a spec
    budget_s: float  # of the times; 0: none are taken


class BuildModel(msgspec.Struct, frozen=True, kw_only=True, tag="build_model"):
    """Build a model of the package transformers."""

    spec: ModelSpec


class JudgeAttention(msgspec.Struct, frozen=True, kw_only=True, tag="judge_attention"):
    """Check one attention in the model that was built."""

    attention: str


class TimeSteps(msgspec.Struct, frozen=True, kw_only=True, tag="time_steps"):
    """Time a step of the model with each attention, in about `budget_s`."""

    attentions: tuple[str, ...]
    budget_s: float


class MeasureCeilings(msgspec.Struct, frozen=True, kw_only=True, tag="ceilings"):
    """Measure what this machine can do at most, on the workload's device, dtype and threads, in about `limit_s`."""

    workload: Workload
    limit_s: float


class SampleBlocks(Visit, frozen=True, kw_only=True, tag="visit"):
    """Sample the blocks of a visit. `arms` pairs arms with their specs."""

    workload: Workload
    arms: tuple[tuple[Arm, str], ...]
    cache: str = "warm"
    launch: str = "eager"
    verifies: bool = True  # check afterwards that every arm still computes
    is_clocked: bool = False  # answer at once: what was changed meanwhile is looked for by the next request
    settles: bool = False  # answer only when no thread spins any more: another process is next

    def finished(
        self, samples: Mapping[Arm, Sequence[Sample]], called_s: float, states: Sequence[DeviceState] = ()
    ) -> VisitFinished:
        """The answer: each arm's samples in time order, the seconds inside their calls, and the device's states."""
        return VisitFinished(
            workload=self.workload.id,
            epoch=self.epoch,
            visit=self.number,
            arms=tuple(ArmSamples(arm=arm, samples=tuple(own)) for arm, own in samples.items()),
            called_s=called_s,
            states=tuple(states),
            probe=f"{self.workload.device}, {self.workload.num_threads} threads",
        )


Consulted = Build | Call | Backward
"""Requests of the judge to a candidate's process."""
Aside = Declare | BuildModel | JudgeAttention | TimeSteps
"""Requests about no workload."""
Work = (
    Prepare
    | Check
    | Profile
    | Observe
    | MeasureCeilings
    | SampleBlocks
    | PrepareWitness
    | Witness
    | HandIn
    | Account
    | JudgeOutput
    | Trace
    | Attempt
    | Certify
    | Consulted
)
"""Requests to a worker that was started."""


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """The worker's environment; of two workers the candidate's, and also the base's."""

    environment: Environment
    base: Environment | None = None


class Done(msgspec.Struct, frozen=True, kw_only=True, tag="done"):
    """The request was carried out; the output that was judged is right."""


class Attempted(msgspec.Struct, frozen=True, kw_only=True, tag="attempted"):
    """The call fits. `free_bytes` were free before it."""

    call_s: float
    peak_bytes: int
    free_bytes: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed at this arm; at the interference probe, or without an arm: in the harness itself."""

    status: Status
    message: str
    arm: Arm = PROBE
    raised: str = ""  # the name of the error that was raised, and what it said
    said: str = ""
    is_lost: bool = False  # the process ended, which may be somebody else's deed
    is_predicted: bool = False  # nothing was tried
    is_close: bool = False  # and another moment may predict otherwise
    is_unloadable: bool = False  # the implementation cannot be loaded, whatever the workload


Answer = Built | Tensors | Failed
"""The answers to what the judge asks."""
Request = Start | Work | Aside | Answer
Reply = (
    Started
    | Prepared
    | CellChecked
    | CellProfiled
    | CellMeasured
    | CeilingsMeasured
    | VisitFinished
    | Done
    | HandedIn
    | Attempted
    | Certificate
    | Declared
    | ModelBuilt
    | Judged
    | StepsTimed
    | Consulted
    | Answer
)
"""Replies; work that is an event of the run is answered by that event, ready for the journal (storage/events.py)."""


ANSWERS: dict[type[Request], tuple[type[Reply], ...]] = {
    Start: (Started,),
    Prepare: (Prepared,),
    Check: (CellChecked, Build, Call, Backward),
    Build: (Built,),
    Call: (Tensors,),
    Backward: (Tensors,),
    Account: (Done,),
    Observe: (CellMeasured,),
    Profile: (CellProfiled,),
    PrepareWitness: (Done,),
    Witness: (Done,),
    HandIn: (HandedIn,),
    JudgeOutput: (Done,),
    Trace: (Done,),
    Attempt: (Attempted,),
    Certify: (Certificate,),
    Declare: (Declared,),
    BuildModel: (ModelBuilt,),
    JudgeAttention: (Judged,),
    TimeSteps: (StepsTimed,),
    MeasureCeilings: (CeilingsMeasured,),
    SampleBlocks: (VisitFinished,),
    **dict.fromkeys((Built, Tensors, Failed), (CellChecked, Build, Call, Backward)),
}
"""The replies to each request besides Failed; any other reply counts as a crash."""


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """A reply as it is sent, and whether the worker is of no more use: its device fails, or its state was changed."""

    reply: Reply
    ends: bool = False


class Heartbeat:
    """Eight bytes of shared memory that say which arm a worker is trying; the worker writes, the coordinator reads.

    Writing takes less than a microsecond, so that even inside a block each turn can be announced. The file behind it
    has no name: nothing remains of it, however the processes end.
    """

    HARNESS, LOADING = 2**32 - 1, 2**32 - 2
    """Stand for no arm: the harness's own work, and an implementation that is being loaded."""
    _LAYOUT = struct.Struct("<II")  # how many steps were begun, index of the arm

    def __init__(self, file: int | None = None) -> None:
        """Map the open file that another process has made; without one, make a new file."""
        if file is None:
            with tempfile.TemporaryFile() as made:
                made.truncate(self._LAYOUT.size)
                file = os.dup(made.fileno())
        self.file = file
        self._memory = mmap.mmap(file, self._LAYOUT.size)

    def beat(self, arm: int = 0) -> None:
        """Announce a step of the arm with this index; where a request names one implementation, of that."""
        self._LAYOUT.pack_into(self._memory, 0, (self.read()[0] + 1) % 2**32, arm)

    def read(self) -> tuple[int, int]:
        """How many steps were begun, and the index of the arm that the last one tries."""
        count, arm = self._LAYOUT.unpack_from(self._memory, 0)
        return count, arm

    def close(self) -> None:
        """Let go of the memory and of the file."""
        self._memory.close()
        os.close(self.file)
