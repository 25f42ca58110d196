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
    """A plan for one host; its files lie at the same paths on every host."""

    run: str
    name: str
    attnbench: str  # version of the driver
    plan: Plan


def part(plan: Plan, place: int, number: int) -> Plan:
    """Every `number`-th workload of a plan from `place` on, with its part of the probability of a false verdict."""
    workloads = plan.workloads[place::number]
    false_share = plan.false_share * len(workloads) / len(plan.workloads)
    return msgspec.structs.replace(plan, workloads=workloads, false_share=false_share)


def split(plan: Plan, run: str, num_hosts: int) -> list[Share]:
    """Split a plan: each share takes every n-th workload, so that all take about equally long.

    The shares and their names follow from the plan alone. The budget applies to each host.
    """
    number = max(1, min(len(plan.workloads), MOST_SHARES))
    specs = {spec: absolute(spec) for spec in plan.implementations}
    shares = []
    for place in range(number):
        smaller = msgspec.structs.replace(
            part(plan, place, number),
            implementations=tuple(specs.values()),
            digests={specs.get(spec, spec): digest for spec, digest in plan.digests.items()},
        )
        digest = hashlib.sha256(msgspec.json.encode(smaller)).hexdigest()[:8]
        name = f"{place:0{len(str(number))}}-{digest}"
        budget_s = plan.budget_s * len(smaller.workloads) / len(plan.workloads) * num_hosts
        smaller = msgspec.structs.replace(smaller, budget_s=budget_s)
        shares.append(Share(run=run, name=name, attnbench=version("attnbench"), plan=smaller))
    return shares


def absolute(spec: str) -> str:
    """The spec with an absolute path, if it has a path, and the same name."""
    bare, option = plugins.variant(spec)
    path, attribute = plugins.split(bare)
    if path is None:
        return spec
    moved = f"{Path(path).absolute()}:{attribute}" + (f"+{option}" if option else "")
    return moved if plugins.name_of(moved) == plugins.name_of(spec) else f"{plugins.name_of(spec)}={moved}"
