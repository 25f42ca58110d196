"""Kill a worker, a task, a node or the driver of a sweep over a Ray cluster, and check how the sweep ends.

The end is compared with a run without a cluster: each cell has the same status, one host has measured each share, and
no decided verdict differs.
"""

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

from attnbench.analysis.comparisons import comparisons
from attnbench.analysis.results import Results, read
from attnbench.cluster.driver import SLOT
from attnbench.cluster.host import HOST
from attnbench.commands import ExitCode
from attnbench.storage.journal import HOSTS, JOURNAL, find_runs
from attnbench.storage.records import Key, Verdict

VICTIMS = ("worker", "task", "node", "driver")
SHORT = (
    *("naive_loop", "sdpa", "--seed", "1", "--budget", "6", "--set", "seq_len=12,16", "--set", "num_heads=2"),
    *("--set", "head_dim=8", "--set", "mask=none", "--set", "direction=inference", "--set", "num_threads=1"),
)
LIMIT_S = 600.0
ENDS = {ExitCode.passed, ExitCode.inconclusive}  # exit codes of a whole run; on a busy machine times are doubtful
GONE_S = 1.0  # for which a killed node is away before a new one replaces it


class Machines:
    """A cluster on this machine: a head and two hosts."""

    def __init__(self) -> None:
        """Start a head that measures nothing, and both hosts."""
        from ray.cluster_utils import Cluster

        os.environ.setdefault("RAY_worker_niceness", "0")
        self.cluster: Any = Cluster()
        self._node: dict[str, Any] = {
            "num_cpus": 1,
            "include_dashboard": False,
            "object_store_memory": 80_000_000,  # the smallest that Ray allows; messages are small
        }
        self.cluster.add_node(**self._node)
        self.nodes = {name: self.add(name) for name in ("one", "two")}

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self, name: str) -> Any:
        """Add a node that measures, under the host name `name`."""
        return self.cluster.add_node(resources={SLOT: 1}, env_vars={HOST: name}, **self._node)

    def remove(self, name: str) -> None:
        """Remove a node with all its processes, as if its power were cut."""
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cluster.shutdown()


def started(results: Path, *words: str) -> subprocess.Popen[bytes]:
    results.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "attnbench", "run", *words, "--results", str(results)]
    with (results / "log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def local(results: Path) -> Results:
    started(results, *SHORT).wait(LIMIT_S)
    return read(find_runs(results)[-1])


def trial(cluster: Machines, results: Path, victim: str, after_s: float, alone: Results) -> list[str]:
    """Run one sweep, kill a victim `after_s` seconds after a host has started to measure, and return the errors."""
    driver = started(results, *SHORT, "--cluster", cluster.address)
    run = begun(results)
    if run is None:
        driver.kill()
        driver.wait()
        return [f"it did not begin: {(results / 'log').read_text()[-500:]}"]
    time.sleep(after_s)
    kill(cluster, victim, driver)
    try:
        code = driver.wait(LIMIT_S)
        if victim == "driver" and code == -signal.SIGKILL:
            driver = started(results, "--resume", run.name, "--cluster", cluster.address)
            code = driver.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        driver.kill()
        driver.wait()
        return ["it hung"]
    problems = [] if code in ENDS else [f"exit code {code}: {(results / 'log').read_text()[-500:]}"]
    return [*problems, *wrong(run, alone)]


def kill(cluster: Machines, victim: str, driver: subprocess.Popen[bytes]) -> None:
    """Kill a random process of the kind `victim`, among those that this process has started."""
    if victim == "driver":
        driver.kill()
    elif victim == "node":
        name = random.choice(list(cluster.nodes))
        cluster.remove(name)
        time.sleep(GONE_S)
        cluster.nodes[name] = cluster.add(name)
    elif found := running("ray::measure" if victim == "task" else "attnbench.processes.worker"):
        with suppress(psutil.NoSuchProcess):
            random.choice(found).kill()


def running(word: str) -> list[psutil.Process]:
    """Return the descendants of this process with that word in their command."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            found += [each] if word in " ".join(each.cmdline()) else []
    return found


def begun(results: Path) -> Path | None:
    """Wait until a task measures a share, and return the folder of the run; None if that takes too long."""
    end_s = time.monotonic() + LIMIT_S / 2
    while time.monotonic() < end_s:
        if (runs := find_runs(results)) and running("attnbench.processes.worker"):
            return runs[-1]
        time.sleep(0.1)
    return None


def wrong(run: Path, alone: Results) -> list[str]:
    """Describe the errors of a run on a cluster, compared with the run `alone`."""
    found = read(run)
    problems = [] if found.elapsed_s is not None else ["it has no end"]
    ends, expected = ({each.key: each.status for each in results.records} for results in (found, alone))
    problems += [f"statuses {ends}, and alone {expected}"] * (ends != expected)
    decided, without = (_decided(results) for results in (found, alone))
    problems += [
        f"{key}: {decided[key]}, and alone {without.get(key)}"
        for key in decided
        if decided[key] != without.get(key, decided[key])
    ]
    places = Counter(path.parent.name for path in (run / HOSTS).glob(f"*/*/{JOURNAL}"))
    problems += [f"share {share} was measured by {number} hosts" for share, number in places.items() if number > 1]
    return problems


def _decided(results: Results) -> dict[Key, str]:
    return {each.key: str(each.verdict) for each in comparisons(results) if each.verdict is not Verdict.undecided}
