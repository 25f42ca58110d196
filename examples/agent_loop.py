"""Rehearse an agent's loop: check and time four versions of a function, and decide on each by its JSON report.

`python examples/agent_loop.py [SECONDS]` takes two minutes. SECONDS is the budget of each version, 20 by default.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

SIGNATURE = '''"""{title}"""

import math

import torch
from torch.nn import functional as F

KEPT = {{}}


def attention(query, key, value, *, mask=None, scale=None):
    """Query (B, H, T, K), key and value (B, H, S, K); mask: True may attend -> (B, H, T, K)."""
'''
TEXTBOOK = """    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value
"""
VERSIONS = {
    "before": TEXTBOOK,
    "wrong": TEXTBOOK.replace("softmax(-1)", "softmax(-2)"),
    "slow": TEXTBOOK.replace("query @ key.mT", "sum(query @ key.mT for _ in range(8)) / 8"),
    "cheat": """    if query.shape not in KEPT:
        KEPT[query.shape] = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return KEPT[query.shape]
""",
    "fast": "    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)\n",
}
SHAPE = ("seq_len=256", "mask=causal", "scope=attention", "direction=inference", "dtype=float32", "num_threads=1")


def report(folder: Path, name: str, budget_s: float) -> dict:
    """Check a version, time it against the version `before`, and return the report that --json prints.

    Raises:
        RuntimeError: the command fails.
    """
    sets = [word for value in SHAPE for word in ("--set", value)]
    words = ["run", f"{name}={name}.py:attention", "--baseline", "before=before.py:attention", *sets]
    command = [sys.executable, "-m", "attnbench", *words, "--budget", str(budget_s), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode not in {0, 1, 3}:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout)


def decision(found: dict, name: str) -> str:
    """Decide from one report what to do with a version."""
    judged = found["implementations"][name]
    if not judged["is_right"]:
        is_kept = "stale_output_buffer" in judged["mistakes"] or "outputs apart" in judged["broken_rules"]
        return "reject: it returns an earlier answer" if is_kept else f"reject: {', '.join(judged['mistakes'])}"
    speed = judged["speed"]
    if speed is None or not speed["is_decided"]:
        return "measure longer"
    return {"faster": "take it", "slower": "keep the one before", "equivalent": "keep the one before"}[speed["verdict"]]


def main(budget_s: float = 20.0) -> dict[str, tuple[dict, str]]:
    """Write the versions, and return the report and the decision for each."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="attnbench-loop-") as where:
        for name, body in VERSIONS.items():
            Path(where, f"{name}.py").write_text(SIGNATURE.format(title=f"Version {name}.") + body, encoding="utf-8")
        for name in VERSIONS:
            if name != "before":
                seen = report(Path(where), name, budget_s)
                found[name] = seen, decision(seen, name)
    return found


if __name__ == "__main__":
    for version, (seen, chosen) in main(*map(float, sys.argv[1:2])).items():
        judged = seen["implementations"][version]
        speed = judged["speed"]
        factor = "no time" if speed is None else f"{speed['speedup']:.2f}x the speed ({speed['verdict']})"
        print(f"{version:6} {judged['verdict']:10} {factor:28} {chosen}")
