"""Stored baselines: one journal for each fingerprint in results/baselines, written only by `attnbench gate --accept`.

A new baseline replaces the old one; the folder is committed, so git keeps the history. The reasons of all baselines
stay in the file, one line each, after the events of the run.
"""

from datetime import UTC, datetime
from pathlib import Path

import msgspec

from attnbench.analysis.comparisons import session_effects
from attnbench.analysis.gate import certain
from attnbench.analysis.gate.decision import invalid_reasons, judge, processes
from attnbench.analysis.gate.rulings import Kind, Outcome, Thresholds
from attnbench.analysis.results import Results, read
from attnbench.statistics.verdict import FEWEST_PROCESSES
from attnbench.storage.events import SCHEMA, BaselineAccepted, RunStarted
from attnbench.storage.files import writing_to
from attnbench.storage.journal import events, find_run, journal_of, write

FOLDER = "baselines"
FEWEST_WORDS = 2
"""Shortest accepted reason, in words: "ok" is no reason."""


def path_of(fingerprint: str, results: Path) -> Path:
    """The path of the baseline of an environment."""
    return results / FOLDER / f"{fingerprint}.jsonl"


def stored(results: Path) -> list[Path]:
    """Paths of all stored baselines, sorted by name."""
    return sorted((results / FOLDER).glob("*.jsonl"))


def locate(name: str, results: Path) -> Path:
    """Find a run by its name below `results`, its folder or its journal; or any journal, baselines included, by file.

    Raises:
        ValueError: there is none.
    """
    path = Path(name)
    return path if path.suffix == ".jsonl" and path.is_file() else find_run(name, results)


def find(candidate: Results, results: Path) -> Path:
    """The baseline of the candidate's environment, or else the last one accepted on any other.

    Raises:
        ValueError: no baseline is stored.
    """
    for fingerprint in list(candidate.environments)[:1]:
        if (own := _own(fingerprint, results)) is not None:
            return own
    others = {path: read(path) for path in stored(results)}
    if not others:
        store = 'store one with attnbench gate --accept --reason "..."'
        raise ValueError(f"{results / FOLDER} holds no baseline: {store}, or give BASE and CANDIDATE")
    return max(others, key=lambda path: [others[path].started.time, *(each.time for each in others[path].accepted)][-1])


def _own(fingerprint: str, results: Path) -> Path | None:
    """The baseline of an environment, by name or by content: older versions computed fingerprints differently."""
    if (named := path_of(fingerprint, results)).exists():
        return named
    return next((path for path in stored(results) if fingerprint in read(path).environments), None)


def accept(run: Path, results: Path, reason: str, thresholds: Thresholds) -> Path:
    """Make the run at `run`, its folder or journal, the baseline of its environment; return the new path.

    Raises:
        ValueError: the reason is missing, or the run cannot be a baseline; the message says why and what to do.
    """
    reason = " ".join(reason.split())
    if len(reason.split()) < FEWEST_WORDS:
        raise ValueError('--reason is too short: give a sentence, as in --reason "the tiles are larger now"')
    candidate = read(run)
    _require_sound(candidate)
    (fingerprint,) = candidate.environments
    path, old = path_of(fingerprint, results), _own(fingerprint, results)
    before = None if old is None else read(old)
    if before is not None:
        _require_plausible(before, candidate, thresholds)
    accepted = BaselineAccepted(
        time=datetime.now(UTC).isoformat(timespec="seconds"),
        run=candidate.run,
        commit=candidate.started.commit,
        reason=reason,
    )
    own = [event for event in events(journal_of(run)) if not isinstance(event, BaselineAccepted)]
    assert isinstance(own[0], RunStarted)
    own[0] = msgspec.structs.replace(own[0], schema=SCHEMA)  # the lines added below use the current schema
    history = [*own, *(before.accepted if before is not None else ()), accepted]
    with writing_to(path.parent, "--results"):
        write(path, history)
    if old is not None and old != path:
        old.unlink()
    return path


def _require_sound(candidate: Results) -> None:
    """Raise ValueError if the run is unsound or cannot serve as a baseline."""
    if candidate.plan.sides is not None:
        problem = (
            f"{candidate.run} cannot become a baseline: it compared two sides, and a baseline is one state of the code"
        )
        raise ValueError(f"{problem}; store a run of attnbench run")
    wrong = [record for record in candidate.records if record.is_finding]
    if wrong:
        first = f"{wrong[0].implementation} on {wrong[0].workload.id}: {wrong[0].status}"
        problem = f"{candidate.run} has {len(wrong)} cells that went wrong ({first})"
        raise ValueError(f"{problem}: fix them, or leave them out with --implementation or --set, and run again")
    reasons = list(invalid_reasons(candidate, "the run"))
    if not candidate.environments:
        reasons.append("the run has no cells")
    fewest = FEWEST_PROCESSES
    num_epochs = max((each.num_measured for each in session_effects(candidate).values()), default=fewest)
    if num_epochs < fewest:
        problem = f"its times are of {processes(num_epochs)}, and a gate judges from {fewest} on"
        more = f"give --rounds {fewest} or more, and run again"
        reasons.append(f"{problem}: {more}")
    if reasons:
        raise ValueError(f"{candidate.run} cannot become a baseline: {'; '.join(reasons)}")


def _require_plausible(before: Results, candidate: Results, thresholds: Thresholds) -> None:
    """Raise ValueError if the run is implausibly better than the old baseline, so that it needs another check.

    Rules are ignored here: they limit growth only.
    """
    judged = judge(before, candidate, msgspec.structs.replace(thresholds, rule=()))
    implausible = [
        ruling
        for ruling in judged.of(Outcome.finding)
        if ruling.kind is Kind.suspicious or ruling.metric == certain.CHECK
    ]
    if implausible:
        words = f"{implausible[0].cell}: {implausible[0].words}"
        raise ValueError(f"{candidate.run} cannot become a baseline: {words} ({len(implausible)} such)")
