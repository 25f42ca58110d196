"""The shares of a plan: a few workloads each, with all their implementations, which one host measures by itself."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import msgspec

from attnbench import plugins
from attnbench.storage.events import Plan

SHARES_A_HOST = 4
"""Fewer shares, and a fast host waits for a slow one; more, and each costs seconds for its processes and ceilings."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one host, and the files that it names, by spec."""

    run: str
    name: str
    attnbench: str  # the version of the driver
    plan: Plan
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


def split(plan: Plan, run: str, num_hosts: float) -> list[Share]:
    """The shares of a plan. Each takes every n-th workload, so that all take about as long; the budget is each host's.

    Raises:
        ValueError: a file that the plan names has changed.
        OSError: it cannot be read.
    """
    number = max(1, min(len(plan.workloads), round(SHARES_A_HOST * num_hosts)))
    files = {spec: path.read_bytes() for spec in plan.implementations if (path := _path(spec)) is not None}
    for spec, content in files.items():
        if _digest(content) != plan.digests.get(spec):
            raise ValueError(f"{spec} has changed since the run began: start a new run")
    shares = []
    for place in range(number):
        workloads = plan.workloads[place::number]
        part = len(workloads) / len(plan.workloads)
        smaller = msgspec.structs.replace(
            plan,
            workloads=workloads,
            budget_s=plan.budget_s * part * num_hosts,
            false_share=plan.false_share * part,
            mixes=(),
            traced={},
        )
        name = f"{place:0{len(str(number))}}-{_digest(msgspec.json.encode(smaller))}"
        shares.append(Share(run=run, name=name, attnbench=version("attnbench"), plan=smaller, files=files))
    return shares


def placed(share: Share, folder: Path) -> Plan:
    """The plan of a share with its files written below `folder`, each under its digest, and named there.

    Raises:
        ValueError: a file is not what the plan says.
        OSError: the folder cannot be written.
    """
    moved: dict[str, str] = {}
    for spec, content in share.files.items():
        digest, path = _digest(content), _path(spec)
        if path is None or digest != share.plan.digests.get(spec):
            raise ValueError(f"{spec} is not the file of the plan: it has the digest {digest}")
        target = folder / digest / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        moved[spec] = renamed(spec, target)
    plan = share.plan
    return msgspec.structs.replace(
        plan,
        implementations=tuple(moved.get(spec, spec) for spec in plan.implementations),
        digests={moved.get(spec, spec): digest for spec, digest in plan.digests.items()},
    )


def renamed(spec: str, path: Path) -> str:
    """A spec of a file with another path, under the same name as before."""
    bare, option = plugins.variant(spec)
    moved = f"{path}:{plugins.split(bare)[1]}" + (f"+{option}" if option else "")
    return moved if plugins.name_of(moved) == plugins.name_of(spec) else f"{plugins.name_of(spec)}={moved}"


def _digest(content: bytes) -> str:
    """As plugins.digest of a file."""
    return hashlib.sha256(content).hexdigest()[:8]


def _path(spec: str) -> Path | None:
    return plugins.split(plugins.variant(spec)[0])[0]
