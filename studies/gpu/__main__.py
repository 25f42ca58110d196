"""`python -m studies.gpu --out DIR`: each step in its own process, a ledger to resume from, and one archive.

With `--rehearse` everything runs on the CPU, small, and G1 to G5 on a simulated device. `--stop-after` starts no step
that would not end in time; the next call resumes.
"""

import argparse
import math
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

from studies.gpu import ledger, plan
from studies.gpu.ledger import FAILED, LEFT_OUT, OK, Ledger

ARCHIVE = "gpu.tar.gz"
FINDING, INCOMPLETE = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Run the remaining steps, print the table, and write the archive; the exit code shows whether all succeeded."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where all goes; go on with it later")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU; three steps fail on purpose")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, metavar="SECONDS", help="begin nothing that ends later"
    )
    given = parser.parse_args(arguments)
    book = Ledger(given.out.resolve())
    size = plan.rehearsal() if given.rehearse else plan.full()
    before = len(book.ended())
    is_complete = ledger.run_all(plan.groups(size), book, say, given.stop_after)
    ended = book.ended()
    text = table(ended, dict(ledger.found(book.out)), is_complete=is_complete)
    (book.out / "table.md").write_text(text, encoding="utf-8")
    sys.stdout.write(text)
    if len(ended) > before or not (book.out / ARCHIVE).exists():
        archive(book.out)
    planted = {f"planted-{each}" for each in size.planted}
    is_good = all(line["outcome"] in {OK, LEFT_OUT} for name, line in ended.items() if name not in planted)
    return 0 if is_good and is_complete else FINDING if not is_good else INCOMPLETE


def say(text: str) -> None:
    """Print progress to standard error."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def table(ended: dict[str, dict[str, Any]], found: dict[str, dict[str, Any]], *, is_complete: bool) -> str:
    """Format the answer first, then failures, then each step with its figure."""
    counts = Counter(line["outcome"] for line in ended.values())
    said = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    lines = [f"{len(ended)} steps: {said or 'none has ended'}.{'' if is_complete else ' More are left: go on.'}", ""]
    bad = [(name, line) for name, line in ended.items() if line["outcome"] not in {OK, LEFT_OUT}]
    lines += [f"- {name} {line['outcome']}: {line['reason']}" for name, line in bad] + [""] * bool(bad)
    lines += ["| step | outcome | seconds | found |", "| --- | --- | --- | --- |"]
    for name, line in ended.items():
        answer = found.get(name, {}).get("answer", "") if line["outcome"] in {OK, FAILED} else ""
        shown = (answer or line["reason"]).replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {line['outcome']} | {line['took_s']:.1f} | {shown} |")
    return "\n".join([*lines, ""])


def archive(out: Path) -> None:
    """Pack all results into one file, whole or not at all."""
    draft = out / f"{ARCHIVE}.draft"
    with tarfile.open(draft, "w:gz") as packed:
        for file in sorted(out.rglob("*")):
            if file.is_file() and file.name not in {ARCHIVE, draft.name}:
                packed.add(file, arcname=str(Path("gpu") / file.relative_to(out)))
    draft.rename(out / ARCHIVE)


if __name__ == "__main__":
    sys.exit(main())
