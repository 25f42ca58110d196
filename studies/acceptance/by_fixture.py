"""Compare two implementations on one shape with attnbench's pytest fixture, and print the outcome as JSON.

The arguments are a workload's axes as JSON, and two implementations. The program also runs with an older attnbench.
"""

import importlib
import json
import pkgutil
import sys

from attnbench import reports
from attnbench.pytest_plugin import AttentionBench

if __name__ == "__main__":
    found = AttentionBench(0)(*sys.argv[2:4], budget_s=3.0, **json.loads(sys.argv[1]))
    frame = found.to_frame()
    named = {module.name for module in pkgutil.iter_modules(reports.__path__)}
    summary = importlib.import_module(f"attnbench.reports.{'story' if 'story' in named else 'summary'}")
    outcome = {
        "verdict": found.verdict,
        "seconds": dict(zip(frame["implementation"], frame["latency_s"], strict=True)),
        "is_warned": bool(summary.troubles(found.results)),
    }
    sys.stdout.write(f"{json.dumps(outcome)}\n")
