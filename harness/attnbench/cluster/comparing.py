"""What `attnbench doctor --cluster` says of hosts: each one's facts, and what of them would not be comparable."""

from collections.abc import Mapping
from typing import Any

from attnbench.cluster.examining import Examined
from attnbench.units import show

LATE_S = 1.0
"""Clocks that are further apart put runs and journals in a wrong order; no time of a call depends on them."""
NOISE = "noise floor"


def row(host: str, found: Examined, late_s: float) -> tuple[str, ...]:
    """A host: its kind, ceilings, noise, versions, clocks."""
    here = found.environment
    said = {each.name: each for each in found.findings}
    rates = [
        f"{each.device} {show(each.matmul.rate, 'flops/s')}, {show(copy.rate, 'bytes/s')}"
        for each in found.ceilings
        if each.matmul is not None and (copy := each.copy(float("inf"))) is not None
    ]
    clocks = ", ".join(f"{name} {value}" for name, value in here.clocks.items()) or "not visible"
    return (
        host,
        f"{here.machine_fingerprint}: {here.cpu}, {here.num_physical_cores} cores"
        + (f", {here.accelerator}" if here.accelerator else ""),
        "; ".join(rates) or "not measured",
        said[NOISE].value if NOISE in said else "not measured",
        ", ".join(f"{name} {value}" for name, value in {"python": here.python, **here.versions}.items()),
        f"{clocks}; {late_s:+.2f} s apart from here",
    )


COLUMNS = ("host", "kind", "matrix product and copy, float32", "noise", "versions", "clocks")


def differences(hosts: Mapping[str, Examined], late_s: Mapping[str, float]) -> list[str]:
    """What would not be comparable, and what disturbs a host, a sentence each."""
    fields: dict[str, dict[str, list[str]]] = {}
    for host, found in hosts.items():
        for name, value in _flat(found.environment.must_match()).items():
            fields.setdefault(name, {}).setdefault(value, []).append(host)
    lines = []
    for name, values in fields.items():
        others = [host for host in hosts if not any(host in members for members in values.values())]
        known = values | ({"none": others} if others else {})
        if len(known) > 1:
            parts = "; ".join(f"{value or 'none'} on {', '.join(members)}" for value, members in known.items())
            lines.append(f"{name} differs, so that times of these hosts are not comparable: {parts}")
    for host, found in hosts.items():
        lines += [f"{host}, {each.name}: {each.advice}" for each in found.findings if each.advice]
    lines += [f"{host}: its clock is {s:+.1f} s apart from here" for host, s in late_s.items() if abs(s) > LATE_S]
    return lines


def _flat(fields: Mapping[str, Any]) -> dict[str, str]:
    """Each field as text, and each entry of one that has several under a name of its own."""
    flat: dict[str, str] = {}
    for name, value in fields.items():
        flat |= (
            {f"{name}.{key}": str(each) for key, each in value.items()}
            if isinstance(value, dict)
            else {name: str(value)}
        )
    return flat
