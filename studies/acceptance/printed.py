"""Test W1: attnbench must print the time that a plain loop measures.

The loop, examples/plain_loop.py, imports nothing of attnbench and times each function in a process of its own. A
session times one shape in each of WAYS, in random order: with `attnbench run` under two values of --conditions, and
with the pytest fixture. The loop runs before and after each of them. A time by attnbench, called a reading, is compared
with the mean of these two loops. If the two differ too much, the machine has changed, and the reading is not judged.
"""

import ast
import json
import math
import random
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

from attnbench.processes.worker_client import ROOT
from studies.acceptance.outcome import at_most
from studies.acceptance.sessions import FIXTURE, PRODUCT, STUDIES, cells, plain_loop, printed, run_python
from studies.frame import Row

MEDIAN_LIMIT, LIMIT, APART = 0.02, 0.05, 0.03
"""Limits: relative error of a median of readings, relative error of one reading, and log ratio of two loops."""
FEWEST_JUDGED = 0.5
"""Smallest share of readings, for each function and way, that must be judged."""
LOOP_S, BUDGET_S = 0.8, 6.0
SPECS = {"sdpa": "torch:sdpa", "fused": "fused.py:attention", "mine": "mine.py:mine"}
"""Argument of the plain loop for each function, by the name of the function in attnbench."""
ISOLATED, SHARED, BY_FIXTURE = "isolated", "shared", "fixture"
Reading = dict[str, float]
"""Seconds of a call, by the name of the function."""
Axes = dict[str, str | int]


def fused() -> str:
    """Return the source of the bundled implementation `fused` as a file that imports PyTorch alone."""
    text = (STUDIES / "implementations" / "fused.py").read_text(encoding="utf-8")
    (function,) = (
        node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "attention"
    )
    imports = "import torch\nfrom torch import Tensor\nfrom torch.nn import functional as F\n\n\n"
    return imports + ast.unparse(function)


def loops(axes: Axes, folder: Path) -> Reading:
    """Time each function with the plain loop, each in a process of its own."""
    sizes = {"seq_len": int(axes["seq_len"]), "num_threads": int(axes["num_threads"])}
    return {name: plain_loop([spec], folder, seconds=LOOP_S, **sizes)[0][0] for name, spec in SPECS.items()}


def command(axes: Axes, folder: Path, tree: Path, isolation: str) -> Reading:
    """Time `mine`, `fused` and `sdpa` in one `attnbench run`; `isolation` is the value of --conditions."""
    sets = [f"--set={name}={value}" for name, value in axes.items()]
    asked = ["-P", "-m", "attnbench", "run", "mine.py:mine", "-i", "fused", "-i", "sdpa", *sets]
    run_python([*asked, "--conditions", isolation, f"--budget={BUDGET_S:g}"], folder, tree)
    return {cell["implementation"]: float(cell["latency_s"]) for cell in cells(folder)}


def fixture(axes: Axes, folder: Path, tree: Path) -> Reading:
    """Time `fused` and `mine`, each together with `sdpa`, with attnbench's pytest fixture."""
    found: Reading = {}
    for spec in ("fused", "mine.py:mine"):
        found |= printed(["-P", str(FIXTURE), json.dumps(axes), spec, "sdpa"], folder, tree)["seconds"]
    return found


WAYS: dict[str, Callable[[Axes, Path, Path], Reading]] = {
    ISOLATED: partial(command, isolation="process"),
    SHARED: partial(command, isolation="shared"),
    BY_FIXTURE: fixture,
}


def session(number: int, *, num_threads: int, seq_len: int, tree: Path = ROOT) -> list[Row]:
    """Time a shape in each of WAYS, in random order, with plain loops before and after each; return a row for each."""
    axes: Axes = {"seq_len": seq_len, "mask": "none", "num_threads": num_threads, "direction": "inference"}
    rows = []
    with tempfile.TemporaryDirectory(prefix="attnbench-session-") as name:
        files = {"mine.py": PRODUCT.format(share=0.0), "fused.py": fused()}
        for file, text in files.items():
            Path(name, file).write_text(text, encoding="utf-8")
        before = loops(axes, Path(name))
        for way in random.Random(number).sample(list(WAYS), len(WAYS)):
            with tempfile.TemporaryDirectory(prefix="attnbench-session-") as other:
                Path(other, "mine.py").write_text(files["mine.py"], encoding="utf-8")
                seconds = WAYS[way](axes, Path(other), tree)
            after = loops(axes, Path(name))
            rows.append({"session": number, "way": way, "seconds": seconds, "before": before, "after": after})
            before = after
    return rows


def judge(rows: Sequence[Row]) -> tuple[str, bool]:
    """Judge W1: for each function and way, the median of the readings and each reading must be close to the loops."""
    off: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    num_changed = 0
    for row in rows:
        for name in SPECS:
            before, after = row["before"][name], row["after"][name]
            if abs(math.log(after / before)) > APART:
                num_changed += 1
            elif name in row["seconds"]:
                off[row["way"]][name].append(2 * row["seconds"][name] / (before + after) - 1)
    words, passes = [], True
    for way in WAYS:
        num_sessions = sum(row["way"] == way for row in rows)
        medians = {name: median(readings) for name, readings in off[way].items()}
        readings = [each for judged in off[way].values() for each in judged]
        beyond = sum(abs(each) > LIMIT for each in readings)
        is_whole = all(len(off[way][name]) >= FEWEST_JUDGED * num_sessions for name in SPECS)
        passes &= is_whole and not beyond and all(abs(each) <= MEDIAN_LIMIT for each in medians.values())
        shown = ", ".join(f"{name} {each:+.1%}" for name, each in medians.items()) or "nothing judged"
        words.append(f"{way}: {shown}, beyond {LIMIT:.0%} in {at_most(beyond, len(readings)) if readings else '-'}")
    changed = f"loops around a reading differ by more than {APART:.0%} in {num_changed} of {len(rows) * len(SPECS)}"
    return f"{'; '.join(words)}; {changed}", passes
