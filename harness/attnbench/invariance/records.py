"""The findings of an invariance check."""

import msgspec

from attnbench.workloads.workload import Workload


class LawTried(msgspec.Struct, frozen=True, kw_only=True):
    """The result of testing one law (laws.py): that a change such as a larger batch leaves an output bitwise equal."""

    law: str
    num_tried: int = 0  # number of comparisons
    broken: str = ""  # the first violation, in words; "" if there is none
    reason: str = ""  # why the law could not be tried to its end; "" if it was


class Certificate(msgspec.Struct, frozen=True, kw_only=True, tag="certificate"):
    """The results of all laws for one implementation at one shape. `failed` says why nothing was tried, or is ""."""

    implementation: str
    workload: Workload
    seed: int
    laws: tuple[LawTried, ...] = ()
    failed: str = ""

    @property
    def broken(self) -> tuple[LawTried, ...]:
        """The results of violated laws."""
        return tuple(law for law in self.laws if law.broken)

    @property
    def holds(self) -> bool:
        """Whether some law was tried, and none is violated."""
        return not self.failed and not self.broken and any(law.num_tried for law in self.laws)
