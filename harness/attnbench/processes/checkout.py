"""What git knows: the commit that a run belongs to, and a revision's files in a folder of their own.

The repository itself is only read. No worktree is registered: files come through an index of their own, so that a kill
leaves nothing in `.git`.
Source: https://git-scm.com/docs/git-checkout-index, "Using git checkout-index to export an entire tree".
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

NO_REPOSITORY = "not a git repository (or any"
"""What git prints where there is none in a folder and none above it."""
ENGLISH = {"LC_ALL": "C"}
"""The text that is looked for must not be translated."""


def repository_root(folder: Path = Path()) -> Path:
    """The root folder of the repository that `folder` lies in.

    Raises:
        ValueError: it lies in none, git refuses it, or there is no git.
    """
    try:
        return Path(_git("rev-parse", "--show-toplevel", folder=folder, variables=ENGLISH).rstrip("\n"))
    except subprocess.CalledProcessError as error:
        where, message = folder.resolve(), " ".join(error.stderr.split())
        if NO_REPOSITORY in message:
            raise ValueError(f"{where} lies in no git repository: go to one, or give two folders or files") from None
        raise ValueError(f"git cannot read the repository at {where}: {message}") from None


def resolve(revision: str) -> str:
    """The commit that a branch, tag, digest or any other name of a revision stands for.

    Raises:
        ValueError: there is no such revision here, or no repository.
    """
    repository_root()
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise ValueError(
            f"there is no revision {revision} in this repository: see git branch --all; in a shallow clone fetch it "
            "first (actions/checkout: fetch-depth: 0)"
        ) from None


def check_out(commit: str, target: Path) -> None:
    """Write every file of a commit below `target`, which then is there whole or not at all. Submodules stay empty.

    Raises:
        ValueError: the commit is gone, or the folder cannot be written.
    """
    index, draft = (target.with_suffix(suffix).resolve() for suffix in (".index", ".draft"))
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        root, own = repository_root(), {"GIT_INDEX_FILE": str(index)}
        _git("read-tree", commit, folder=root, variables=own)
        _git("checkout-index", "--all", "--quiet", f"--prefix={draft}/", folder=root, variables=own)
        draft.rename(target)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{commit[:12]} cannot be checked out: {error.stderr.strip()}") from None
    except OSError as error:
        raise ValueError(f"cannot write to {target}: {error.strerror}; choose another folder with --results") from None
    finally:
        index.unlink(missing_ok=True)


def build(command: str, folder: Path, what: str) -> None:
    """Run a command in `folder`, without a shell; what it prints goes to standard error.

    Raises:
        ValueError: it cannot be run, or fails.
    """
    try:
        words = shlex.split(command)
        code = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode  # noqa: S603
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be built by {command}: {error}") from None
    if code:
        raise ValueError(f"{what} cannot be built: {command} ended with exit code {code}; what it printed stands above")


def current_commit() -> str:
    """The commit checked out here, with + after it where files have changed since; empty outside a repository."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, ValueError, subprocess.CalledProcessError):
        return ""


def _git(*arguments: str, folder: Path = Path(), variables: Mapping[str, str] | None = None) -> str:
    environment = {**os.environ, **(variables or {})}
    try:
        return subprocess.run(  # noqa: S603 - no shell; a revision stands behind --end-of-options
            ["git", *arguments],  # noqa: S607 - the user's own git
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except FileNotFoundError:
        raise ValueError("there is no git on this machine: install it, or give two folders or files") from None
