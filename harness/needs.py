"""What an implementation may need of the machine that is not there everywhere: a package, a compiler."""

import importlib.util
import os
import shutil
import sys


def missing_package(module: str, distribution: str = "") -> str | None:
    """Why `module` cannot be imported, in words, or None; `distribution` is its name for pip where that differs.

    Nothing is imported: a broken package is an error of the cell that needs it, and of no other.
    """
    try:
        is_there = module in sys.modules or importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the package that `module` lies in
        is_there = False
    return None if is_there else f"{distribution or module} is not installed"


def missing_compiler(device: str) -> str | None:
    """Why torch.compile can make no kernels for the device, in words, or None."""
    if device.startswith("cuda"):
        return missing_package("triton")
    compiler = os.environ.get("CXX", "g++")  # as torch/_inductor/config.py has it
    return None if shutil.which(compiler) else f"torch.compile needs a C++ compiler, and {compiler} is not found"
