"""Stored baselines: one journal for each fingerprint in results/baselines, written only by `attnbench gate --accept`.

A fingerprint identifies a machine, its versions and its settings. A new baseline replaces the old one. The folder is
committed, so that git keeps the history. The file also keeps the reasons of all earlier baselines, one on each line,
after the events of the run.
"""

from pathlib import Path

import msgspec

from attnbench.analysis.comparisons import session_effects
from attnbench.analysis.gate.decision import invalid_reasons
from attnbench.analysis.gate.times import processes
from attnbench.analysis.results import Results, read
from attnbench.statistics.verdict import FEWEST_PROCESSES
from attnbench.storage.events import SCHEMA, BaselineAccepted, RunStarted, now
from attnbench.storage.files import writing_to
from attnbench.storage.journal import events, journal_of, write


def path_of(fingerprint: str, results: Path) -> Path:
    """Return the path of the baseline of an environment with this fingerprint, below the folder `results`."""
    return results / "baselines" / f"{fingerprint}.jsonl"


def find(candidate: Results, results: Path) -> Path:
    """Find the baseline of the candidate's environment, or else the one that was accepted last; return its path.

    With the baseline of another environment, only noise-free facts can be compared.

    Raises:
        ValueError: no baseline is stored.
    """
    own = path_of(next(iter(candidate.environments), ""), results)
    if own.exists():
        return own
    others = {path: read(path) for path in own.parent.glob("*.jsonl")}
    if not others:
        advice = 'store one with attnbench gate --accept --reason "..."'
        raise ValueError(f"{own.parent} holds no baseline: {advice}, or give BASE and CANDIDATE")
    return max(others, key=lambda path: others[path].accepted[-1].time)


def accept(run: Path, results: Path, reason: str) -> Path:
    """Store a run, given by its folder or journal, as the baseline of its environment; return the baseline's path.

    Raises:
        ValueError: the reason is missing, or the run cannot be a baseline; the message says why and what to do.
    """
    reason = " ".join(reason.split())
    if " " not in reason:
        raise ValueError('--reason is too short: give a sentence, as in --reason "the tiles are larger now"')
    candidate = read(run)
    path = path_of(next(iter(candidate.environments), ""), results)
    before = read(path) if path.exists() else None
    if problem := _problem(candidate):
        raise ValueError(f"{candidate.run} cannot become a baseline: {problem}")
    accepted = BaselineAccepted(time=now(), run=candidate.run, commit=candidate.started.commit, reason=reason)
    start, *history = (event for event in events(journal_of(run)) if not isinstance(event, BaselineAccepted))
    assert isinstance(start, RunStarted)
    start = msgspec.structs.replace(start, schema=SCHEMA)  # the lines added below use the current schema
    with writing_to(path.parent, "--results"):
        write(path, [start, *history, *(before.accepted if before is not None else ()), accepted])
    return path


def _problem(candidate: Results) -> str:
    """Return why a run cannot be a baseline; "" if it can."""
    if candidate.plan.sides is not None:
        return "it compared two sides, and a baseline is one state of the code; store a run of attnbench run"
    wrong = [record for record in candidate.records if record.is_finding]
    if wrong:
        first = f"{wrong[0].implementation} on {wrong[0].workload.id}: {wrong[0].status}"
        advice = "fix them, or leave them out with --implementation or --set, and run again"
        return f"{len(wrong)} of its cells went wrong ({first}): {advice}"
    reasons = invalid_reasons(candidate)
    if not candidate.environments:
        reasons.append("the run has no cells")
    number = max((effect.num_measured for effect in session_effects(candidate).values()), default=FEWEST_PROCESSES)
    if number < FEWEST_PROCESSES:
        problem = f"its times come from {processes(number)}, but a gate needs at least {FEWEST_PROCESSES}"
        reasons.append(f"{problem}: give --rounds {FEWEST_PROCESSES} or more, and run again")
    return "; ".join(reasons)
