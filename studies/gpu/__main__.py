"""Run each step in its own process, and pack an archive: `python -m studies.gpu --out DIR`. Rerun it to resume.

`--rehearse` uses the CPU and small sizes, and a simulated device for the tests G1 to G5 of acceptance/on_cuda.py.
`--stop-after SECONDS` starts a step only if its time limit ends within these seconds; the next call runs the others.
"""

import argparse
import math
import sys
import tarfile
from collections import Counter
from pathlib import Path

from studies import frame
from studies.frame import Row
from studies.gpu import plan, steps
from studies.gpu.steps import FAILED, LEFT_OUT, OK

ARCHIVE = "gpu.tar.gz"
FINDING, INCOMPLETE = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Run the remaining steps and pack the archive; return FINDING if one failed, INCOMPLETE if some are left, or 0."""
    parser = argparse.ArgumentParser(prog="python -m studies.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where all goes; go on with it later")
    parser.add_argument("--rehearse", action="store_true", help="small, on the CPU; two steps fail on purpose")
    parser.add_argument(
        "--stop-after", type=float, default=math.inf, metavar="SECONDS", help="begin nothing that ends later"
    )
    options = parser.parse_args(arguments)
    out, size = options.out.resolve(), plan.rehearsal() if options.rehearse else plan.full()
    planned = plan.steps(size)
    is_complete = steps.run_all(planned, out, options.stop_after)
    ended = dict(steps.ended(planned, out))
    text = table(ended, is_complete=is_complete)
    frame.save(out / "table.md", text)
    sys.stdout.write(text)
    archive(out)
    planted = {f"planted-{each}" for each in size.planted}
    is_good = all(row["outcome"] in {OK, LEFT_OUT} for name, row in ended.items() if name not in planted)
    return 0 if is_good and is_complete else FINDING if not is_good else INCOMPLETE


def table(ended: dict[str, Row], *, is_complete: bool) -> str:
    """Format the number of steps by outcome, then a row for each step with its answer or its reason."""
    counts = Counter(row["outcome"] for row in ended.values())
    numbers = ", ".join(f"{number} {outcome}" for outcome, number in counts.most_common())
    lines = [f"{len(ended)} steps: {numbers or 'none has ended'}.{'' if is_complete else ' More are left: go on.'}", ""]
    lines += ["| step | outcome | seconds | found |", "| --- | --- | --- | --- |"]
    for name, row in ended.items():
        answer = row.get("answer", "") if row["outcome"] in {OK, FAILED} else ""
        text = (answer or row["reason"]).replace("|", "/").replace("\n", " ")
        lines.append(f"| {name} | {row['outcome']} | {row['took_s']:.1f} | {text} |")
    return "\n".join([*lines, ""])


def archive(out: Path) -> None:
    """Pack all files below `out` into one archive."""
    with tarfile.open(out / ARCHIVE, "w:gz") as packed:
        for file in sorted(out.rglob("*")):
            if file.is_file() and file.name != ARCHIVE:
                packed.add(file, arcname=str(Path("gpu") / file.relative_to(out)))


if __name__ == "__main__":
    sys.exit(main())
