"""A state of the user's code, from git, in a folder of its own; the repository itself is only read.

No worktree is registered: files come through an index of their own, so that a kill leaves nothing in `.git`.
Source: https://git-scm.com/docs/git-checkout-index, "Using git checkout-index to export an entire tree".
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

NO_REPOSITORY = "not a git repository (or any"
"""What git says where there is none in a folder and none above it."""
ENGLISH = {"LC_ALL": "C"}
"""The words that are looked for must not be translated."""


def top(folder: Path = Path()) -> Path:
    """The uppermost folder of the repository that `folder` lies in.

    Raises:
        ValueError: it lies in none, git refuses it, or there is no git.
    """
    try:
        return Path(_git("rev-parse", "--show-toplevel", folder=folder, variables=ENGLISH).rstrip("\n"))
    except subprocess.CalledProcessError as error:
        where, said = folder.resolve(), " ".join(error.stderr.split())
        if NO_REPOSITORY in said:
            raise ValueError(f"{where} lies in no git repository: go to one, or give two folders or files") from None
        raise ValueError(f"git cannot read the repository at {where}: {said}") from None


def resolve(revision: str) -> str:
    """The commit that a branch, tag, digest or any other name of a revision stands for.

    Raises:
        ValueError: there is no such revision here, or no repository.
    """
    top()
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except subprocess.CalledProcessError:
        raise ValueError(
            f"there is no revision {revision} in this repository: see git branch --all; in a shallow clone fetch it "
            "first (actions/checkout: fetch-depth: 0)"
        ) from None


def check_out(commit: str, target: Path) -> None:
    """Write every file of a commit below `target`, which is there whole or not at all. Submodules stay empty.

    Raises:
        ValueError: the commit is gone, or the folder cannot be written.
    """
    index, draft = (target.with_suffix(suffix).resolve() for suffix in (".index", ".draft"))
    shutil.rmtree(draft, ignore_errors=True)
    try:
        draft.mkdir(parents=True)
        upper, own = top(), {"GIT_INDEX_FILE": str(index)}
        _git("read-tree", commit, folder=upper, variables=own)
        _git("checkout-index", "--all", "--quiet", f"--prefix={draft}/", folder=upper, variables=own)
        draft.rename(target)
    except subprocess.CalledProcessError as error:
        raise ValueError(f"{commit[:12]} cannot be checked out: {error.stderr.strip()}") from None
    except OSError as error:
        raise ValueError(f"cannot write to {target}: {error.strerror}; choose another folder with --results") from None
    finally:
        index.unlink(missing_ok=True)


def build(command: str, folder: Path, what: str) -> None:
    """Run a command where a state of the code lies, without a shell; what it says goes to standard error.

    Raises:
        ValueError: it cannot be run, or fails.
    """
    try:
        words = shlex.split(command)
        code = subprocess.run(words, cwd=folder, stdin=subprocess.DEVNULL, stdout=2, check=False).returncode  # noqa: S603
    except (OSError, ValueError) as error:
        raise ValueError(f"{what} cannot be built by {command}: {error}") from None
    if code:
        raise ValueError(f"{what} cannot be built: {command} ended with exit code {code}; what it said stands above")


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
