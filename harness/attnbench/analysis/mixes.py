"""Total the attention time of a whole model for each arm, from the cells of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from attnbench.analysis.comparisons import Comparison, comparisons, paired_times
from attnbench.analysis.results import Results
from attnbench.storage.records import Arm, Key
from attnbench.workloads.models import Mix


@dataclass(frozen=True, kw_only=True)
class Total:
    """The attention of all layers of a model at one point, by one arm.

    `seconds` is the time of one pass: each layer's time times its count; None if a layer has no time. The ratio is to
    the baseline's total; None if a layer was not compared with the baseline.
    """

    mix: Mix
    arm: Arm
    seconds: float | None = None
    ratio: float | None = None

    @property
    def num_calls(self) -> int:
        """Number of attention layers of the model at this point, or of calls of a service."""
        return sum(self.mix.counts.values())


def totals(results: Results) -> list[Total]:
    """Every arm at each point of a model, the fastest first; empty if the run was not planned for a model."""
    compared = {comparison.key: comparison for comparison in comparisons(results)}
    times_s = paired_times(results)
    arms = dict.fromkeys(record.arm for record in results.records)
    sums = []
    for mix in results.plan.mixes:
        members = [_total(mix, arm, times_s, compared) for arm in arms]
        sums += sorted(members, key=lambda total: math.inf if total.seconds is None else total.seconds)
    return sums


def _total(mix: Mix, arm: Arm, times_s: Mapping[Key, float], compared: Mapping[Key, Comparison]) -> Total:
    counts = {(workload, arm): count for workload, count in mix.counts.items()}
    if not counts.keys() <= times_s.keys():
        return Total(mix=mix, arm=arm)
    seconds = sum(times_s[key] * count for key, count in counts.items())
    parts = {key: compared[key] for key in counts if key in compared}
    if len(parts) < len(counts) or len({part.baseline for part in parts.values()}) > 1:
        return Total(mix=mix, arm=arm, seconds=seconds)
    base_s = sum(times_s[key] / part.ratio * counts[key] for key, part in parts.items())
    return Total(mix=mix, arm=arm, seconds=seconds, ratio=seconds / base_s)
