"""The file of `attnbench check --report`: the verdict on each implementation by device and dtype, as JSON or Markdown.

It is small and self-contained, so that it can be attached to an issue.
"""

import json
from pathlib import Path

from attnbench.analysis.judgements import Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.reports import cells
from attnbench.reports.story import described
from attnbench.units import plain

FACTS = ("processor", "accelerator", "system", "Python", "versions", "settings")
SUFFIXES = (".json", ".md")
ABSENT = "-"


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
    lines = ["# Stock attention on this machine", ""]
    lines += [f"- {name}: {text}" for name, text in facts.items()]
    lines += ["", f"| implementation | {' | '.join(places)} |", "| --- " * (len(places) + 1) + "|"]
    for name, row in verdicts.items():
        lines.append(f"| {name} | {' | '.join(row.get(place, ABSENT) for place in places)} |")
    lines += ["", "## Findings", ""] if findings else ["", "No findings."]
    for each in findings:
        lines.append(f"- **{each['implementation']}**, {each['status']} on `{each['workload']}`: {each['message']}")
    return "\n".join([*lines, "", f"The same inputs again: --seed {content['seed']}", ""])
