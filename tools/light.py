"""Measure an installation outside of the tree: `python -m tools.light [SOURCE] [--extras NAMES] [--python PYTHON]`.

SOURCE, the checkout by default, is built into a wheel and installed into a fresh environment. The row has the number of
packages, the megabytes of site-packages with and without torch, the seconds of the installation, and the seconds from
a cold start to the first verdict of `attnbench check sdpa`. pip's own options and caches apply.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHECK = ("check", "sdpa", "--set", "seq_len=32", "--set", "scope=attention", "--set", "dtype=float32")


def megabytes(folder: Path) -> float:
    """The size of the files below a folder, in MB."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def call(*words: object, folder: Path = ROOT) -> str:
    """Run a command in a folder, and return its output.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603


def measure(source: Path, extras: str, python: str) -> str:
    """Install the wheel of a checkout into a fresh environment, and return a row of a table.

    Raises:
        subprocess.CalledProcessError: it cannot be built, installed or run.
    """
    with tempfile.TemporaryDirectory(prefix="attnbench-light-") as name:
        folder = Path(name)
        call(python, "-m", "venv", folder / "env")
        inside = folder / "env" / "bin" / "python"
        call(inside, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
        (wheel,) = folder.glob("*.whl")
        start = time.monotonic()
        wanted = f"attnbench[{extras}] @ {wheel.as_uri()}" if extras else wheel
        call(inside, "-m", "pip", "install", "--quiet", "--no-compile", wanted)
        installed_s = time.monotonic() - start
        count = "from importlib.metadata import distributions as d; print(len({each.name for each in d()}))"
        number = int(call(inside, "-c", count)) - len(("pip", "setuptools"))
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        size, of_torch = megabytes(site), megabytes(site / "torch")
        start = time.monotonic()
        call(inside, "-P", "-m", "attnbench", *CHECK, folder=folder)
        verdict_s = time.monotonic() - start
        version = call(inside, "--version").split()[1]
    what = f"attnbench[{extras}]" if extras else "attnbench"
    numbers = f"{number} | {size:.0f} | {size - of_torch:.0f} | {installed_s:.0f} | {verdict_s:.0f}"
    return f"| {what} | {version} | {numbers} |"


def main() -> None:
    """Print the table with one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--extras", default="")
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args()
    heads = ("what", "Python", "packages", "MB", "MB without torch", "s to install", "s to the first verdict")
    row = measure(given.source, given.extras, given.python)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}\n{row}")  # noqa: T201 - its output


if __name__ == "__main__":
    main()
