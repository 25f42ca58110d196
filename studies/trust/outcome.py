"""Judge a case: it gets no time and a reason, its true time or a wrong one; bystanders may be affected."""

import statistics
from collections.abc import Sequence

import msgspec

from studies.trust.corpus import Case
from studies.trust.sessions import BASELINE, CANDIDATE, INNOCENTS, Cell, Session

RATIO_NOISE = 1.25
"""Factor by which ratios of two one-second sessions may differ beyond the range of clean sessions."""
TIME_NOISE = 2.0
"""Factor by which their times may differ, which other work on the machine disturbs."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    id: str
    group: str
    does: str
    outcome: str  # "no time", "true time", "TIME GIVEN WRONGLY", "RUN LOST"
    status: str
    reason: str
    names_effect: bool
    ratio: float | None
    clean_ratio: float | None
    changed_bystanders: str  # in words; empty if all are as in a clean run
    worst_bystander: float | None  # its ratio over that of a clean run
    num_left: int
    took_s: float
    is_cheat: bool
    is_contamination: bool

    @property
    def is_good(self) -> bool:
        """Whether there is no time, with a reason that names the effect, or the true time; and no other is affected."""
        is_told = self.outcome == "true time" or (self.outcome == "no time" and self.names_effect)
        return is_told and not self.changed_bystanders


class Clean(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the honest candidate and the innocents in sessions without a cheat."""

    sessions: tuple[Session, ...]

    def ratios(self, name: str) -> list[float]:
        """Return its ratios in all sessions."""
        return [ratio for each in self.sessions if (ratio := each.cells[name].ratio) is not None]

    def times(self, name: str) -> list[float]:
        """Return its times in all sessions, freed from the effect of other work as far as possible."""
        return [time for each in self.sessions if (time := each.cells[name].undisturbed_s) is not None]


def row(case: Case, session: Session, clean: Clean) -> Row:
    """Judge one case by its session and the clean ones."""
    found = session.cells.get(CANDIDATE, Cell(status="missing"))
    outcome, reason = _outcome(case, found, session, clean)
    changes = {name: _change(name, session, clean) for name in (BASELINE, *INNOCENTS)}
    ratios = [_against(session.cells[name].ratio, clean.ratios(name)) for name in INNOCENTS if name in session.cells]
    worst = max((each for each in ratios if each is not None), key=lambda each: max(each, 1 / each), default=None)
    return Row(
        id=case.id,
        group=case.group,
        does=case.does,
        outcome=outcome,
        status=found.status,
        reason=reason,
        names_effect=case.names_effect(reason),
        ratio=found.ratio,
        clean_ratio=statistics.median(clean.ratios(CANDIDATE)) if clean.ratios(CANDIDATE) else None,
        changed_bystanders="; ".join(change for change in changes.values() if change),
        worst_bystander=worst,
        num_left=session.num_left,
        took_s=session.took_s,
        is_cheat=case.is_cheat,
        is_contamination=case.is_contamination,
    )


def _outcome(case: Case, found: Cell, session: Session, clean: Clean) -> tuple[str, str]:
    if session.lost and found.latency_s is None:
        return "RUN LOST", session.lost
    if found.latency_s is None:
        return ("no time", found.message) if found.status != "ok" else ("no time", "it was checked and not timed")
    if not case.is_timeable:
        return "TIME GIVEN WRONGLY", "any time of it is wrong"
    assert found.undisturbed_s is not None
    if not _is_true(case, found.undisturbed_s, clean.times(CANDIDATE), TIME_NOISE):
        share = found.undisturbed_s / statistics.median(clean.times(CANDIDATE))
        return "TIME GIVEN WRONGLY", f"{share:.2g} of its true time"
    if found.ratio is not None and not _is_true(case, found.ratio, clean.ratios(CANDIDATE), RATIO_NOISE):
        return "TIME GIVEN WRONGLY", f"{_against(found.ratio, clean.ratios(CANDIDATE)):.2g} of its true ratio"
    if session.lost:
        return "RUN LOST", session.lost
    return "true time", ""


def _change(name: str, session: Session, clean: Clean) -> str:
    """Describe a bystander's difference from a clean session, or return ""."""
    if name not in session.cells:
        return f"{name} is missing"
    found, usual = session.cells[name], clean.sessions[0].cells[name]
    if found.status != usual.status:
        return f"{name} is {found.status}"
    if found.undisturbed_s is None:
        return f"{name} has no time"
    if not _is_near(found.undisturbed_s, clean.times(name), TIME_NOISE):
        return f"{name}: {found.undisturbed_s / statistics.median(clean.times(name)):.2g} of its time"
    if found.ratio is not None and not _is_near(found.ratio, clean.ratios(name), RATIO_NOISE):
        return f"{name}: {_against(found.ratio, clean.ratios(name)):.2g} of its ratio"
    return ""


def _is_true(case: Case, value: float, usual: Sequence[float], noise: float) -> bool:
    return _is_near(min([value, *usual]) if case.slows_itself else value, usual, noise)


def _is_near(value: float, usual: Sequence[float], noise: float) -> bool:
    return not usual or min(usual) / noise <= value <= max(usual) * noise


def _against(value: float | None, usual: Sequence[float]) -> float | None:
    return None if value is None or not usual else value / statistics.median(usual)
