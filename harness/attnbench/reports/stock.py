"""The file of `attnbench check --report`: the verdict on each implementation by device and dtype, as Markdown.

It is small and self-contained, so that it can be attached to an issue; `check --json` is for programs.
"""

from pathlib import Path

from attnbench.analysis.judgements import Judgement, judgements
from attnbench.analysis.results import Results
from attnbench.reports import cells
from attnbench.reports.story import described
from attnbench.units import markdown_list, markdown_table, plain

FACTS = ("cpu", "accelerator", "system", "python", "versions", "settings")
SUFFIX = ".md"
ABSENT = "-"


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
    parts = ["# Stock attention on this machine", markdown_list(facts), markdown_table(rows), "## Findings"]
    parts += [markdown_table(findings) if findings else "No findings."]
    parts += [f"The same inputs again: --seed {results.plan.seed}"]
    file.write_text("\n\n".join(parts) + "\n", encoding="utf-8")


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
