"""The file of `attnbench check --report`: the verdict on each implementation by device and dtype, as JSON or Markdown.

It is small and self-contained, so that it can be attached to an issue; several are set side by side.
"""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnbench.analysis.judgements import Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.reports import cells
from attnbench.reports.story import described
from attnbench.units import plain

FACTS = ("processor", "accelerator", "system", "Python", "versions", "settings")
SUFFIXES = (".json", ".md")
ABSENT = "-"
TITLE, FINDING = "# Stock attention on this machine", re.compile(r"- \*\*(.*?)\*\*, (\w+) on `(.*?)`: (.*)")


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
    environments = list(results.environments.values())
    facts = described(environments[0]) if environments else {}
    content = {
        "facts": {name: facts[name] for name in FACTS if name in facts},
        "seed": results.plan.seed,
        "verdicts": {each.implementation: _by_place(each) for each in judgements(results)},
        "findings": [
            {
                "implementation": plain(record.implementation),
                "workload": record.workload.id,
                "status": str(record.status),
                "message": plain(record.message),
            }
            for each in judgements(results)
            for record in (*each.wrong, *each.failed)
        ],
    }
    is_json = file.suffix == SUFFIXES[0]
    file.write_text(json.dumps(content, indent=2) + "\n" if is_json else _markdown(content), encoding="utf-8")


def _by_place(whole: Judgement) -> dict[str, str]:
    """The verdict and the largest error, as a share of the tolerance, for each device and dtype."""
    found = {}
    for place in dict.fromkeys((workload.device, workload.dtype) for workload in whole.planned):
        of_place = Judgement(
            implementation=whole.implementation,
            records=tuple(each for each in whole.records if (each.workload.device, each.workload.dtype) == place),
            planned=tuple(each for each in whole.planned if (each.device, each.dtype) == place),
        )
        if not of_place.compared and not of_place.failed:
            found[" ".join(place)] = plain(of_place.records[0].message) if of_place.records else ABSENT
            continue
        worst = "" if of_place.worst is None else f", error {cells.multiple(of_place.worst)} of the tolerance"
        compared = f"{len(of_place.compared)} of {len(of_place.planned)}"
        found[" ".join(place)] = f"{of_place.verdict} on {compared}{worst}"
    return found


def _markdown(content: dict[str, object]) -> str:
    facts, verdicts, findings = content["facts"], content["verdicts"], content["findings"]
    assert isinstance(facts, dict)
    assert isinstance(verdicts, dict)
    assert isinstance(findings, list)
    places = list(dict.fromkeys(place for row in verdicts.values() for place in row))
    lines = [TITLE, ""]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    lines += ["", f"| implementation | {' | '.join(places)} |", "| --- " * (len(places) + 1) + "|"]
    for name, row in verdicts.items():
        lines.append(f"| {name} | {' | '.join(row.get(place, ABSENT) for place in places)} |")
    lines += ["", "## Findings", ""] if findings else ["", "No findings."]
    for each in findings:
        lines.append(f"- **{each['implementation']}**, {each['status']} on `{each['workload']}`: {each['message']}")
    return "\n".join([*lines, "", f"The same inputs again: --seed {content['seed']}", ""])


def load(file: Path) -> dict[str, Any]:
    """The facts, verdicts and findings of a file that `write` made, in either form.

    Raises:
        ValueError: it is no such file.
    """
    text = file.read_text(encoding="utf-8")
    try:
        content = _parsed(text) if text.startswith(TITLE) else json.loads(text)
        return {"facts": dict(content["facts"]), "verdicts": dict(content["verdicts"]), "findings": content["findings"]}
    except (ValueError, KeyError, TypeError, IndexError):
        raise ValueError(f"{file} was not written by attnbench check --report") from None


def _parsed(text: str) -> dict[str, Any]:
    """Read the Markdown of `_markdown`."""
    lines = text.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")]
    findings = [FINDING.fullmatch(line) for line in lines]
    names = ("implementation", "status", "workload", "message")
    return {
        "facts": dict(line.removeprefix("- ").split(": ", 1) for line in lines if re.match("- [^*]", line)),
        "verdicts": {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]},
        "findings": [dict(zip(names, found.groups(), strict=True)) for found in findings if found],
    }


def side_by_side(files: Sequence[Path]) -> str:
    """What differs between reports, as Markdown: facts, verdicts and findings; and how many verdicts are the same.

    Raises:
        ValueError: a file is no report.
    """
    columns = {file.stem: load(file) for file in files}
    facts = {name: [_shown(each["facts"], name) for each in columns.values()] for name in FACTS}
    places = {
        (name, place): None for each in columns.values() for name, row in each["verdicts"].items() for place in row
    }
    verdicts = {
        f"{name}, {place}": [_shown(each["verdicts"].get(name, {}), place) for each in columns.values()]
        for name, place in places
    }
    findings = {
        f"{found['implementation']} on {found['workload']}": [
            next((one["message"] for one in each["findings"] if _same(one, found)), "no finding")
            for each in columns.values()
        ]
        for each in columns.values()
        for found in each["findings"]
    }
    differing = {name: row for name, row in (facts | verdicts | findings).items() if len(set(row)) > 1}
    num_same = sum(name not in differing for name in verdicts)
    head = [f"| | {' | '.join(columns)} |", "| --- " * (len(columns) + 1) + "|"]
    lines = [f"| {name} | {' | '.join(row)} |" for name, row in differing.items()]
    same = f"{num_same} of {len(verdicts)} verdicts are the same in all {len(columns)}, errors included."
    return "\n".join([*(head if lines else ()), *lines, "", same, ""]).lstrip()


def _same(one: Mapping[str, str], other: Mapping[str, str]) -> bool:
    return all(one[name] == other[name] for name in ("implementation", "workload"))


def _shown(texts: Mapping[str, str], name: str) -> str:
    return texts.get(name, ABSENT)
