"""Ask every host of a cluster what `attnbench doctor` says there."""

import json
import subprocess
import sys

from attnbench.cluster import driver
from attnbench.cluster.host import bench_slot

LIMIT_S = 300.0
"""A host that does not answer for this long is measuring something, or gone."""
Found = list[dict[str, str]] | str
"""The findings of a host (commands/doctor.py), or why there are none."""


def findings(address: str) -> dict[str, Found]:
    """The findings of each host of a cluster, by its address and the first letters of its id.

    Raises:
        ValueError: no ray, no cluster, or no host in it.
    """
    with driver.connected(address) as ray:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = driver.hosts_of(ray)
        if not nodes:
            raise ValueError(driver.NO_HOST)
        tasks = {}
        for key, node in nodes.items():
            where = NodeAffinitySchedulingStrategy(key, soft=False)
            options = {"num_cpus": 0, "resources": {driver.SLOT: 1}, "scheduling_strategy": where}
            tasks[f"{node['NodeManagerAddress']} ({key[:6]})"] = ray.remote(examine).options(**options).remote()
        found: dict[str, Found] = {}
        for name, task in tasks.items():
            try:
                found[name] = json.loads(ray.get(task, timeout=LIMIT_S))
            except (ray.exceptions.RayError, ValueError) as error:
                found[name] = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return found


def examine() -> str:
    """What the doctor prints on this host, as JSON.

    Raises:
        ValueError: it printed nothing.
    """
    with bench_slot():
        command = [sys.executable, "-P", "-m", "attnbench", "doctor", "--json"]
        ended = subprocess.run(command, capture_output=True, check=False, text=True)  # noqa: S603 - our own module
    if not ended.stdout:
        raise ValueError(" ".join(ended.stderr.strip().splitlines()[-1:]) or f"exit code {ended.returncode}")
    return ended.stdout
