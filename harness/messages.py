"""What the parent asks of a worker, and what the worker answers: JSON lines over a pipe, an answer for each request."""

import msgspec

from harness.outcome import Agreement
from harness.records import Environment, Measurement, Sample, Status, Workload


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who are you? Answered by Ready. `layout` shifts where memory lies, so that no epoch is like another."""

    layout: int = 0


class Check(msgspec.Struct, frozen=True, kw_only=True, tag="check"):
    """Is this implementation right on this workload, and within reach? Answered by Checked."""

    workload: Workload
    spec: str
    call_limit_s: float
    memory_limit_bytes: int
    seed: int


class Observe(msgspec.Struct, frozen=True, kw_only=True, tag="observe"):
    """Read a metric that has a pass of its own. Answered by Observed, or Failed."""

    workload: Workload
    spec: str
    metric: str


class TakeVisit(msgspec.Struct, frozen=True, kw_only=True, tag="visit"):
    """Sample some blocks. `arms` pairs an arm's name with its implementation's spec. Answered by Visited or Failed."""

    workload: Workload
    arms: tuple[tuple[str, str], ...]
    epoch: int
    visit: int
    num_blocks: int
    seed: int
    cache: str = "warm"
    verifies: bool = True  # see afterwards whether every arm still computes


Request = Hello | Check | Observe | TakeVisit


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


class Observed(msgspec.Struct, frozen=True, kw_only=True, tag="observed"):
    """The metric's value."""

    measurement: Measurement


class Visited(msgspec.Struct, frozen=True, kw_only=True, tag="visited"):
    """The samples of each arm, and the seconds inside calls."""

    arms: dict[str, tuple[Sample, ...]]
    called_s: float = 0.0


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """The request failed at this arm (or the request's only implementation)."""

    arm: str
    status: Status
    message: str


Reply = Ready | Checked | Observed | Visited | Failed
