"""`python -m studies.verdicts`: judge the archived journals again, and list what changed, with the reasons.

A journal keeps raw samples only, so old runs are judged by today's method. The journals are those of results/gallery in
every commit that changed one, next to the table of verdicts (records.csv) that the engine of that commit wrote.
"""

import csv
import io
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pandas as pd
import typer

from attnbench.analysis.comparisons import Comparison, comparisons
from attnbench.analysis.results import Results, read
from attnbench.statistics.verdict import FEWEST_PROCESSES, Reason
from attnbench.storage.records import Verdict
from attnbench.units import markdown_table, percent
from studies import frame

FOLDER = Path("results/gallery")
JOURNALS = ("journal.jsonl", "journal.jsonl.gz")
GONE = "not compared any more"
TABLE = "verdicts.csv.gz"
PAGE = """# Verdicts of old runs by today's method

Written by `python -m studies.verdicts`. Each journal of the gallery, in each commit that changed it, is judged again,
next to the verdicts that the engine of that commit had stored. All of them load.

{runs}

Journals whose commit stored no table of verdicts are not compared: {without}.

## What changed, and why

{changes}

{explained} [All of them](verdicts.csv.gz) are in a table.
"""


@dataclass(frozen=True, kw_only=True)
class Archived:
    """A journal in a commit, and the verdicts stored next to it, by workload and implementation."""

    sweep: str
    commit: str
    results: Results
    stored: dict[tuple[str, str], str]


def git(*arguments: str) -> bytes:
    """The output of a git command; empty if it fails."""
    return subprocess.run(["git", *arguments], capture_output=True, check=False).stdout  # noqa: S603, S607 - our own


def archived() -> Iterator[Archived]:
    """Read each journal that the gallery ever had, oldest first, as of the commit that brought it."""
    log = git("log", "--reverse", "--format=%h", "--", *(f"{FOLDER}/*/{name}" for name in JOURNALS))
    seen = set[str]()
    for commit in log.decode().split():
        for entry in git("ls-tree", "-r", commit, f"{FOLDER}/").decode().splitlines():
            (_, _, blob), path = entry.split("\t")[0].split(), Path(entry.split("\t")[1])
            if path.name not in JOURNALS or blob in seen:
                continue
            seen.add(blob)
            with tempfile.TemporaryDirectory() as name:
                journal = Path(name) / path.name
                journal.write_bytes(git("cat-file", "blob", blob))
                results = read(journal)
            table = git("show", f"{commit}:{path.parent}/records.csv").decode()
            stored = {
                (row["workload"], row["implementation"]): row["verdict"]
                for row in csv.DictReader(io.StringIO(table))
                if row["verdict"] in set(Verdict)
            }
            yield Archived(sweep=path.parent.name, commit=commit, results=results, stored=stored)


def why(before: str, now: Comparison | None) -> str:
    """The reason why a verdict changed."""
    if now is None:
        return "its time is missing or invalid by today's rules"
    if now.verdict is not Verdict.undecided:
        margin = f"the margin is {percent(now.margin)}, and noise never widens it"
        return margin if before == "equivalent" or now.verdict is Verdict.equivalent else "the process is the unit now"
    if now.reason == Reason.few_processes:
        return f"fewer than {FEWEST_PROCESSES} processes timed it, and the process is the unit now"
    if now.reason == Reason.doubtful:
        return "other work disturbed the machine, and doubtful times get no verdict"
    if now.reason == Reason.one_process:
        return "one process timed it, and processes differ by 3 %"
    return f"the interval over processes is too wide for the margin of {percent(now.margin)}"


def rows(run: Archived) -> Iterator[dict[str, str]]:
    """Each verdict then and now, with the reason for a change."""
    judged = {(each.workload.id, each.implementation): each for each in comparisons(run.results)}
    for (workload, implementation), before in run.stored.items():
        now = judged.get((workload, implementation))
        after = GONE if now is None else str(now.verdict)
        yield {
            "sweep": run.sweep,
            "commit": run.commit,
            "workload": workload,
            "implementation": implementation,
            "then": before,
            "now": after,
            "why": "" if before == after else why(before, now),
        }


def judge_again(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the page goes.")] = FOLDER / "verdicts",
) -> None:
    """Judge every archived journal of the gallery, and write the page."""
    runs, every, without = [], [], []
    for run in archived():
        if not run.stored:
            without.append(f"{run.sweep} at {run.commit}")
            continue
        judged = list(rows(run))
        counts = Counter(row["now"] for row in judged if row["why"])
        words = ", ".join(f"{number} {verdict}" for verdict, number in counts.most_common())
        about = {"sweep": run.sweep, "commit": run.commit, "day": run.results.started.time[:10]}
        runs.append({**about, "verdicts": str(len(judged)), "changed": str(counts.total()), "now": words})
        every += judged
    changed = [row for row in every if row["why"]]
    kinds = Counter((row["then"], row["now"], row["why"]) for row in changed)
    reversed_ = sum({row["then"], row["now"]} == {"faster", "slower"} for row in changed)
    explained = f"{len(changed)} of {len(every)} verdicts changed, {reversed_} from faster to slower or back."
    table = [
        {"then": then, "now": now, "number": str(number), "why": reason}
        for (then, now, reason), number in kinds.most_common()
    ]
    texts = {"runs": markdown_table(runs), "without": "; ".join(without) or "none"}
    frame.save(to / "README.md", PAGE.format(**texts, changes=markdown_table(table), explained=explained))
    pd.DataFrame(changed).to_csv(to / TABLE, index=False, compression={"method": "gzip", "mtime": 0})
    typer.echo(explained)


if __name__ == "__main__":
    typer.run(judge_again)
