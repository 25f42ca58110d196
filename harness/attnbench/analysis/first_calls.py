"""First calls of a run, and the number of calls after which an implementation has made up for a longer first call."""

from functools import lru_cache

from attnbench.analysis.comparisons import comparisons, paired_times, reference
from attnbench.analysis.results import Results
from attnbench.statistics.break_even import BreakEven, break_even
from attnbench.statistics.intervals import median
from attnbench.storage.records import FIRST_CALL, Key, Record
from attnbench.storage.samples import Samples


def first_s(record: Record) -> float | None:
    """Return the seconds of the first call in a fresh process; None if it was not measured."""
    samples = record.samples(FIRST_CALL)
    return median(Samples.of(samples).value) if samples else None


@lru_cache(maxsize=2)
def break_evens(results: Results) -> dict[Key, BreakEven]:
    """Compute, by key, after how many calls each compared cell has made up for a longer first call.

    Only cells are included whose first call and whose reference's first call were both measured, and none whose keys
    are gathered before its call, outside of its time.
    """
    own = [record for record in results.records if not results.is_gathered(record)]
    firsts = {record.key: seconds for record in own if (seconds := first_s(record)) is not None}
    times_s, found = paired_times(results), dict[Key, BreakEven]()
    for each in comparisons(results):
        base = each.key[0], reference(results, each.key)
        if each.key in firsts and base in firsts:
            found[each.key] = break_even(
                firsts[each.key],
                firsts[base],
                times_s[base],
                ratio=each.ratio,
                low=each.low,
                high=each.high,
                verdict=each.verdict,
            )
    return found
