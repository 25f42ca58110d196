"""Fenced blocks of documents, and the recipes of CONTRIBUTING.md, applied in copies of the project."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```\s*$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"# (file|append to): (\S+)\n")


@dataclass(frozen=True)
class Block:
    """A fenced block, with its document and the line on which it begins."""

    document: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.document}:{self.line} ({self.language})\n{self.text}"

    def save(self, folder: Path) -> bool:
        """Write the block to the file that its first line names, or append it; return whether a file is named."""
        if (target := TARGET.match(self.text)) is None:
            return False
        path, text = folder / target[2], self.text.split("\n", 1)[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if target[1] == "append to" else "w", encoding="utf-8") as file:
            file.write(f"\n\n{text}" if target[1] == "append to" else text)
        return True


def blocks(document: str, text: str) -> list[Block]:
    """Return the blocks of a document's text, in order."""
    return [
        Block(document, text.count("\n", 0, found.start()) + 1, found[1], found[2]) for found in FENCE.finditer(text)
    ]


def recipes() -> dict[str, str]:
    """Return the section of each recipe, by the thing it adds: "axis", "metric", ..."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## Add an? ([^\n]+)\n(.*?)(?=^## )", text, re.MULTILINE | re.DOTALL)
    return {what.rpartition(" ")[2]: section for what, section in sections}


def apply(what: str, folder: Path) -> None:
    """Save, extend and change files as the recipe `what` says, in a copy of the project.

    Raises:
        subprocess.CalledProcessError: a diff does not fit the files.
    """
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    for block in blocks(what, recipes()[what]):
        if not block.save(folder) and block.language == "diff":
            command = ["git", "apply", "-C1", "-"]
            subprocess.run(command, cwd=folder, input=block.text, text=True, env=environment, check=True)


def copy_project(folder: Path) -> None:
    """Copy every file that git tracks or would track, in its current state."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
