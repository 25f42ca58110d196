"""The file of `attnbench check --report`: the verdict on each implementation by device and dtype, as a Markdown list.

It is small and self-contained, so that it can be attached to an issue. `attnbench report` compares several such files.
Programs read `check --json` instead.
"""

import html
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from attnbench.analysis.judgements import Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.reports.summary import describe_environment
from attnbench.units import escaped, markdown_list, markdown_table, multiple, sanitize_line

FACTS = ("cpu", "accelerator", "system", "python", "versions", "settings")
SUFFIX = ".md"
TITLE = "# Attention checked on this machine"


def write(file: Path, results: Results) -> None:
    """Write the verdicts of a check into a Markdown file, with the machine, the versions and the findings.

    Raises:
        OSError: the file cannot be written.
    """
    known = [describe_environment(environment) for environment in results.environments.values()][:1]
    facts = {name: text for entries in known for name, text in entries.items() if name in FACTS}
    facts |= {"cells": f"{len(results.records)} of {results.plan.num_cells}"}
    verdicts, findings = dict[str, str](), dict[str, str]()
    for judged in judgements(results):
        name = escaped(sanitize_line(judged.implementation))
        verdicts |= {f"{name}, {place}": text for place, text in _by_place(judged)}
        for record in (*judged.wrong, *judged.failed):
            findings[f"{name} on {record.workload.id}"] = sanitize_line(f"{record.status}: {record.message}")
    parts = [TITLE, markdown_list(facts), "## Verdicts", markdown_list(verdicts)]
    parts += ["## Findings", markdown_list(findings) or "No findings."]
    parts += [results.reason, f"Repeat with the same inputs: --seed {results.plan.seed}"]
    file.write_text("\n\n".join(filter(None, parts)) + "\n", encoding="utf-8")


def _by_place(whole: Judgement) -> Iterator[tuple[str, str]]:
    """Yield (place, verdict) for each device and dtype, such as "cpu float32" with "right on 4 of 4, error ..."."""
    for place in dict.fromkeys((workload.device, workload.dtype) for workload in whole.planned):
        of_place = Judgement(
            implementation=whole.implementation,
            records=tuple(each for each in whole.records if (each.workload.device, each.workload.dtype) == place),
            planned=tuple(each for each in whole.planned if (each.device, each.dtype) == place),
        )
        worst = "" if of_place.worst is None else f", error {multiple(of_place.worst)} of the tolerance"
        text = f"{of_place.verdict} on {len(of_place.compared)} of {len(of_place.planned)}{worst}"
        if of_place.is_unsupported:
            text = sanitize_line(of_place.records[0].message) if of_place.records else "nothing was tried"
        yield " ".join(place), text


def load(file: Path) -> dict[str, str]:
    """Read a report of `write`; return the text of each entry (fact, verdict or finding) by its name.

    Verdicts have names of the form `IMPLEMENTATION, DEVICE DTYPE`.

    Raises:
        ValueError: the file is not such a report.
    """
    text = file.read_text(encoding="utf-8")
    if not text.startswith("# ") or "## Verdicts" not in text:
        raise ValueError(f"{file} was not written by attnbench check --report")
    entries = re.findall(r"^- \*\*(.*?)\*\*: (.*)$", html.unescape(text), re.MULTILINE)
    return {re.sub(r"\\(.)", r"\1", name): re.sub(r"\\(.)", r"\1", entry) for name, entry in entries}


def side_by_side(files: Sequence[Path]) -> str:
    """Compare reports: return a Markdown table of the entries that differ, and the number of verdicts that agree.

    Raises:
        ValueError: a file is not a report.
    """
    stems = [file.stem for file in files]
    columns = {file.stem if stems.count(file.stem) == 1 else str(file): load(file) for file in files}
    names = dict.fromkeys(name for texts in columns.values() for name in texts)
    differing = []
    for name in names:
        row = {stem: texts.get(name, "-") for stem, texts in columns.items()}
        if len({*row.values()}) > 1:
            differing.append({"": name} | row)
    num_verdicts = sum(", " in name for name in names)
    num_same = num_verdicts - sum(", " in row[""] for row in differing)
    same = f"{num_same} of {num_verdicts} verdicts agree in all files, errors included."
    return "\n\n".join([*([markdown_table(differing)] if differing else []), f"{same}\n"])
