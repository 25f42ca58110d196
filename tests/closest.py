"""Record how close numeric tests come to a limit, from below or from above.

With ATTNBENCH_CLOSEST=FILE, each test that compares tensors by the project's tolerance adds a line to FILE: its name,
and the largest error / tolerance that it met.
"""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor

from attnbench.checking.tolerance import Tolerance
from attnbench.storage.records import TensorError


@pytest.fixture(autouse=True)
def closest_call(request: pytest.FixtureRequest) -> Iterator[None]:
    """Record the largest error / tolerance of a test, if ATTNBENCH_CLOSEST names a file."""
    if not (file := os.environ.get("ATTNBENCH_CLOSEST")):
        yield
        return
    ratios: list[float] = []
    judge = Tolerance.judge

    def noted(tolerance: Tolerance, candidate: Tensor) -> TensorError:
        judged = judge(tolerance, candidate)
        ratios.append(math.inf if judged.ratio is None else judged.ratio)
        return judged

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tolerance, "judge", noted)
        yield
    if ratios:
        with Path(file).open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"test": request.node.nodeid, "ratio": min(max(ratios), 1e9)}) + "\n")


def report(file: Path, number: int = 5) -> str:
    """Format the `number` tests that come closest to a limit from below, and those from above."""
    calls = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    sides = {
        "right": sorted((each for each in calls if each["ratio"] <= 1), key=lambda each: -each["ratio"]),
        "wrong": sorted((each for each in calls if each["ratio"] > 1), key=lambda each: each["ratio"]),
    }
    lines = [f"{len(calls)} tests compare tensors; the closest of those that find"]
    for side, ordered in sides.items():
        lines += [f"  {side}: {each['ratio']:.3g} {each['test']}" for each in ordered[:number]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report(Path(os.environ["ATTNBENCH_CLOSEST"])))  # noqa: T201 - its output
