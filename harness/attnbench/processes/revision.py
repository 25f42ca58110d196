"""Which state of the code a run belongs to."""

import subprocess


def commit() -> str:
    """The commit checked out here, with + after it where files have changed since; empty outside a repository."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout  # noqa: S603, S607
