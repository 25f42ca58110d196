"""The file of `attnbench check --report`: the verdict on each implementation by device and dtype, as JSON or Markdown.

It is small and self-contained, so that it can be attached to an issue; several are set side by side.
"""

import html
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from attnbench.analysis.judgements import Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.reports import cells
from attnbench.reports.story import described
from attnbench.units import markdown_list, markdown_table, plain

FACTS = ("processor", "accelerator", "system", "Python", "versions", "settings")
SUFFIXES = (".json", ".md")
ABSENT = "-"
TITLE, FINDINGS = "# Stock attention on this machine", "## Findings"


def require_suffix(file: Path) -> None:
    """Check the file's name before hours of work.

    Raises:
        ValueError: it ends in neither .json nor .md, or its folder does not exist.
    """
    if file.suffix not in SUFFIXES:
        raise ValueError(f"--report {file} is not allowed: give a file that ends in {' or '.join(SUFFIXES)}")
    if not file.parent.is_dir():
        raise ValueError(f"--report {file} cannot be written: there is no folder {file.parent}")


def write(file: Path, results: Results) -> None:
    """Write the verdicts of a check with the versions and devices behind them."""
    known = [described(environment) for environment in results.environments.values()][:1]
    facts = {name: text for entries in known for name, text in entries.items() if name in FACTS}
    verdicts = {judged.implementation: _by_place(judged) for judged in judgements(results)}
    bad = [record for judged in judgements(results) for record in (*judged.wrong, *judged.failed)]
    findings = [
        {
            "implementation": plain(record.implementation),
            "workload": record.workload.id,
            "status": str(record.status),
            "message": plain(record.message),
        }
        for record in bad
    ]
    if file.suffix == SUFFIXES[0]:
        content: dict[str, Any] = {"facts": facts, "seed": results.plan.seed}
        text = json.dumps(content | {"verdicts": verdicts, "findings": findings}, indent=2)
    else:
        places = dict.fromkeys(place for row in verdicts.values() for place in row)
        rows = [{"implementation": name} | dict.fromkeys(places, ABSENT) | row for name, row in verdicts.items()]
        parts = [TITLE, markdown_list(facts), markdown_table(rows), FINDINGS]
        parts += [markdown_table(findings) if findings else "No findings."]
        text = "\n\n".join([*parts, f"The same inputs again: --seed {results.plan.seed}"])
    file.write_text(f"{text}\n", encoding="utf-8")


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


def load(file: Path) -> dict[str, Any]:
    """The facts, verdicts and findings of a file of `write`, in either form.

    Raises:
        ValueError: it is no such file.
    """
    text = file.read_text(encoding="utf-8")
    try:
        content = _parsed(text) if text.startswith(TITLE) else json.loads(text)
        return {"facts": dict(content["facts"]), "verdicts": dict(content["verdicts"]), "findings": content["findings"]}
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} was not written by attnbench check --report") from None


def _parsed(text: str) -> dict[str, Any]:
    """Read the Markdown form."""
    above, _, below = text.partition(FINDINGS)
    facts = (re.fullmatch(r"- \*\*(.*?)\*\*: (.*)", line) for line in above.splitlines())
    return {
        "facts": {fact[1]: _unescaped(fact[2]) for fact in facts if fact},
        "verdicts": {row.pop("implementation"): row for row in _rows(above.splitlines())},
        "findings": list(_rows(below.splitlines())),
    }


def _rows(lines: Iterable[str]) -> Iterable[dict[str, str]]:
    """The rows of a Markdown table among these lines."""
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines if line.startswith("|")]
    texts = [[_unescaped(cell.strip()) for cell in row] for row in rows]
    return (dict(zip(texts[0], row, strict=True)) for row in texts[2:])


def _unescaped(text: str) -> str:
    return html.unescape(re.sub(r"\\(.)", r"\1", text))


def side_by_side(files: Sequence[Path]) -> str:
    """A Markdown table of what differs between reports, and the number of verdicts that are the same.

    Raises:
        ValueError: a file is no report.
    """
    columns = {file.stem: _flat(load(file)) for file in files}
    names = dict.fromkeys(name for texts in columns.values() for name in texts)
    rows = [{"": name} | {stem: texts.get(name, ABSENT) for stem, texts in columns.items()} for name in names]
    differing = [row for row in rows if len({row[stem] for stem in columns}) > 1]
    num_verdicts = sum(", " in name for name in names)
    num_same = num_verdicts - sum(", " in row[""] for row in differing)
    same = f"{num_same} of {num_verdicts} verdicts are the same in all {len(columns)}, errors included."
    return "\n\n".join([*([markdown_table(differing)] if differing else []), f"{same}\n"])


def _flat(content: dict[str, Any]) -> dict[str, str]:
    """Facts, verdicts by `IMPLEMENTATION, DEVICE DTYPE`, and findings, as texts by name."""
    texts = dict(content["facts"])
    for name, row in content["verdicts"].items():
        texts |= {f"{name}, {place}": text for place, text in row.items()}
    return texts | {
        f"{found['implementation']} on {found['workload']}": found["message"] for found in content["findings"]
    }
