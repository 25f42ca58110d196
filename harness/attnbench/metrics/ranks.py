"""Metrics of a call over several ranks, from the ranks' reports: bytes sent, time of the slowest rank, and imbalance.

Each rank counts and times its own work (ranks/rank.py), from the moment when all ranks are ready until it has its part
of the result. Distributing the inputs and collecting the output are excluded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.devices import device
from attnbench.metrics import Metric

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnbench.case import Case
    from attnbench.ranks.group import Report
    from attnbench.workloads.workload import Workload


def has_ranks(workload: Workload) -> bool:
    """Return whether several ranks compute a call of the workload."""
    return workload.world_size > 1


def passes(case: Case) -> list[list[Report]]:
    """Run one call after a warm-up; for each of its passes (forward, backward), return one report per rank."""
    from attnbench.ranks.group import group_of

    group = group_of(case.workload.world_size, case.mask.device.type)
    with case.grad_mode():
        call = case.call()
        call()
        group.reports.clear()
        call()
    return list(group.reports)


def bytes_sent(case: Case) -> float:
    """Return the bytes that all ranks together send to other ranks in one call."""
    return float(sum(rank.bytes_sent for each in passes(case) for rank in each))


def slowest_rank(case: Case) -> float:
    """Return the seconds of the slowest rank of each pass, summed over the passes of one call."""

    def slowest_s(reports: Sequence[Report]) -> float:
        return max(rank.call_s for rank in reports)

    return sum(map(slowest_s, passes(case)))


def straggling(case: Case) -> float:
    """Return the busiest rank's computing seconds minus those of the idlest rank, summed over the passes of a call."""

    def difference_s(reports: Sequence[Report]) -> float:
        busy_s = [rank.call_s - rank.waited_s for rank in reports]
        return max(busy_s) - min(busy_s)

    return sum(map(difference_s, passes(case)))


METRIC = {
    "bytes_sent": Metric(
        unit="bytes", summary="bytes that the ranks of one call send to one another", measure=bytes_sent, fits=has_ranks
    ),
    "slowest_rank": Metric(
        unit="s",
        summary="time of the slowest rank of one call, without distributing the inputs",
        measure=slowest_rank,
        fits=has_ranks,
    ),
    "straggling": Metric(
        unit="s",
        summary="computing time of the busiest rank less that of the idlest one",
        measure=straggling,
        # Only on the host: on a device with queues a wait returns at once, so the ranks' waiting time is unknown.
        fits=lambda workload: has_ranks(workload) and device(workload.device).is_host,
    ),
}
