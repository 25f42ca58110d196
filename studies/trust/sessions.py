"""Sessions: a session is one real `attnbench run` of a candidate, the honest function, `fused` and `sdpa`."""

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from attnbench.analysis.results import Results, read
from attnbench.statistics.intervals import median
from attnbench.storage.journal import find_runs
from attnbench.storage.records import LATENCY, Status
from studies.trust.corpus import clean

CANDIDATE, HONEST, INNOCENT, BASELINE = "case", "honest", "fused", "sdpa"
MARK = "ATTNBENCH_TRUST_CASE"
"""Environment variable that every process of a run inherits; it identifies the processes that outlive the run."""
USUAL = {"seq_len": 256, "num_heads": 4, "batch_size": 1, "mask": "causal", "direction": "inference"}
STEP_LIMIT_S, RUN_LIMIT_S = 10, 150
MOST_LETTERS = 300


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one implementation in a session."""

    status: str
    message: str = ""
    latency_s: float | None = None  # median of its samples


class Session(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a run: a cell for each implementation, and in `lost` the reason if the run did not end as usual."""

    cells: dict[str, Cell]
    lost: str = ""
    took_s: float = 0.0
    num_left: int = 0  # processes that survived the run

    def ratio(self, name: str, other: str) -> float | None:
        """Return the time of `name` divided by that of `other` (both implementations); None if one has no time."""
        one, two = (self.cells[each].latency_s if each in self.cells else None for each in (name, other))
        return None if one is None or two is None else one / two


def run(source: str, settings: dict[str, Any]) -> Session:
    """Run the candidate in `source` with the honest function, `fused` and `sdpa`; `settings` replace axes of USUAL."""
    with tempfile.TemporaryDirectory(prefix="attnbench-trust-") as folder:
        here = Path(folder)
        (here / "candidate.py").write_text(source, encoding="utf-8")
        (here / "honest.py").write_text(clean(), encoding="utf-8")
        (here / "tiny.toml").write_text(_sweep(USUAL | settings), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "attnbench", "run", "--sweep", "tiny.toml", "--results", "results"]
        command += ["--referee", "--timeout", str(STEP_LIMIT_S)]
        specs = [f"{CANDIDATE}=candidate.py:attend", f"{HONEST}=honest.py:attend", INNOCENT, BASELINE]
        command += [option for spec in specs for option in ("-i", spec)]
        code, took_s, num_left = call(command, here, RUN_LIMIT_S)
        ended = f"it exited with code {code}" if code is not None else f"it hung: ended after {RUN_LIMIT_S} s"
        try:
            results = read(find_runs(here / "results")[-1])
            cells = cells_of(results)
            is_whole = results.elapsed_s is not None
        except Exception as error:  # noqa: BLE001 - a candidate may have written anything there
            return Session(cells={}, lost=f"{ended}; {type(error).__name__}: {error}", took_s=took_s, num_left=num_left)
        lost = "" if is_whole and code in {0, 1, 3} else ended
        return Session(cells=cells, lost=lost, took_s=took_s, num_left=num_left)


def call(command: list[str], folder: Path, limit_s: float) -> tuple[int | None, float, int]:
    """Run a command in a new process session, and kill the processes that outlive it.

    Returns the command's exit code (None: it did not end within `limit_s`), its duration in seconds, and the number of
    processes that were killed.
    """
    token = secrets.token_hex(8)
    start = time.monotonic()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - our own commands
            command,
            cwd=folder,
            env=os.environ | {MARK: token},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        took_s = time.monotonic() - start
        left = [each for each in psutil.process_iter() if _has_mark(each, token)]
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.send_signal(signal.SIGKILL)
        process.wait()
    return code, took_s, len(left)


def _has_mark(process: psutil.Process, token: str) -> bool:
    with contextlib.suppress(psutil.Error, OSError):
        return process.environ().get(MARK) == token
    return False


def _sweep(settings: dict[str, Any]) -> str:
    values = "".join(f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in settings.items())
    return f"""summary = "one small workload"
budget_s = 0.0
num_rounds = 4
metrics = ["latency"]

[[grid]]
{values}"""


def cells_of(results: Results) -> dict[str, Cell]:
    """Return the result of each implementation, with the median of its samples if it has any."""
    found = {}
    for record in results.records:
        values = [sample.value for sample in record.samples(LATENCY)] if record.status is Status.ok else []
        found[record.implementation] = Cell(
            status=str(record.status),
            message=record.message[:MOST_LETTERS],
            latency_s=median(values) if values else None,
        )
    return found
