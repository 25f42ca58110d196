"""The recipes of CONTRIBUTING.md, applied in copies of the project."""

import os
import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```(\w+)\n(?:# (file|append to): (\S+)\n)?(.*?)^```", re.MULTILINE | re.DOTALL)


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
