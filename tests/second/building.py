"""Build the device `second`, and make a folder in which PyTorch and attnbench know it."""

import hashlib
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGE = "torch_second"
COMPILER = os.environ.get("CXX", "g++")


def compiled(cache: Path) -> Path:
    """Return the path of the extension module; compile it, in about a minute, unless it is in the folder `cache`.

    Raises:
        CalledProcessError: it does not compile.
    """
    source = HERE / "second.cpp"
    key = hashlib.sha256(source.read_bytes() + torch.__version__.encode() + sysconfig.get_platform().encode())
    built = cache / f"{key.hexdigest()[:16]}.so"
    if not built.exists():
        folders = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
        libraries = [f"-L{folder}" for folder in cpp_extension.library_paths()]
        flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", "-DTORCH_EXTENSION_NAME=_second"]
        includes = [f"-isystem{folder}" for folder in folders]
        linked = [*libraries, "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        target = built.with_suffix(f".{os.getpid()}")
        subprocess.run([COMPILER, *flags, *includes, str(source), "-o", str(target), *linked], check=True)
        target.rename(built)
    return built


def install(folder: Path, extension: Path) -> dict[str, str]:
    """Fill a folder with the device, and a copy of attnbench that knows it; return the environment that uses both."""
    for name in ("harness", "implementations"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    shutil.copy(HERE / "device.py", folder / "harness" / "attnbench" / "devices" / "second.py")
    package, metadata = folder / PACKAGE, folder / f"{PACKAGE}-1.0.dist-info"
    package.mkdir()
    metadata.mkdir()
    shutil.copy(HERE / "torch_second.py", package / "__init__.py")
    shutil.copy(extension, package / f"_second{sysconfig.get_config_var('EXT_SUFFIX')}")
    (metadata / "METADATA").write_text(f"Name: {PACKAGE}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\nsecond = {PACKAGE}:load\n")
    path = os.pathsep.join(map(str, (folder / "harness", folder)))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
