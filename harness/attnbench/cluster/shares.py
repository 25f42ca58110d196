"""The shares of a plan: each has a few workloads with all their implementations, and is measured by one host."""

import hashlib
from importlib.metadata import version
from pathlib import Path

import msgspec

from attnbench import plugins
from attnbench.storage.events import Plan

MOST_SHARES = 32
"""With fewer shares, fast hosts wait for slow ones; with more, processes and ceilings cost seconds for each."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one host, and the files that it names, by spec."""

    run: str
    name: str
    attnbench: str  # version of the driver
    plan: Plan
    files: dict[str, bytes] = msgspec.field(default_factory=dict)


def split(plan: Plan, run: str, num_hosts: int) -> list[Share]:
    """Split a plan: each share takes every n-th workload, so that all take about equally long.

    The shares and their names follow from the plan alone. The budget applies to each host.

    Raises:
        ValueError: a file of the plan has changed.
        OSError: it cannot be read.
    """
    number = max(1, min(len(plan.workloads), MOST_SHARES))
    files = {spec: path.read_bytes() for spec in plan.implementations if (path := _path(spec)) is not None}
    for spec, content in files.items():
        if _digest(content) != plan.digests.get(spec):
            raise ValueError(f"{spec} has changed since the run began: start a new run")
    shares = []
    for place in range(number):
        workloads = plan.workloads[place::number]
        part = len(workloads) / len(plan.workloads)
        smaller = msgspec.structs.replace(
            plan, workloads=workloads, false_share=plan.false_share * part, mixes=(), traced={}
        )
        name = f"{place:0{len(str(number))}}-{_digest(msgspec.json.encode(smaller))}"
        smaller = msgspec.structs.replace(smaller, budget_s=plan.budget_s * part * num_hosts)
        shares.append(Share(run=run, name=name, attnbench=version("attnbench"), plan=smaller, files=files))
    return shares


def placed(share: Share, folder: Path) -> Plan:
    """Write the files of a share below `folder`, each under its digest; return its plan with the new paths.

    Raises:
        ValueError: a file does not match the plan.
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
    """Change the path in the spec of a file; keep its name."""
    bare, option = plugins.variant(spec)
    moved = f"{path}:{plugins.split(bare)[1]}" + (f"+{option}" if option else "")
    return moved if plugins.name_of(moved) == plugins.name_of(spec) else f"{plugins.name_of(spec)}={moved}"


def _digest(content: bytes) -> str:
    """The digest of a file, as in plugins.digest."""
    return hashlib.sha256(content).hexdigest()[:8]


def _path(spec: str) -> Path | None:
    return plugins.split(plugins.variant(spec)[0])[0]
