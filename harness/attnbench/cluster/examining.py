"""A host by itself, as `attnbench doctor --cluster` shows it: `python -m attnbench.cluster.examining` prints JSON."""

import sys
from dataclasses import asdict

import msgspec

from attnbench.storage.records import Ceilings, Environment

LIMIT_S = 1.0


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """One finding of timing/doctor.py."""

    name: str
    value: str
    advice: str = ""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Why a host could not be examined."""

    error: str


class Examined(msgspec.Struct, frozen=True, kw_only=True, tag="examined"):
    """What a host is, what it reaches in float32 on each of its devices, and whether it is fit to measure."""

    environment: Environment
    findings: tuple[Found, ...]
    ceilings: tuple[Ceilings, ...]


def examined() -> Examined:
    """Look at this machine; takes about twenty seconds. torch is imported here alone: an actor has none."""
    from attnbench.devices import device, environment, loads, names
    from attnbench.timing.doctor import examine
    from attnbench.workloads.workload import Workload

    here = [name for name in names() if device(name).seems_present()]
    return Examined(
        environment=environment.collect(),
        findings=tuple(Found(**asdict(each)) for each in examine()),
        ceilings=tuple(loads.ceilings(Workload(device=name), LIMIT_S, lambda: None) for name in here),
    )


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(examined()))
