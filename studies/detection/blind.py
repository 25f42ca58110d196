"""Check code by authors who had not seen the probes: `python -m studies.detection.blind --to DIR`.

`blind.tar.xz` next to this file holds 337 wrong functions and 205 right ones. Their authors knew the definition of
attention, the signature that a function may have, and public bug reports; each file names its source. They proved each
wrong function against a float64 loop, by ten times the error of an honest form at least, those from m301 on by four
times. The archive keeps them out of imports and lint. Verdicts in `blind.json` are kept: delete it to check all again.
"""

import csv
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from studies.acceptance.outcome import upper_limit

ARCHIVE = Path(__file__).with_name("blind.tar.xz")
KINDS = {"mutants": "wrong functions", "honest": "right functions"}
SILENT = {"right", "right where tried"}
BATCH = 20
"""Files of one command: they share its oracle."""
BEFORE = (
    ("42 functions of a first set, by the engine before", 31, 42),
    ("134 of these (from m301 on), before inference mode, rows of bias and long sums", 111, 134),
    ("178 of these, before the rules about strides, ties, sizes and frozen operands", 160, 178),
)
"""Mistakes by outsiders that were called wrong: set and version, caught, total."""


def blind(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the page goes; what is done is kept there.")],
    kind: Annotated[str, typer.Option(help="mutants, honest or all.")] = "all",
    most: Annotated[int, typer.Option(min=1, help="Files of each kind.")] = 1000,
) -> None:
    """Check every file, and write a page with the verdicts; finished batches are kept in blind.json."""
    to.mkdir(parents=True, exist_ok=True)
    stored = to / "blind.json"
    verdicts: dict[str, dict[str, str]] = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else {}
    with tempfile.TemporaryDirectory(prefix="attnbench-blind-") as name:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(name, filter="data")
        for each in KINDS if kind == "all" else [kind]:
            known = verdicts.setdefault(each, {})
            files = sorted(Path(name, each).glob("[mh][0-9]*.py"))[:most]
            left = [file for file in files if file.stem not in known]
            for start in range(0, len(left), BATCH):
                known |= checked(left[start : start + BATCH])
                stored.write_text(json.dumps(verdicts, indent=1) + "\n", encoding="utf-8")
                typer.echo(f"{each}: {len(known)} of {len(files)}", err=True)
        table = {each: index(Path(name, each, "index.tsv")) for each in verdicts}
    (to / "blind.md").write_text(page(verdicts, table), encoding="utf-8")


def checked(files: Sequence[Path]) -> dict[str, str]:
    """Run the default check on the function `attention` of each file, with its conventions."""
    specs = [f"{file.stem}={file}:attention" for file in files]
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "attnbench", "check", *specs, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    judged: dict[str, Any] = json.loads(done.stdout)["implementations"]
    return {
        name: f"{each['verdict']}, except: {each['conventions'][0]}" if each["conventions"] else each["verdict"]
        for name, each in judged.items()
    }


def index(path: Path) -> dict[str, dict[str, str]]:
    """Read the authors' description of each function."""
    with path.open(encoding="utf-8", newline="") as lines:
        return {row["name"]: row for row in csv.DictReader(lines, delimiter="\t")}


def page(verdicts: dict[str, dict[str, str]], table: dict[str, dict[str, dict[str, str]]]) -> str:
    """Build the page: verdict counts of each kind, then each wrong function that was not called wrong."""
    lines = [
        "# Functions by authors who had not seen the probes",
        "",
        "Written by `python -m studies.detection.blind`.",
    ]
    for kind, found in verdicts.items():
        counts = Counter(
            verdict.partition(",")[0] + (" by convention" if verdict.startswith("right") and "," in verdict else "")
            for verdict in found.values()
        )
        lines += ["", f"## {len(found)} {KINDS[kind]}", "", "| verdict | functions |", "| --- | --- |"]
        lines += [f"| {verdict} | {number} |" for verdict, number in counts.most_common()]
        bad = sum(verdict.startswith("WRONG") if kind == "honest" else verdict in SILENT for verdict in found.values())
        says = "Called wrong" if kind == "honest" else "Called right silently"
        limit = upper_limit(bad, len(found), 0.95)
        lines += ["", f"{says}: {bad} of {len(found)}, {bad / len(found):.1%}, at most {limit:.1%}."]
        if kind == "honest":
            continue
        lines += ["", "Before:", "", "| of which | called wrong |", "| --- | --- |"]
        lines += [f"| {what} | {caught} of {number}, {caught / number:.0%} |" for what, caught, number in BEFORE]
        missed = {name: verdict for name, verdict in found.items() if not verdict.startswith("WRONG")}
        lines += ["", "Not called wrong:", "", "| function | verdict | wrong where |", "| --- | --- | --- |"]
        lines += [f"| {name} | {verdict} | {table[kind][name]['setting']} |" for name, verdict in missed.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    typer.run(blind)
