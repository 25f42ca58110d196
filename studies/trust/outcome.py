"""Judge the session of each case: its outcome (one of OUTCOMES), and its effects on other implementations."""

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from attnbench.units import markdown_table, sanitize_line
from studies.trust.corpus import CONTROL, Case
from studies.trust.sessions import BASELINE, CANDIDATE, HONEST, INNOCENT, Cell, Session

NOISE = 1.25
"""Factor by which a ratio of times may differ from that of honest code and still count as noise."""
NO_TIME, TRUE, FALSE, LOST = OUTCOMES = ("no time", "true time", "TIME GIVEN WRONGLY", "RUN LOST")
TEMPLATE = """# Can times be trusted whoever wrote the code?

Made by `nox -s cheats` on {machine}: each case is run for real by `attnbench run --referee`, with the same function
without the cheat, `fused` and `sdpa`. A time is false if it is less than that of the honest function by a factor of
{noise}. "Affected" counts cases in which another implementation lost its time, or its ratio to `sdpa` left the range of
the controls.

{summary}

## All cases

{cases}
"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The judgement of one case, a row of the table."""

    case: Case
    outcome: str
    reason: str
    affected: str  # how other implementations were affected, in words; empty if they were not

    @property
    def is_good(self) -> bool:
        """Whether the run ended without a false time, and no other implementation is affected."""
        return self.outcome in {NO_TIME, TRUE} and not self.affected


def judged(cases: Sequence[Case], sessions: Mapping[str, Session]) -> list[Row]:
    """Judge each case whose id is in `sessions`; the sessions of the controls show the usual ratios of times."""
    controls = [sessions[case.id] for case in cases if case.group == CONTROL and case.id in sessions]
    usual = {
        name: [ratio for session in controls if (ratio := session.ratio(name, BASELINE)) is not None]
        for name in (HONEST, INNOCENT)
    }
    return [row(case, sessions[case.id], usual) for case in cases if case.id in sessions]


def row(case: Case, session: Session, usual: Mapping[str, Sequence[float]]) -> Row:
    """Judge one case (a cheat, a contamination or a control) by its session.

    `usual` lists, for each other implementation, the ratios of its time to the baseline's in sessions of honest code.
    """
    outcome, reason = _outcome(session)
    changes = [_change(session, name, [] if case.settings else usual.get(name, [])) for name in (HONEST, INNOCENT)]
    if session.cells.get(BASELINE, Cell(status="missing")).latency_s is None:
        changes.append(f"{BASELINE} has no time")
    return Row(case=case, outcome=outcome, reason=reason, affected="; ".join(filter(None, changes)))


def _outcome(session: Session) -> tuple[str, str]:
    found = session.cells.get(CANDIDATE, Cell(status="missing"))
    if session.lost:
        return LOST, session.lost
    if found.latency_s is None:
        return NO_TIME, f"{found.status}: {found.message}"
    ratio = session.ratio(CANDIDATE, HONEST)
    if ratio is not None and ratio < 1 / NOISE:
        return FALSE, f"{ratio:.2g} of the honest time"
    return TRUE, ""


def _change(session: Session, name: str, usual: Sequence[float]) -> str:
    """Describe that `name` has no time, or a ratio to the baseline that is far from `usual`; return "" if neither."""
    cell = session.cells.get(name, Cell(status="missing"))
    if cell.latency_s is None:
        return f"{name} has no time ({cell.status})"
    ratio = session.ratio(name, BASELINE)
    if ratio is None or not usual or min(usual) / NOISE <= ratio <= max(usual) * NOISE:
        return ""
    return f"{name}: {ratio / median(usual):.2g} of its ratio"


def words(rows: Sequence[Row]) -> tuple[str, bool]:
    """Return a sentence with the count of each outcome, and whether all rows are good."""
    counts = Counter(row.outcome for row in rows)
    affected = sum(bool(row.affected) for row in rows)
    bad = [row.case.id for row in rows if not row.is_good]
    text = ", ".join(f"{counts[outcome]} {outcome}" for outcome in OUTCOMES)
    return f"{text}; bystanders affected in {affected} of {len(rows)}{': ' * bool(bad)}{', '.join(bad)}", not bad


def markdown(rows: Sequence[Row], machine: str) -> str:
    """Format the report as Markdown: counts by group, then a row for each case."""
    summary = []
    for group in dict.fromkeys(row.case.group for row in rows):
        of_group = [row for row in rows if row.case.group == group]
        counts = Counter(row.outcome for row in of_group)
        affected = sum(bool(row.affected) for row in of_group)
        numbers = {outcome: str(counts[outcome]) for outcome in OUTCOMES} | {"affected": str(affected)}
        summary.append({"group": group, "cases": str(len(of_group)), **numbers})
    cases = [
        {
            "case": row.case.id,
            "what it does": row.case.does,
            "outcome": row.outcome,
            "reason": textwrap.shorten(sanitize_line(row.reason), 110, placeholder=" ..."),
            "others": row.affected,
        }
        for row in rows
    ]
    tables = {"summary": markdown_table(summary), "cases": markdown_table(cases)}
    return TEMPLATE.format(machine=machine, noise=NOISE, **tables)
