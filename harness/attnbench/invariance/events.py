"""What a check of invariance is asked and answers, a line each, from its process to the command's."""

import msgspec

from attnbench.workloads.workload import Workload


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """An implementation, the shape at which it is tried, and how long may be spent on its price in time."""

    spec: str
    workload: Workload
    baseline: str
    budget_s: float
    seed: int


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One line."""


class LawTried(Event, frozen=True, kw_only=True, tag="law"):
    """One law: how often it was put to the test, and where it was broken first, or why it could not be tried."""

    law: str
    num_tried: int = 0
    broken: str = ""
    reason: str = ""


class Priced(Event, frozen=True, kw_only=True, tag="priced"):
    """The time of a call next to the baseline's, in interleaved blocks."""

    phase: str
    seconds: float
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str


class Failed(Event, frozen=True, kw_only=True, tag="failed"):
    """Why the implementation could not be tried at all."""

    reason: str


AnyEvent = LawTried | Priced | Failed


class Certificate(msgspec.Struct, frozen=True, kw_only=True):
    """All that was found out about one implementation at one shape."""

    implementation: str
    workload: Workload
    seed: int
    laws: tuple[LawTried, ...] = ()
    prices: tuple[Priced, ...] = ()
    failed: str = ""

    @property
    def broken(self) -> tuple[LawTried, ...]:
        """The laws that do not hold."""
        return tuple(law for law in self.laws if law.broken)

    @property
    def holds(self) -> bool:
        """Whether something was tried, and every law that could be tried holds."""
        return not self.failed and not self.broken and any(law.num_tried for law in self.laws)
