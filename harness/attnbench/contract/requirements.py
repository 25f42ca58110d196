"""What an implementation may need that is not there everywhere: a package, a compiler."""

import importlib.util
import os
import shutil
import sys
from importlib.machinery import PathFinder


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


def missing_compiler(device: str) -> str | None:
    """Why torch.compile can make no kernels for the device, in words, or None."""
    if device.startswith("cuda"):
        return missing_package("triton")
    compiler = os.environ.get("CXX", "g++")  # as torch/_inductor/config.py has it
    return None if shutil.which(compiler) else f"torch.compile needs a C++ compiler, and {compiler} is not found"
