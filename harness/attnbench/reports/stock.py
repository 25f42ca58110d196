"""The file of `attnbench check --report`: the verdict on each implementation by device and dtype, as Markdown.

It is small and self-contained, so that it can be attached to an issue, and several can be set side by side; `check
--json` is for programs.
"""

import html
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from attnbench.analysis.judgements import Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.reports import cells
from attnbench.reports.story import described
from attnbench.units import markdown_list, markdown_table, plain

FACTS = ("cpu", "accelerator", "system", "python", "versions", "settings")
SUFFIX = ".md"
ABSENT = "-"
TITLE, FINDINGS = "# Stock attention on this machine", "## Findings"


def require_suffix(file: Path) -> None:
    """Check the file's name before hours of work.

    Raises:
        ValueError: it does not end in .md, or its folder does not exist.
    """
    if file.suffix != SUFFIX:
        raise ValueError(f"--report {file} is not allowed: give a file that ends in {SUFFIX}")
    if not file.parent.is_dir():
        raise ValueError(f"--report {file} cannot be written: there is no folder {file.parent}")


def write(file: Path, results: Results) -> None:
    """Write the verdicts of a check with the versions and devices behind them."""
    known = [described(environment) for environment in results.environments.values()][:1]
    facts = {name: text for entries in known for name, text in entries.items() if name in FACTS}
    facts |= {"cells": f"{len(results.records)} of {results.plan.num_cells}"}
    verdicts = {judged.implementation: _by_place(judged) for judged in judgements(results)}
    places = dict.fromkeys(place for row in verdicts.values() for place in row)
    rows = [{"implementation": name} | dict.fromkeys(places, ABSENT) | row for name, row in verdicts.items()]
    findings = [
        {
            "implementation": plain(record.implementation),
            "workload": record.workload.id,
            "status": str(record.status),
            "message": plain(record.message),
        }
        for judged in judgements(results)
        for record in (*judged.wrong, *judged.failed)
    ]
    parts = [TITLE, markdown_list(facts), markdown_table(rows), FINDINGS]
    parts += [markdown_table(findings) if findings else "No findings."]
    parts += [results.reason, f"The same inputs again: --seed {results.plan.seed}"]
    file.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _by_place(whole: Judgement) -> dict[str, str]:
    """The verdict and the largest error, as a share of the tolerance, for each device and dtype."""
    texts = {}
    for place in dict.fromkeys((workload.device, workload.dtype) for workload in whole.planned):
        of_place = Judgement(
            implementation=whole.implementation,
            records=tuple(each for each in whole.records if (each.workload.device, each.workload.dtype) == place),
            planned=tuple(each for each in whole.planned if (each.device, each.dtype) == place),
        )
        if of_place.is_unsupported:
            texts[" ".join(place)] = plain(of_place.records[0].message) if of_place.records else ABSENT
            continue
        worst = "" if of_place.worst is None else f", error {cells.multiple(of_place.worst)} of the tolerance"
        compared = f"{len(of_place.compared)} of {len(of_place.planned)}"
        texts[" ".join(place)] = f"{of_place.verdict} on {compared}{worst}"
    return texts


def load(file: Path) -> dict[str, str]:
    """The texts of a file of `write` by name: facts, verdicts as `IMPLEMENTATION, DEVICE DTYPE`, and findings.

    Raises:
        ValueError: it is not such a file.
    """
    above, _, below = file.read_text(encoding="utf-8").partition(FINDINGS)
    if not above.startswith(TITLE) or not below:
        raise ValueError(f"{file} was not written by attnbench check --report")
    facts = (re.fullmatch(r"- \*\*(.*?)\*\*: (.*)", line) for line in above.splitlines())
    texts = {fact[1]: _unescaped(fact[2]) for fact in facts if fact}
    for row in _rows(above):
        name = row.pop("implementation", "")
        texts |= {f"{name}, {place}": text for place, text in row.items()}
    return texts | {
        f"{row.get('implementation')} on {row.get('workload')}": row.get("message", "") for row in _rows(below)
    }


def _rows(text: str) -> Iterable[dict[str, str]]:
    """The rows of the Markdown table in a text."""
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    cells_of = [[_unescaped(cell.strip()) for cell in line] for line in lines]
    return (dict(zip(cells_of[0], row, strict=False)) for row in cells_of[2:])


def _unescaped(text: str) -> str:
    return html.unescape(re.sub(r"\\(.)", r"\1", text))


def side_by_side(files: Sequence[Path]) -> str:
    """A Markdown table of what differs between reports, and the number of verdicts that are the same.

    Raises:
        ValueError: a file is not a report.
    """
    columns = {file.stem: load(file) for file in files}
    names = dict.fromkeys(name for texts in columns.values() for name in texts)
    rows = [{"": name} | {stem: texts.get(name, ABSENT) for stem, texts in columns.items()} for name in names]
    differing = [row for row in rows if len({row[stem] for stem in columns}) > 1]
    num_verdicts = sum(", " in name for name in names)
    num_same = num_verdicts - sum(", " in row[""] for row in differing)
    same = f"{num_same} of {num_verdicts} verdicts are the same in all {len(columns)}, errors included."
    return "\n\n".join([*([markdown_table(differing)] if differing else []), f"{same}\n"])
