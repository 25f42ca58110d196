"""What the summary and the page tell besides the table: what was run, where, how far to trust it, what went wrong."""

import math
from collections import Counter

from attnbench.analysis.comparisons import noise_floors
from attnbench.analysis.overall import by_side
from attnbench.analysis.results import Results
from attnbench.reports import verdicts, words
from attnbench.reports.table import percent, span
from attnbench.statistics.effects import margin
from attnbench.storage.records import Environment
from attnbench.units import MISSING, show

OVERDRAWN = 1.1
"""A run that took more than so many times its budget says why."""


def facts(results: Results) -> dict[str, str]:
    """What was asked and how it went, each under its name."""
    plan, records = results.plan, results.records
    counts = Counter(str(record.status) for record in records)
    asked = len(plan.workloads) * len(plan.implementations)
    visits = sum(results.num_visits.values())
    processes = len({sample.epoch for record in records for found in record.measurements for sample in found.samples})
    return {
        "run": words.plain(results.run),
        "started": words.plain(results.started.time),
        "commit": words.plain(results.started.commit) or MISSING,
        "took": _took(results),
        "sweep": words.plain(plan.sweep) or MISSING,
        "baseline": words.base(plan),
        "cells": f"{len(records)} of {asked}: " + ", ".join(f"{count} {status}" for status, count in counts.items()),
        "not to be had here": verdicts.absences(results) or "nothing that was asked for",
        "checks": _checks(results),
        "inside calls": _called(results),
        "samples": f"{visits} visits of {plan.num_blocks} blocks, {_processes(processes)}, caches {plan.cache}",
        "verdicts": f"{verdicts.decided(results)}" + (f" ({results.reason})" if results.reason else ""),
        "disturbances": verdicts.disturbed(results),
        "free memory": _free(results),
        "identical code": _floor(results),
        "ceilings": _ceilings(results),
    }


def environments(results: Results) -> dict[str, Environment]:
    """The environments of the records, by fingerprint: more than one says that the machine changed during the run."""
    found = [record.environment for record in results.records if record.environment is not None]
    return {environment.fingerprint: environment for environment in found}


def has_moved(results: Results) -> bool:
    """Whether what is compared was measured in more than one environment; two sides may have one each."""
    parts = by_side(results) if results.plan.sides is not None else (results.records,)
    found = [{each.environment.fingerprint for each in part if each.environment is not None} for part in parts]
    return any(len(fingerprints) > 1 for fingerprints in found)


def described(environment: Environment) -> dict[str, str]:
    """An environment in words, each fact under its name."""
    facts = {
        "fingerprint": environment.fingerprint,
        "processor": f"{environment.cpu} ({environment.cpu_capability})",
        "cores": f"{environment.num_physical_cores} physical, {environment.num_logical_cores} logical",
        "memory": show(environment.memory_bytes, "bytes"),
        "accelerator": environment.accelerator or "none",
        "system": environment.system,
        "Python": environment.python,
        "versions": _pairs(environment.versions),
        "threads": str(environment.num_threads or MISSING),
        "settings": _pairs(environment.settings),
        "flags": _pairs(environment.flags),
        "clocks": _pairs(environment.clocks),
        "load at start": show(environment.load),
        "moment": _pairs(environment.moment),
    }
    return {name: words.plain(text) for name, text in facts.items()}


def findings(results: Results) -> list[str]:
    """What went wrong: one line for each implementation, group of workloads and reason, with the lengths."""
    lengths: dict[tuple[str, str, str, str], list[str]] = {}
    for record in (record for record in results.records if record.is_finding):
        reason = record.message or "no reason was recorded"
        key = (str(record.arm), str(record.status), words.title(record.workload), reason)
        lengths.setdefault(key, []).append(words.length(record.workload))
    return [
        words.plain(f"{name}: {status} at length {', '.join(found)} ({group}): {reason}")
        for (name, status, group, reason), found in lengths.items()
    ]


def conclusions(results: Results) -> dict[str, list[str]]:
    """What all comparisons say together, each kind under a heading that explains it; empty where there is nothing."""
    told = {
        "Fastest (chosen by one half of the visits, its ratio read from the other)": verdicts.fastest(results)
        if results.plan.sides is None
        else [],  # there, each is beside itself
        f"Geometric mean of the ratios to {words.base(results.plan)}": verdicts.means(results),
    }
    return {heading: lines for heading, lines in told.items() if lines}


def _took(results: Results) -> str:
    """How long it took, and of what budget: checks, metrics and first rounds come before it counts."""
    if results.elapsed_s is None:
        return "did not come to its end"
    took, budget_s = show(results.elapsed_s, "s"), results.plan.budget_s
    if not any(results.num_visits.values()):
        return took
    is_overdrawn = results.elapsed_s > OVERDRAWN * budget_s
    why = ": checks, metrics and the first rounds took longer" if is_overdrawn else ""
    return f"{took} of a budget of {show(budget_s, 's')}{why}"


def _ceilings(results: Results) -> str:
    """The fastest matrix product and copies of the run, for each device, dtype and number of threads."""
    told = []
    for device, dtype, num_threads in results.ceilings:
        found = results.ceilings[device, dtype, num_threads]
        where = f"{dtype} on {device}" + (f" with {num_threads} thread{'s' * (num_threads > 1)}" if num_threads else "")
        rates = (found.matmul, "flops/s", "matrix product"), (found.copy(0), "bytes/s", "copy")
        parts = [f"{what} {show(best.rate, unit)}" for best, unit, what in rates if best is not None]
        main = found.copy(math.inf)
        parts += [f"{show(main.rate, 'bytes/s')} beyond the caches"] if main is not None else []
        told.append(f"{where}: {', '.join(parts) or words.plain(found.message)}")
    return "; ".join(told) or "not measured"


def _free(results: Results) -> str:
    """The least memory that was free when a process took up the work."""
    return (
        MISSING
        if results.system_load is None
        else f"{show(results.system_load.free_bytes, 'bytes')} as processes began"
    )


def _floor(results: Results) -> str:
    """What the baseline against itself showed: the difference that this run would find between equals."""
    floors = {workload: floor for workload, floor in noise_floors(results).items() if floor.low is not None}
    if not floors:
        return "too few visits to say how far two equal times lie apart"
    widest = max(floors, key=lambda workload: floors[workload].largest_log or 0.0)
    floor = floors[widest]
    seen = span(floor.point, floor.low, floor.high)
    where = next(record.workload for record in results.records if record.workload.id == widest)
    told = f"the baseline against itself gave {seen} at worst ({words.title(where)}, length {words.length(where)})"
    return f"{told}; there, differences below {percent(margin(floor, results.plan.smallest_effect))} are not called"


def _checks(results: Results) -> str:
    """What the checks took, as a share of the whole where the run came to its end."""
    share = f", {results.check_s / results.elapsed_s:.0%} of the run" if results.elapsed_s else ""
    return f"{show(results.check_s, 's')}{share}"


def _called(results: Results) -> str:
    """What was spent inside calls that were timed or checked."""
    called_s = results.check_s + results.called_s
    share = f", {called_s / results.elapsed_s:.0%} of the run" if results.elapsed_s else ""
    return f"{show(called_s, 's')} inside calls that are checked or timed{share}"


def _processes(count: int) -> str:
    return f"{count} processes" if count > 1 else "1 process"


def _pairs(told: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in told.items()) or "none"
