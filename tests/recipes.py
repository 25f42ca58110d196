"""The recipes of CONTRIBUTING.md, applied in copies of the project; `nox -s recipes` runs all tests there.

python -m tests.recipes                      # all in one copy
python -m tests.recipes axis metric -- -x    # these two, each in its own copy; arguments after -- go to pytest
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import typer

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(?:# (file|append to): (\S+)\n)?(.*?)^```", re.MULTILINE | re.DOTALL)
APPLY_RECIPES = ("tests/test_recipes.py", "tests/test_documents.py::test_every_block_runs[CONTRIBUTING.md]")
"""Tests that apply the same recipes themselves, which is impossible twice in one copy."""


def recipes() -> dict[str, str]:
    """Return the section of each recipe, by the thing it adds: "axis", "metric", ..."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## Add an? ([^\n]+)\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return {what.rpartition(" ")[2]: section for what, section in sections}


def apply(what: str, folder: Path) -> None:
    """Save, extend and change files as a recipe says, in a copy of the project.

    Raises:
        subprocess.CalledProcessError: a diff does not fit.
    """
    for language, target, path, text in BLOCK.findall(recipes()[what]):
        if target:
            with (folder / path).open("a" if target == "append to" else "w", encoding="utf-8") as file:
                file.write(f"\n\n{text}" if target == "append to" else text)
        elif language == "diff":
            environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
            command = ["git", "apply", "-C1", "-"]
            subprocess.run(command, cwd=folder, input=text, text=True, env=environment, check=True)


def copy_project(folder: Path) -> None:
    """Copy every file that git tracks or would track, in its current state."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)


def run_tests_in_copy(applied: list[str], options: list[str]) -> int:
    """Apply recipes in a copy of git's files, and run all tests there; return pytest's exit code."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "copy"
        copy_project(folder)
        for what in applied:
            apply(what, folder)
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder / "harness"), str(folder)])}
        subprocess.run([sys.executable, "docs/figures.py"], cwd=folder, env=environment, check=True)
        left_out = [f"--deselect={test}" for test in APPLY_RECIPES]
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not browser", *left_out, *options]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """Test all recipes in one copy, or the named ones in a copy each; return 0 if all tests pass in every copy."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    named, options = arguments[:end], arguments[end + 1 :]
    if unknown := set(named) - set(recipes()):
        typer.echo(f"no recipe for {', '.join(sorted(unknown))}: choose among {', '.join(recipes())}", err=True)
        return 2
    codes = {}
    for applied in [[what] for what in named] or [list(recipes())]:
        title, start = ", ".join(applied), time.monotonic()
        typer.echo(f"recipes for {title}")
        codes[title] = run_tests_in_copy(applied, options)
        typer.echo(f"recipes for {title}: exit code {codes[title]} after {time.monotonic() - start:.0f} s")
    for title, code in codes.items():
        typer.echo(f"{'FAILED' if code else 'passed'}: {title}")
    return int(any(codes.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
