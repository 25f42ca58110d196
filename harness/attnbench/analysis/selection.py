"""Select a part of a stored run: some implementations, and some values of axes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from attnbench.analysis.results import Results
from attnbench.plugins import name_of, unknown
from attnbench.storage.records import Record
from attnbench.workloads.sweep import parse_settings


def only(results: Results, names: Sequence[str] = (), settings: Sequence[str] = ()) -> Results:
    """Keep these implementations and the baseline, on workloads with one of these values.

    Raises:
        ValueError: the run has no such implementation, axis or value.
    """
    wanted, axes = set(map(name_of, names)), parse_settings(settings)
    known = dict.fromkeys(record.implementation for record in results.records)
    for name in wanted:
        if name not in known:
            raise ValueError(f"{results.run}: {unknown('implementation', name, known)}")
    for axis, values in axes.items():
        there = dict.fromkeys(str(getattr(record.workload, axis)) for record in results.records)
        for value in values:
            if value not in there:
                raise ValueError(f"{results.run}: {unknown(f'value of {axis}', value, there)}")
    kept = tuple(record for record in results.records if _is_wanted(record, results.plan.baseline, wanted, axes))
    if not kept:
        raise ValueError(f"{results.run}: nothing is left of it with {' '.join([*names, *settings])}")
    return replace(results, records=kept)


def _is_wanted(record: Record, baseline: str, wanted: Collection[str], axes: Mapping[str, Collection[str]]) -> bool:
    is_named = not wanted or record.implementation in wanted or record.implementation == baseline
    return is_named and all(str(getattr(record.workload, axis)) in values for axis, values in axes.items())
