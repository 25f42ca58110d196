"""Check code by authors who had not seen the inputs of the check: `python -m studies.detection.blind --to DIR`.

`blind.tar.xz` next to this file contains 642 wrong functions (m...) and 362 right ones (h...); in an archive, imports
and linters do not find them. The authors knew the definition of attention, the signature that a function may have, and
public bug reports; each file names its source. They compared each wrong function with a float64 loop: its error is at
least ten times that of a right form (from m301 to m499, four times).

Functions from m601 on read a paged cache; their author also knew docs/serving.md. Functions from m701 on are kernels,
from m801 on ports of models, and from m901 on taken from public reports. Functions from m1001, m1101 and m1201 on are
again kernels, ports and reports, but their authors could not run them. The authors from m701 on also knew README,
docs/guide.md and docs/adapters.md. Functions from m1301 on read a paged cache again; their author knew README and
docs/serving.md, and did not compare them with a loop. m565 was first counted as right, but its gradients are NaN where
those of scaled_dot_product_attention are finite. Rerun the command to resume.
"""

import csv
import json
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from attnbench.units import grouped, markdown_table
from studies import frame
from studies.acceptance.outcome import upper_limit
from studies.frame import Piece, Row

ARCHIVE = Path(__file__).with_name("blind.tar.xz")
KINDS = {"mutants": "wrong functions", "honest": "right functions"}
SILENT = {"right", "right where tried"}
BEFORE = Path(__file__).with_name("before.json")
"""Verdicts on functions from m501 on, from before the check had the rules that these functions led to."""
JUDGED = Path(__file__).with_name("judged.json")
"""Judgements (see JUDGEMENTS) on attnbench's diagnosis of each function from m701 or m1001 on, by state of attnbench's
code. The judges had not written the diagnoses."""
JUDGEMENTS = ("right", "vague", "wrong", "missed")
LATER = """The row of the new sets is of code that had not seen them. Rows after the first, and the last one, are of
code that was mended for these same functions, of which only some were judged again: their bounds say how many were
wrong here, not how many would be among new functions."""
BATCH = 20
"""Number of files that one command checks, so that reference answers are computed once for all of them."""


def blind(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the page goes.")],
    since: Annotated[int, typer.Option(help="The number of the first file; earlier verdicts stay.")] = 0,
) -> None:
    """Check every file, and write a page with the verdicts.

    `--since 701` checks only the files from this number on; earlier verdicts are kept.
    """
    stored = json.loads((to / "blind.json").read_bytes()) if since else {}
    verdicts, settings = dict[str, dict[str, str]](), dict[str, str]()
    with tempfile.TemporaryDirectory(prefix="attnbench-blind-") as name:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(name, filter="data")
        for each in KINDS:
            files = [file for file in sorted(Path(name, each).glob("[mh][0-9]*.py")) if number_of(file.stem) >= since]
            frame.complete(
                [Piece(name=f"{each}{since or ''}", make=partial(checked, files), size=-(-len(files) // BATCH))], to
            )
            found = {row["name"]: row["verdict"] for row in frame.rows(to, f"{each}{since or ''}")}
            verdicts[each] = stored.get(each, {}) | found
            with Path(name, each, "index.tsv").open(encoding="utf-8", newline="") as lines:
                settings |= {row["name"]: row.get("setting", "") for row in csv.DictReader(lines, delimiter="\t")}
    frame.save(to / "blind.json", json.dumps(verdicts, indent=1) + "\n")
    frame.save(to / "blind.md", page(verdicts, settings, json.loads(BEFORE.read_bytes())))


def number_of(name: str) -> int:
    """Return the number in the name of a function, as in m1001_last_tile."""
    return int(name[1:].partition("_")[0])


def checked(files: Sequence[Path], number: int) -> list[Row]:
    """Run the default check on the function `attention` of each file in batch `number`; return a row for each."""
    specs = [f"{file.stem}={file}:attention" for file in files[number * BATCH :][:BATCH]]
    done = subprocess.run(  # noqa: S603 - our own command
        [sys.executable, "-m", "attnbench", "check", *specs, "--json", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    judged: dict[str, Any] = json.loads(done.stdout)["implementations"]
    return [
        {
            "name": name,
            "verdict": each["verdict"] + f", except: {'; '.join(each['conventions'])}" * bool(each["conventions"]),
        }
        for name, each in judged.items()
    ]


def page(verdicts: dict[str, dict[str, str]], settings: dict[str, str], before: dict[str, str]) -> str:
    """Build the page: counts of verdicts on wrong and right functions, and the wrong functions not called wrong."""
    parts = ["# Functions by authors who had not seen the probes", "Written by `python -m studies.detection.blind`."]
    for kind, found in verdicts.items():
        counts = Counter(
            verdict.partition(",")[0] + (" by convention" if verdict.startswith("right") and "," in verdict else "")
            for verdict in found.values()
        )
        parts.append(f"## {len(found)} {KINDS[kind]}")
        parts.append(markdown_table([{"verdict": text, "functions": str(num)} for text, num in counts.most_common()]))
        parts.append(f"In all {share(kind, found)}")
        if kind == "mutants":
            for first, earlier in grouped(before.items(), lambda item: number_of(item[0]) // 100).items():
                now = {name: found[name] for name, _ in earlier}
                texts = share(kind, now), share(kind, dict(earlier))
                parts.append("Of those from m{}01 on {} Before the rules that they led to {}".format(first, *texts))
            missed = [(name, text) for name, text in found.items() if not text.startswith("WRONG")]
            rows = [{"function": name, "verdict": text, "wrong where": settings[name]} for name, text in missed]
            parts += ["Not called wrong:", markdown_table(rows)]
    return "\n\n".join([*parts, *sentences(json.loads(JUDGED.read_bytes())), ""])


def sentences(judged: dict[str, dict[str, str]]) -> list[str]:
    """Build the section on the sentences of the diagnosis: how many were right, vague, wrong or missed.

    `judged` maps each state of attnbench's code to the judgements of its sentences, by function.
    """
    rows = []
    for when, found in judged.items():
        counts, number = Counter(found.values()), len(found)
        kinds = {kind: f"{counts[kind]} ({counts[kind] / number:.0%})" for kind in JUDGEMENTS}
        limit = upper_limit(counts["wrong"], number, 0.95)
        rows.append({"code": when, "sentences": str(number), **kinds, "wrong at most": f"{limit:.0%}"})
    words = (
        "Judged from the sources, by people who had not written the sentences: a right one leads to the line, a vague "
    )
    return [
        "## Sentences",
        f"{words}one is true but does not lead there, a wrong one leads elsewhere.",
        LATER,
        markdown_table(rows),
    ]


def share(kind: str, found: dict[str, str]) -> str:
    """Describe the share of bad verdicts: "WRONG" on right functions, or one of SILENT on wrong functions."""
    bad = sum(verdict.startswith("WRONG") if kind == "honest" else verdict in SILENT for verdict in found.values())
    name, limit = "wrong" if kind == "honest" else "right silently", upper_limit(bad, len(found), 0.95)
    return f"{bad} of {len(found)} are called {name}: {bad / len(found):.1%}, at most {limit:.1%}."


if __name__ == "__main__":
    typer.run(blind)
