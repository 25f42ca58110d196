"""Reports of the ranks of one call: bytes sent, time of the slowest, and imbalance.

Counted and timed in the ranks (ranks/rank.py): from when all are ready to when each has its own part of the result,
without what it takes to share out the inputs and to collect the output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric

if TYPE_CHECKING:
    from attnbench.checking.case import Case
    from attnbench.ranks.group import Report
    from attnbench.workloads.workload import Workload


def has_ranks(workload: Workload) -> bool:
    """Whether several ranks compute a call."""
    return workload.world_size > 1


def passes(case: Case) -> list[list[Report]]:
    """The reports of each rank on each pass of one call, after a first one."""
    from attnbench.ranks.group import group_of

    group = group_of(case.workload.world_size, case.mask.device.type)
    with case.grad_mode():
        call = case.call()
        call()
        group.reports.clear()
        call()
    return list(group.reports)


def bytes_sent(case: Case) -> float:
    """The bytes that all ranks send to others."""
    return float(sum(rank.bytes_sent for each in passes(case) for rank in each))


def slowest_rank(case: Case) -> float:
    """The seconds of the slowest rank, passes added up."""
    return sum(max(rank.call_s for rank in each) for each in passes(case))


def straggling(case: Case) -> float:
    """The seconds by which the rank with most work computes longer than the one with least, passes added up."""
    busy = [[rank.call_s - rank.waited_s for rank in each] for each in passes(case)]
    return sum(max(each) - min(each) for each in busy)


METRIC = {
    "bytes_sent": Metric(
        unit="bytes", summary="what the ranks of one call send to one another", measure=bytes_sent, fits=has_ranks
    ),
    "slowest_rank": Metric(
        unit="s",
        summary="time of the slowest rank of one call, less the sharing out",
        measure=slowest_rank,
        fits=has_ranks,
    ),
    "straggling": Metric(
        unit="s", summary="by how much longer the busiest rank computes", measure=straggling, fits=has_ranks
    ),
}
