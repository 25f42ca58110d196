"""How much of the machine one cell uses: its count of work over its time, beside the ceilings of the run."""

from dataclasses import dataclass

from attnbench.storage.ceilings import Ceilings
from attnbench.workloads import counts
from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one cell. What was not measured is None."""

    flops_per_s: float  # useful FLOPs
    bytes_per_s: float  # compulsory bytes
    matmul_share: float | None  # of the matmul ceiling
    copy_share: float | None  # of the fastest copy of as many bytes


def rates(workload: Workload, time_s: float, ceilings: Ceilings | None, *, is_cold: bool = False) -> Rates:
    """The rates of a call that takes `time_s` seconds."""
    num_bytes = counts.compulsory_bytes(workload)
    flops_per_s, bytes_per_s = counts.useful_flops(workload) / time_s, num_bytes / time_s
    matmul = None if ceilings is None else ceilings.matmul
    copy = None if ceilings is None else ceilings.copy(num_bytes, is_cold=is_cold)
    return Rates(
        flops_per_s=flops_per_s,
        bytes_per_s=bytes_per_s,
        matmul_share=None if matmul is None else flops_per_s / matmul.rate,
        copy_share=None if copy is None else bytes_per_s / copy.rate,
    )


def executed_ratio(workload: Workload, executed_flops: int | None) -> float | None:
    """Executed FLOPs for each useful one; None where nobody knows, or nothing is useful."""
    useful = counts.useful_flops(workload)
    return None if executed_flops is None or not useful else executed_flops / useful
