"""Total the attention time of a whole model for each arm, from the cells of a run."""

from collections.abc import Mapping
from dataclasses import dataclass

from attnbench.analysis.comparisons import comparisons, paired_times
from attnbench.analysis.results import Results
from attnbench.storage.records import Arm, Comparison, Key
from attnbench.workloads.models import Mix


@dataclass(frozen=True, kw_only=True)
class Total:
    """The attention of all layers of a model at one point, by one arm.

    `seconds` is the time of one pass: each layer's time times its count; None if a layer has no time, and `missing` is
    the number of such layers. The ratio is to the baseline's total; its interval adds up the layers' intervals, the
    widest result that they allow.
    """

    mix: Mix
    arm: Arm
    seconds: float | None
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    missing: int = 0
    reasons: tuple[str, ...] = ()  # why layers have no time

    @property
    def num_calls(self) -> int:
        """Number of attention layers of the model at this point, or of calls of a service."""
        return sum(self.mix.counts.values())


def totals(results: Results) -> list[Total]:
    """Every arm at each point of a model, the fastest first; empty if the run was not planned for a model."""
    compared = {each.key: each for each in comparisons(results)}
    times_s = paired_times(results)
    reasons = {
        record.key: f"{record.status}: {record.message}" if record.message else str(record.status)
        for record in results.records
    }
    arms = list(dict.fromkeys(record.arm for record in results.records))
    found = [
        _total(mix, arm, times_s, compared, reasons, is_reference=results.plan.is_reference(arm))
        for mix in results.plan.mixes
        for arm in arms
    ]
    order = {mix.label: place for place, mix in enumerate(results.plan.mixes)}
    return sorted(found, key=lambda each: (order[each.mix.label], each.seconds is None, each.seconds or 0.0))


def _total(  # noqa: PLR0913 - facts about each cell
    mix: Mix,
    arm: Arm,
    times_s: Mapping[Key, float],
    compared: Mapping[Key, Comparison],
    reasons: Mapping[Key, str],
    *,
    is_reference: bool,
) -> Total:
    keys = {(workload, arm): count for workload, count in mix.counts.items()}
    absent = [key for key in keys if key not in times_s]
    if absent:
        why = dict.fromkeys(reasons.get(key, "not measured") for key in absent)
        return Total(mix=mix, arm=arm, seconds=None, missing=sum(keys[key] for key in absent), reasons=tuple(why))
    seconds = sum(count * times_s[key] for key, count in keys.items())
    if is_reference:
        return Total(mix=mix, arm=arm, seconds=seconds, ratio=1.0)
    if any(key not in compared for key in keys):
        return Total(mix=mix, arm=arm, seconds=seconds)
    base_s = {key: count * times_s[key] / compared[key].ratio for key, count in keys.items()}
    ends = []
    for name in ("low", "high"):
        values = {key: getattr(compared[key], name) for key in keys}
        is_known = None not in values.values()
        ends.append(sum(base_s[key] * values[key] for key in keys) / sum(base_s.values()) if is_known else None)
    return Total(mix=mix, arm=arm, seconds=seconds, ratio=seconds / sum(base_s.values()), low=ends[0], high=ends[1])
