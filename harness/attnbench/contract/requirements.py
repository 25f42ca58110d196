"""What an implementation may need that is not there everywhere: a device, a package, a compiler."""

import importlib.util
import sys
from importlib.machinery import PathFinder

from attnbench.devices import device
from attnbench.workloads.workload import Workload


def is_on(kind: str, workload: Workload) -> bool:
    """Whether torch computes the workload on that kind of device, such as "cuda"."""
    return device(workload.device).torch_device.partition(":")[0] == kind


def only_on(kind: str, workload: Workload, what: str) -> str | None:
    """Why `what`, which has kernels for that kind of device alone, cannot run the workload, in words, or None."""
    return None if is_on(kind, workload) else f"{what} runs on {kind.upper()} alone"


def missing_package(module: str, distribution: str = "") -> str | None:
    """Why `module` cannot be imported, in words, or None; `distribution` is its name for pip where that differs.

    Nothing is imported: a package that is there but broken is an error of the cell that needs it, and of no other.
    """
    if module in sys.modules:
        return None
    package, _, rest = module.partition(".")
    found = importlib.util.find_spec(package) if package not in sys.modules else sys.modules[package].__spec__
    if found is not None and rest:
        found = PathFinder.find_spec(module, found.submodule_search_locations)
    return f"{distribution or package} is not installed" if found is None else None


def missing_compiler(name: str) -> str | None:
    """Why torch.compile can make no kernels for a device, named as a workload names it; in words, or None."""
    return device(name).missing_compiler()
