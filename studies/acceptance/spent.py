"""Divide the wall time of a run into parts, from its journal: `python -m studies.acceptance.spent RUN`."""

import json
import sys
from pathlib import Path
from typing import Any

NUM_CALLS, START_S = 1, 6
"""Positions of two fields in a sample: the journal stores a sample as a list, with its value at position 0."""


def spent(journal: Path) -> dict[str, float]:
    """Divide the seconds of a run, up to its last event, into parts by name.

    `between` contains starts of processes, messages, waits and the reading of answers. `before and after` contains
    imports, profiling and other metrics. `run` is the whole; `timing` lasts from the first sample's start to the last
    sample's end.
    """
    events = [json.loads(line) for line in journal.read_bytes().splitlines()]
    visits = [event for event in events if event["type"] == "visit_finished"]
    arms = [(arm["arm"].get("role", "measured"), arm["samples"]) for visit in visits for arm in visit["arms"]]
    seconds = {
        role: sum(_seconds(sample) for name, samples in arms if name == role for sample in samples)
        for role in ("measured", "control", "probe")
    }
    samples = [sample for _, samples in arms for sample in samples]
    starts, ends = [each[START_S] for each in samples], [each[START_S] + _seconds(each) for each in samples]
    timing_s = max(ends, default=0.0) - min(starts, default=0.0)
    called_s = sum(visit.get("called_s", 0.0) for visit in visits)
    run_s = max(event.get("elapsed_s", 0.0) for event in events)
    checks_s = sum(event.get("check_s", 0.0) for event in events)
    ceilings_s = sum(event.get("spent_s", 0.0) for event in events)
    calls_s = max(0.0, called_s - sum(seconds.values()))
    parts = {
        "samples": seconds["measured"],
        "controls": seconds["control"],
        "probes": seconds["probe"],
        "other calls (warm-up, verification)": calls_s,
        "between": timing_s - sum(seconds.values()) - calls_s,
        "checks": checks_s,
        "ceilings": ceilings_s,
        "before and after": run_s - timing_s - checks_s - ceilings_s,
    }
    return parts | {"run": run_s, "timing": timing_s}


def _seconds(sample: list[Any]) -> float:
    return float(sample[0] * sample[NUM_CALLS])


if __name__ == "__main__":
    found = spent(Path(sys.argv[1]) / "journal.jsonl")
    run_s = max(found["run"], 1e-9)
    sys.stdout.writelines(f"{value:9.2f} s {value / run_s:7.1%}  {name}\n" for name, value in found.items())
