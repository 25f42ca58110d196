"""What was measured of one implementation with one number of ranks."""

from dataclasses import dataclass

from attnbench.workloads.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Point:
    """What was measured of one implementation at one workload."""

    kind: str  # strong, or weak
    name: str
    workload: Workload
    problem: str = ""  # why it was not measured
    call_s: float = 0.0  # medians: of the whole call,
    slowest_s: float = 0.0  # of its slowest rank,
    straggling_s: float = 0.0  # and by how much the busiest computes longer than the least busy
    num_bytes: int = 0
    efficiency: float = float("nan")
