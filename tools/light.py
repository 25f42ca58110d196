"""Measure the size and time of an installation, and renew its table in docs/guide.md: `python -m tools.light`.

A wheel is built and installed into a fresh environment, with the versions of constraints.txt. A row of the table has
the number of packages, the megabytes of site-packages with and without torch, the seconds of the installation, and the
seconds from a cold start to the first verdict of `attnbench check sdpa`. pip's own options and caches apply. With
`--python PYTHON`, only `attnbench` is installed, with that Python, and its row is printed.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDE = ROOT / "docs" / "guide.md"
HEADS = ("what", "Python", "packages", "MB", "MB without torch", "s to install", "s to the first verdict")
TABLE = re.compile(r"(?<=<!-- begin install -->\n\n).*?(?=\n\n<!-- end install -->)", re.DOTALL)
CHECK = ("check", "sdpa", "--set", "seq_len=32", "--set", "scope=attention", "--set", "dtype=float32")


def megabytes(folder: Path) -> float:
    """Return the total size of all files below a folder, in MB (10**6 bytes)."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


def call(*words: object, folder: Path = ROOT) -> str:
    """Run a command in a folder, and return its output.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    command = [str(word) for word in words]
    return subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603


def measure(what: str, source: Path, extras: str, python: str) -> str:
    """Install the wheel of the checkout `source` into a fresh environment, and return a row of the table.

    Raises:
        subprocess.CalledProcessError: the wheel cannot be built, installed or run.
    """
    with tempfile.TemporaryDirectory(prefix="attnbench-light-") as name:
        folder = Path(name)
        call(python, "-m", "venv", folder / "env")
        inside = folder / "env" / "bin" / "python"
        call(inside, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, source)
        (wheel,) = folder.glob("*.whl")
        start = time.monotonic()
        wanted = f"attnbench[{extras}] @ {wheel.as_uri()}" if extras else wheel
        call(inside, "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt", wanted)
        installed_s = time.monotonic() - start
        count = "from importlib.metadata import distributions as d; print(len({each.name for each in d()}))"
        number = int(call(inside, "-c", count)) - len(("pip", "setuptools"))
        (site,) = (folder / "env").glob("lib/python*/site-packages")
        size, of_torch = megabytes(site), megabytes(site / "torch")
        start = time.monotonic()
        call(inside, "-P", "-m", "attnbench", *CHECK, folder=folder)
        verdict_s = time.monotonic() - start
        version = call(inside, "--version").split()[1]
    numbers = f"{number} | {size:.0f} | {size - of_torch:.0f} | {installed_s:.0f} | {verdict_s:.0f}"
    return f"| {what} | {version} | {numbers} |"


def main() -> None:
    """Renew the table in docs/guide.md or, with --python, print one row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default="")
    if python := parser.parse_args().python:
        print(measure("`attnbench`", ROOT, "", python))  # noqa: T201 - its output
        return
    rows = [
        measure("`attnbench`", ROOT, "", sys.executable),
        measure("`attnbench[all]`", ROOT, "all", sys.executable),
    ]
    table = "\n".join([f"| {' | '.join(HEADS)} |", f"|{' --- |' * len(HEADS)}", *rows])
    GUIDE.write_text(TABLE.sub(lambda _: table, GUIDE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
