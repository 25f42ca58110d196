"""The shares of a plan: a few workloads each, with all their implementations, which one host measures by itself."""

import hashlib
from pathlib import Path

import msgspec

from attnbench import plugins
from attnbench.storage.events import Plan

SHARES_A_HOST = 4
"""Fewer shares, and a fast host waits for a slow one; more, and each costs seconds for its processes and ceilings."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """What one host is asked to measure: a plan of its own, and the files that the plan names, by spec."""

    run: str
    name: str
    plan: Plan
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


def split(plan: Plan, run: str, at_once: float) -> list[Share]:
    """The shares of a plan. Each takes every n-th workload, so that all take about as long.

    `at_once` is how many of them are measured at a time: the number of hosts, where one host measures each.

    A comparison that is decided by the rule of its share is decided by that of the whole plan, too: of m comparisons
    the rule asks for an e-value of m / (share of false verdicts x number of verdicts), and a share of m' has as much
    less of the share of false verdicts as it has fewer workloads.

    Raises:
        ValueError: a file that the plan names has changed.
        OSError: it cannot be read.
    """
    number = max(1, min(len(plan.workloads), round(SHARES_A_HOST * at_once)))
    files = {spec: path.read_bytes() for spec in plan.implementations if (path := _path(spec)) is not None}
    for spec, content in files.items():
        if _digest(content) != plan.digests.get(spec):
            raise ValueError(f"{spec} has changed since the run began: start a new run")
    made = []
    for place in range(number):
        workloads = plan.workloads[place::number]
        part = len(workloads) / len(plan.workloads)
        own = msgspec.structs.replace(
            plan,
            workloads=workloads,
            budget_s=plan.budget_s * part * at_once,
            false_share=plan.false_share * part,
            mixes=(),
            traced={},
        )
        digest = hashlib.sha256(msgspec.json.encode(own)).hexdigest()[:8]
        made.append(Share(run=run, name=f"{place:0{len(str(number))}}-{digest}", plan=own, files=files))
    return made


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
    made = f"{path}:{plugins.split(bare)[1]}" + (f"+{option}" if option else "")
    return made if plugins.name_of(made) == plugins.name_of(spec) else f"{plugins.name_of(spec)}={made}"


def _digest(content: bytes) -> str:
    """As plugins.digest of a file."""
    return hashlib.sha256(content).hexdigest()[:8]


def _path(spec: str) -> Path | None:
    return plugins.split(plugins.variant(spec)[0])[0]
