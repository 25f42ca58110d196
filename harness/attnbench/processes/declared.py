"""Read what implementations in files have built in, a file at a time in a process, and make workloads to suit."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from attnbench import plugins
from attnbench.processes.asides import worker
from attnbench.processes.messages import Declare, Declared
from attnbench.processes.worker_client import START_TIMEOUT_S, Template
from attnbench.workloads.workload import Workload

Axes: TypeAlias = Mapping[str, int | float | str]


def declared(specs: Iterable[str], template: Template | None = None) -> dict[str, Declared]:
    """The declarations of each spec whose file uses attnbench: any other file has none, and is not run.

    The processes are forked from `template`, or from one that ends with this call.

    A file that ends its process, or hangs, has none either: a check shows that in its own words.
    """
    by_file: defaultdict[Path | None, list[str]] = defaultdict(list)
    for spec in specs:
        if "attnbench" in plugins.imported(spec):
            by_file[plugins.split(plugins.variant(spec)[0])[0]].append(spec)
    declarations: dict[str, Declared] = {}
    if by_file:
        with worker(START_TIMEOUT_S, template=template) as process:
            for specs_of_file in by_file.values():
                process.start()
                for spec in specs_of_file:
                    reply = process.ask(Declare(spec=spec))
                    if isinstance(reply, Declared):
                        declarations[spec] = reply
    return declarations


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
