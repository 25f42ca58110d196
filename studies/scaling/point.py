"""What was measured of one implementation with one number of ranks."""

import msgspec

from attnbench.workloads.workload import Workload


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of one implementation at one workload."""

    name: str
    workload: Workload
    problem: str = ""  # why it was not measured
    call_s: float = 0.0  # medians: of the whole call,
    slowest_s: float = 0.0  # of its slowest rank,
    straggling_s: float = 0.0  # and by how much the busiest computes longer than the least busy
    num_bytes: int = 0


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """A point as part of one kind of scaling."""

    kind: str  # strong, or weak
    point: Point
    efficiency: float = float("nan")
