"""Ask what implementations in files have built in, a file at a time in a process, and give them workloads to suit."""

import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from attnbench import plugins
from attnbench.processes.messages import Declarations, Declare, Declared
from attnbench.processes.worker_client import ROOT, START_TIMEOUT_S, Template, WorkerProcess
from attnbench.workloads.workload import Workload

Axes: TypeAlias = Mapping[str, int | float | str]


def declared(specs: Iterable[str], template: Template | None = None) -> dict[str, Declared]:
    """The declarations of each spec whose file uses attnbench: any other file has none, and is not run.

    The processes are forked from `template`, or from one that ends with this call.
    """
    by_file: defaultdict[Path | None, list[str]] = defaultdict(list)
    for spec in specs:
        if "attnbench" in plugins.imported(spec):
            by_file[plugins.split(plugins.variant(spec)[0])[0]].append(spec)
    if not by_file:
        return {}
    if template is not None:
        return {spec: found for asked in by_file.values() for spec, found in _answers(asked, template).items()}
    with tempfile.TemporaryDirectory(prefix="attnbench-declared-") as folder:
        own = Template(Path(folder) / "worker.log", {}, "", (ROOT,))
        try:
            return declared(specs, own)
        finally:
            own.close()


def _answers(specs: list[str], template: Template) -> dict[str, Declared]:
    """The answers of a process; none where it does not answer, which a check shows in its own words."""
    process = WorkerProcess(template, START_TIMEOUT_S)
    try:
        process.start()
        reply = process.ask(Declare(specs=tuple(specs)))
    except ValueError:
        return {}
    finally:
        process.close()
    return reply.by_spec if isinstance(reply, Declarations) else {}


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
