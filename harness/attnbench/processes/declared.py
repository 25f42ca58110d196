"""Ask what implementations in files have built in, a file at a time in a process, and give them workloads to suit."""

import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from attnbench import plugins
from attnbench.processes.worker_client import START_TIMEOUT_S
from attnbench.workloads.workload import Workload

Axes: TypeAlias = Mapping[str, int | float | str]


class Declared(msgspec.Struct, frozen=True):
    """The values of axes that an implementation has built in, and why it cannot be loaded, or ""."""

    built_in: dict[str, int | float | str] = {}
    problem: str = ""


def declared(specs: Iterable[str]) -> dict[str, Declared]:
    """The declarations of each spec whose file uses attnbench: any other file has none, and is not run."""
    by_file: defaultdict[Path | None, list[str]] = defaultdict(list)
    for spec in specs:
        if "attnbench" in plugins.imported(spec):
            by_file[plugins.split(plugins.variant(spec)[0])[0]].append(spec)
    return {spec: found for asked in by_file.values() for spec, found in _answers(asked).items()}


def _answers(specs: list[str]) -> dict[str, Declared]:
    """The answers of a process; none where it does not answer, which a check shows in its own words."""
    with tempfile.TemporaryDirectory(prefix="attnbench-declared-") as folder:
        file = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "attnbench.processes.worker.declared", str(file), *specs]
        try:
            subprocess.run(  # noqa: S603 - this Python
                command, capture_output=True, timeout=START_TIMEOUT_S, check=False, env=os.environ | {"LC_ALL": "C"}
            )
            return msgspec.json.decode(file.read_bytes(), type=dict[str, Declared])
        except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
            return {}


def together(declarations: Mapping[str, Declared]) -> Axes:
    """The axes that all have built in between them, for a comparison at the same work.

    Raises:
        ValueError: two have another value of one axis.
    """
    axes: dict[str, int | float | str] = {}
    owners: dict[str, str] = {}
    for spec, declaration in declarations.items():
        for axis, value in declaration.built_in.items():
            if axes.setdefault(axis, value) != value:
                one, other = (plugins.name_of(each) for each in (owners[axis], spec))
                raise ValueError(
                    f"{one} has {axis}={axes[axis]} built in, and {other} has {axis}={value}: compare them one by one"
                )
            owners.setdefault(axis, spec)
    return axes


def suited(workloads: Iterable[Workload], axes: Axes) -> tuple[Workload, ...]:
    """The workloads with these values, each once; those that cannot have them are left out.

    Raises:
        ValueError: none can.
    """
    found: dict[str, Workload] = {}
    problem: ValueError | None = None
    for workload in workloads:
        try:
            changed = workload.with_axes(axes)
        except ValueError as error:
            problem = error
            continue
        found.setdefault(changed.id, changed)
    if not found and problem is not None:
        raise problem
    return tuple(found.values())
