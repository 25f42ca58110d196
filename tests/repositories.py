"""A small git repository with two revisions of an implementation, and attention with a known slowdown."""

import subprocess
from pathlib import Path

PLAIN = '''"""The textbook form."""


def mine(query, key, value, *, mask=None):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value
'''
SLOW = PLAIN.replace(
    "    return scores", "    for _ in range(40):\n        scores.softmax(-1) @ value\n    return scores"
)
WRONG = PLAIN.replace("softmax(-1)", "softmax(-2)")


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    done = subprocess.run(["git", *identity, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


def commit(folder: Path, tag: str, **files: str | None) -> None:
    """Write or delete files (named without .py), commit all, and tag it."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        if text is None:
            path.unlink()
        else:
            path.write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message", tag)
    git(folder, "tag", tag)


def repository(folder: Path) -> Path:
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet")
    return folder
