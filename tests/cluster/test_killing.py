"""The check of the kill trials detects overlaps."""

from attnbench.storage.events import ArmSamples, VisitFinished
from attnbench.storage.records import Arm, Sample
from tests.cluster.killing import overlaps


def visit(start_s: float, length_s: float) -> VisitFinished:
    sample = Sample(value=length_s / 2, num_calls=2, start_s=start_s)
    return VisitFinished(
        workload="w", epoch=0, visit=0, arms=(ArmSamples(arm=Arm(implementation="sdpa"), samples=(sample,)),)
    )


def test_two_hosts_that_measure_at_once_are_seen():
    assert overlaps({"one/0": [visit(0.0, 1.0), visit(2.0, 1.0)], "two/1": [visit(1.0, 1.0)]}) == []
    (found,) = overlaps({"one/0": [visit(0.0, 1.0)], "two/1": [visit(0.9, 1.0)]})
    assert "one/0 and two/1 measured at once" in found
