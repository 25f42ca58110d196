"""What the parent asks of a worker, and what the worker answers: JSON lines over a pipe, an answer for each request."""

import msgspec

from attnbench.storage.events import ArmSamples
from attnbench.storage.memory_events import Timeline
from attnbench.storage.records import PROBE, Agreement, Arm, Ceilings, Environment, Measurement, Operators, Status
from attnbench.workloads.workload import Workload


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who are you? Answered by Ready. `layout` shifts where memory lies, so that no epoch is like another."""

    layout: int = 0


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Is this implementation right on this workload, and within reach? Answered by Checked."""

    workload: Workload
    spec: str
    side: str = ""  # as in Arm
    call_limit_s: float
    memory_limit_bytes: int
    seed: int


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag="observe"):
    """Read a metric that has a pass of its own. Answered by Observed, or Failed."""

    workload: Workload
    spec: str
    side: str = ""  # as in Arm
    metric: str


class Profile(msgspec.Struct, frozen=True, kw_only=True, tag="profile"):
    """See which operators run. Answered by Profiled, or Failed."""

    workload: Workload
    spec: str
    side: str = ""  # as in Arm


class FindCeilings(msgspec.Struct, frozen=True, kw_only=True, tag="ceilings"):
    """What can this machine do at most, on the workload's device, dtype and threads? Answered by Found, or Failed."""

    workload: Workload
    limit_s: float


class TakeVisit(msgspec.Struct, frozen=True, kw_only=True, tag="visit"):
    """Sample some blocks. `arms` pairs an arm with its implementation's spec. Answered by Visited or Failed."""

    workload: Workload
    arms: tuple[tuple[Arm, str], ...]
    epoch: int
    visit: int
    num_blocks: int
    seed: int
    cache: str = "warm"
    verifies: bool = True  # see afterwards whether every arm still computes
    settles: bool = False  # answer only when no thread spins any more: another process is next


class Trace(msgspec.Struct, frozen=True, kw_only=True, tag="trace"):
    """Trace some steps into `file`. Answered by Traced, or Failed."""

    workload: Workload
    spec: str
    side: str = ""  # as in Arm
    file: str


class Attempt(msgspec.Struct, frozen=True, kw_only=True, tag="attempt"):
    """Does a call fit, and what does it take? Answered by Attempted, or Failed.

    `limit_bytes` is all that the call may take beyond its inputs; 0: as much as there is. `snapshot` is a file for
    CUDA's memory snapshot; "": none.
    """

    workload: Workload
    spec: str
    side: str = ""  # as in Arm
    limit_bytes: int = 0
    snapshot: str = ""


Work = Check | Profile | Observe | FindCeilings | TakeVisit | Trace | Attempt
Request = Hello | Work


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The worker's environment; of two workers the candidate's, and the base's beside it."""

    environment: Environment
    base: Environment | None = None


class Checked(msgspec.Struct, frozen=True, kw_only=True, tag="checked"):
    """How the check ended."""

    status: Status
    message: str = ""
    is_predicted: bool = False
    agreement: Agreement | None = None
    check_s: float = 0.0
    executed_flops: int | None = None
    ends: bool = False  # the worker can do nothing more: its device answers every call with the same error


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag="observed"):
    """The metric's value."""

    measurement: Measurement


class Profiled(msgspec.Struct, frozen=True, kw_only=True, tag="profiled"):
    """What ran."""

    operators: Operators


class Found(msgspec.Struct, frozen=True, kw_only=True, tag="found"):
    """What products and copies reached."""

    ceilings: Ceilings


class Visited(msgspec.Struct, frozen=True, kw_only=True, tag="visited"):
    """The samples of each arm, and the seconds inside calls."""

    arms: tuple[ArmSamples, ...]
    called_s: float = 0.0


class Traced(msgspec.Struct, frozen=True, kw_only=True, tag="traced"):
    """The trace is written, and has as many bytes."""

    num_bytes: int


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed at this arm; at the interference probe, or without an arm: by the harness itself."""

    status: Status
    message: str
    arm: Arm = PROBE
    ends: bool = False  # as of Checked


class Attempted(msgspec.Struct, frozen=True, kw_only=True, tag="attempted"):
    """It fits. `timeline` is there on the CPU alone; `free_bytes` were free before it."""

    call_s: float
    peak_bytes: int
    free_bytes: int
    timeline: Timeline | None = None


Reply = Ready | Checked | Profiled | Observed | Found | Visited | Traced | Attempted | Failed
