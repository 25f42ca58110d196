"""The table of what was found, as Markdown, and the raw numbers behind it; knows nothing of torch."""

from collections.abc import Sequence

from studies.acceptance.kept import FILE
from studies.acceptance.outcome import Outcome
from studies.acceptance.plan import CAUSES
from studies.acceptance.suite import NOT_RUN

TEMPLATE = """# {title}

Made by `nox -s acceptance{options}` on {machine}. Limits were fixed before the tests ran; what misses one is
printed as a miss. {form}

Passed: {num_passed} of {num_run}. Missed: {missed}. Not run: {not_run}.

{table}
{notes} The raw numbers are in {file}.
"""
TITLE = "What the method was asked to show, and what it showed"
NOTES = """\
Rivals were given the same wall time for each comparison, calibration and warm-up included, A to its end and then B,
the order of the tools drawn again each time; what they took of it is in T1. pyperf's defaults, 20 processes for each
function, do not fit: what each tool did stands in studies/acceptance/rivals.py. All but T14 and T16, which are whole
runs, had memory that is freed retained, for every tool alike (`MALLOC_*` as by `--allocator retain`)."""
GATE_TITLE = "Two revisions side by side: false alarms, and planted slowdowns"
GATE_NOTES = """\
Each session is `attnbench compare rev:base rev:candidate` in a repository made for it, whose second revision differs
from the first by a comment, or waits after each call for 5 % of its time. A session alarms, or finds, if it ends with
exit code 1: any cell, or the whole, is slower, or something is lost. Sessions that said of themselves that they were
disturbed are no part of the share; where they are more than a fifth, the test is missed."""
IN_SHORT = (
    "**This is the short form**: rows so marked have fewer repetitions than the limit asks for, n is in the row, and "
    "a pass or a miss of theirs is weak evidence."
)


def result(outcome: Outcome) -> str:
    """Pass, MISS or not run, and whether it was the short form."""
    if outcome.found.startswith(NOT_RUN):
        return NOT_RUN
    return ("pass" if outcome.passes else "**MISS**") + (" (short form)" if outcome.is_short else "")


def markdown(outcomes: Sequence[Outcome], machine: str, *, short: bool, is_gate: bool = False) -> str:
    """The whole account as Markdown."""
    run = [each for each in outcomes if result(each) != NOT_RUN]
    return TEMPLATE.format(
        title=GATE_TITLE if is_gate else TITLE,
        notes=GATE_NOTES if is_gate else NOTES,
        options=" -- " * (short or is_gate) + " ".join(["gate"] * is_gate + ["--short"] * short),
        machine=machine,
        file=FILE,
        form=IN_SHORT if short else "",
        num_passed=sum(each.passes for each in run),
        num_run=len(run),
        missed=", ".join(each.id for each in run if not each.passes) or "none",
        not_run=", ".join(each.id for each in outcomes if result(each) == NOT_RUN) or "none",
        table=_table(outcomes),
    )


def _table(outcomes: Sequence[Outcome]) -> str:
    titles = ("id", "what", "limit fixed beforehand", "found", "rivals in the same session", "result", "cause", "made")
    rows = [list(titles), ["---"] * len(titles)]
    for each in outcomes:
        texts = "<br>".join(f"{tool}: {text}" for tool, text in each.rivals.items())
        cells = [each.id, each.title, each.limit, each.found, texts, result(each), _cause(each), each.made]
        rows.append([_in_cell(cell) for cell in cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def _in_cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|") or "-"


def _cause(outcome: Outcome) -> str:
    """Of a miss: what the test itself says of it, or what was found when it was looked into."""
    return "" if outcome.passes else outcome.cause or CAUSES.get(outcome.test, "")
