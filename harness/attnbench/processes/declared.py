"""Read the built-in axes of implementations in files, one process for each file, and adapt workloads to them."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from attnbench import plugins
from attnbench.processes.asides import evaluate, worker
from attnbench.processes.messages import Declared
from attnbench.processes.worker_client import START_TIMEOUT_S, Template
from attnbench.workloads.workload import Workload

Axes: TypeAlias = Mapping[str, int | float | str]


def declared(specs: Iterable[str], template: Template | None = None) -> dict[str, Declared]:
    """The declarations of each spec whose file uses attnbench; other files have none, and are not run.

    Processes are forked from `template`, or from a temporary one. A file that ends its process, or hangs, has no
    declarations: the check reports the failure.
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
                    reply = evaluate(process, "declared", Declared, spec=spec)
                    if isinstance(reply, Declared):
                        declarations[spec] = reply
    return declarations


def together(declarations: Mapping[str, Declared]) -> Axes:
    """Merge the built-in axes of all implementations, to compare them on the same work.

    Raises:
        ValueError: two declare different values of an axis.
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
    """Set these axes on all workloads, each result once; drop workloads that cannot have them.

    Raises:
        ValueError: no workload can.
    """
    distinct: dict[str, Workload] = {}
    problem: ValueError | None = None
    for workload in workloads:
        try:
            changed = workload.with_axes(axes)
        except ValueError as error:
            problem = error
            continue
        distinct.setdefault(changed.id, changed)
    if not distinct and problem is not None:
        raise problem
    return tuple(distinct.values())
