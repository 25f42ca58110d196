"""Plant a slowdown of exactly 10 %, and let the gate find it: `python examples/planted_slowdown.py [SECONDS]`.

Both versions repeat the same textbook attention: one 10 times in each call, the other 11 times. Nothing else is in the
function, so a call takes 11 / 10 = 1.10 times as long, on any machine. The gate must fail on that pair (exit code 1)
and pass on two identical ones (exit code 0). Operators and FLOPs also grow by 10 %, and would show the slowdown without
a clock: the thresholds allow any number of them, so that the time alone decides.

SECONDS is the budget of each pair, 60 by default. The script exits with 0 if both gates end as they should, with 3 if a
gate could not decide because of other work on the machine, and else with 1.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

REPEATS = {"ten": 10, "ten_again": 10, "eleven": 11}
FUNCTION = '''"""The textbook form, {repeats} times."""

import math


def attention(query, key, value, *, mask=None, scale=None):
    """Query (B, H, T, K), key and value (B, H, S, K); mask: True may attend -> (B, H, T, K)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    for _ in range({repeats}):
        scores = query @ key.mT * scale
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        output = scores.softmax(-1) @ value
    return output
'''
THRESHOLDS = """
[[gate.rule]]
metric = "num_operators"
allowed = inf

[[gate.rule]]
metric = "executed_flops"
allowed = inf
"""
SHAPE = ("seq_len=128", "mask=none", "scope=attention", "direction=inference", "dtype=float32", "num_threads=1")
PAIRS = {"ten_again": 0, "eleven": 1}
"""The expected exit code of the gate, by the version that is compared with `ten`."""
OPEN = {3, 4}
"""Exit codes of a gate that could not decide."""


def write(folder: Path) -> None:
    """Write the versions and the thresholds."""
    for name, repeats in REPEATS.items():
        (folder / f"{name}.py").write_text(FUNCTION.format(repeats=repeats), encoding="utf-8")
    (folder / "attnbench.toml").write_text(THRESHOLDS, encoding="utf-8")


def judged(folder: Path, name: str, budget_s: float) -> int:
    """Compare a version with `ten`, and return the exit code of the gate on that session."""
    sets = [word for value in SHAPE for word in ("--set", value)]
    compare = ["compare", "ten.py:attention", f"{name}.py:attention", *sets, "--smallest-effect", "0.05"]
    attnbench = [sys.executable, "-m", "attnbench"]
    subprocess.run([*attnbench, *compare, "--budget", str(budget_s), "--quiet"], cwd=folder, check=False)  # noqa: S603
    return subprocess.run([*attnbench, "gate"], cwd=folder, check=False).returncode  # noqa: S603


def main(budget_s: float = 60.0) -> int:
    """Let the gate judge both pairs of versions, and return the exit code of this script."""
    with tempfile.TemporaryDirectory(prefix="attnbench-planted-") as name:
        folder = Path(name)
        write(folder)
        ends = {}
        for version, expected in PAIRS.items():
            print(f"\nten against {version}: {REPEATS[version]} / {REPEATS['ten']} of the time", flush=True)
            ends[version] = judged(folder, version, budget_s)
            print(f"the gate exits with {ends[version]}, expected {expected}", flush=True)
    if ends == PAIRS:
        return 0
    return 3 if all(code in OPEN or code == PAIRS[version] for version, code in ends.items()) else 1


if __name__ == "__main__":
    sys.exit(main(*map(float, sys.argv[1:2])))
