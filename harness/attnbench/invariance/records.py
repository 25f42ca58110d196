"""The findings of an invariance check."""

import msgspec

from attnbench.workloads.workload import Workload


class LawTried(msgspec.Struct, frozen=True, kw_only=True):
    """One law: the number of trials, and its first violation, or why it could not be tried."""

    law: str
    num_tried: int = 0
    broken: str = ""
    reason: str = ""


class Certificate(msgspec.Struct, frozen=True, kw_only=True, tag="certificate"):
    """The laws of one implementation at one shape; `failed` says why nothing could be tried."""

    implementation: str
    workload: Workload
    seed: int
    laws: tuple[LawTried, ...] = ()
    failed: str = ""

    @property
    def broken(self) -> tuple[LawTried, ...]:
        """Laws that are violated."""
        return tuple(law for law in self.laws if law.broken)

    @property
    def holds(self) -> bool:
        """Whether some law was tried, and none is violated."""
        return not self.failed and not self.broken and any(law.num_tried for law in self.laws)
