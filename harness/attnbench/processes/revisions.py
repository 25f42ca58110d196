"""Compare two states of the code in one run: revisions, folders, files or environments (docs/adr/0020).

Each implementation takes part twice, once from the files of the base and once from the files of the candidate; this
harness checks and times both versions. The files of a revision are exported to a folder of their own, through a
separate index and without a registered worktree. So the repository is only read, and a killed process leaves nothing in
`.git`. Source: https://git-scm.com/docs/git-checkout-index, "Using git checkout-index to export an entire tree".
"""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from attnbench import plugins
from attnbench.processes.one_off_tasks import declared
from attnbench.processes.planning import apply_axes, build_plan, built_in_axes, merge_built_in_axes
from attnbench.processes.worker_client import PACKAGE
from attnbench.storage.events import Plan, Side, Sides
from attnbench.workloads.sweep import parse_settings

REVISION = "rev:"
WORKTREE = "WORKTREE"
FORMS = "rev:REVISION, rev:WORKTREE, env:FOLDER, a folder, the path of a python, or FILE.py:NAME"
ENVIRONMENT = "env:"  # marks the folder of a virtual environment
SIDES_FOLDER = "sides"  # subfolder of a run in progress with the checked-out files
SHARED = ("torch.library", "cpp_extension", "importlib", "__import__")
"""A file that contains one of these texts is not self-contained: it may register objects for the whole process, or
import modules that cannot be predicted."""
LATE = ("filelock", "fsspec", "jinja2", "networkx", "triton")
"""Modules that torch imports only when it needs them. A folder that contains a file with one of these names is not
searched for modules, because the file would hide the module that torch needs."""
ENGLISH = {"LC_ALL": "C"}  # environment in which git's messages are not translated


def plan(
    base_text: str, candidate_text: str, fields: Mapping[str, Any], folder: Path, *, is_apart: bool = False
) -> Plan:
    """Build the plan of a run in `folder` that compares two states of the code (sides), each in a form of FORMS.

    Both sides are checked out below `folder`; after an error, their files are removed. `fields` are parameters of
    build_plan. If `is_apart` is set, each side has its own processes.

    Raises:
        ValueError: a value is not allowed; the message lists the allowed ones.
    """
    try:
        return _plan((base_text, candidate_text), fields, folder, is_apart=is_apart)
    except BaseException:
        remove_checkouts(folder)
        raise


def _plan(texts: tuple[str, str], fields: Mapping[str, Any], folder: Path, *, is_apart: bool) -> Plan:
    named = fields.get("implementations", ())
    are_files = [plugins.split(text)[0] is not None for text in texts]
    if any(are_files) and named:
        raise ValueError("--implementation is not allowed with FILE.py:NAME, which names the implementation: omit it")
    if any(are_files) and not all(are_files):
        raise ValueError(f"{texts[are_files.index(False)]} cannot be compared with a file: give FILE.py:NAME for both")
    if not any(are_files) and not named:
        raise ValueError("no implementation is named: give --implementation FILE.py:NAME")
    base, candidate = (_side(text, _checkout(folder, place)) for place, text in enumerate(texts))
    lost, new = dict[str, str](), dict[str, str]()  # why the candidate, or the base, lacks an implementation, by name
    if all(are_files):  # on both sides, the implementation has the name that it has in the candidate's file
        plugins.check_specs([f"base={texts[0]}", f"candidate={texts[1]}"])
        on_base, on_candidate = ({plugins.name_of(texts[1]): text} for text in texts)
    else:
        check_out(Sides(base=base, candidate=candidate))
        on_base, on_candidate = _on_side(named, base, new), _on_side(named, candidate, lost)
    if gone := [why for name, why in lost.items() if name in new]:
        raise ValueError(f"missing on both sides: {gone[0]}")
    specs = [*on_base.values(), *on_candidate.values()]
    files = [file for spec in specs if (file := plugins.split(spec)[0]) is not None]
    compared = Sides(
        base=msgspec.structs.replace(base, implementations=on_base),
        candidate=msgspec.structs.replace(candidate, implementations=on_candidate),
        # One process has one interpreter, and cannot import two files of the same name.
        is_apart=is_apart or base.python != candidate.python or not all(map(is_self_contained, files)),
        lost=lost,
        new=new,
    )
    shared = build_plan(**{**fields, "implementations": ()}, with_baseline=False)
    readable = [] if base.python or candidate.python else specs  # this interpreter may lack their packages
    axes = merge_built_in_axes(built_in_axes(declared(readable), parse_settings(fields.get("settings", ()))))
    digests = {spec: plugins.digest(spec) for spec in specs}
    changed = {"implementations": (), "baseline": "", "alone": (), "workloads": apply_axes(shared.workloads, axes)}
    return msgspec.structs.replace(shared, **changed, digests=digests, sides=compared)


def _checkout(folder: Path, place: int) -> Path:
    return folder / SIDES_FOLDER / ("base", "candidate")[place]


def _side(text: str, target: Path) -> Side:
    """Interpret the text that names one of the two compared states; a revision's files will be placed at `target`."""
    if plugins.split(text)[0] is not None:
        return Side(given=text)
    if text == REVISION + WORKTREE:
        return Side(given=text, root=os.path.relpath(repository_root()))
    if text.startswith(REVISION):
        return Side(given=text, root=str(target), commit=resolve(text.removeprefix(REVISION)))
    path = Path(text)
    if text.startswith(ENVIRONMENT):
        path = Path(text.removeprefix(ENVIRONMENT), "bin", "python")
    if path.is_dir():
        return Side(given=text, root=text)
    if path.is_file() and path.name.startswith("python"):
        return Side(given=text, python=str(path.absolute()))
    raise ValueError(f"{text} is not a side of a comparison: give {FORMS}")


def are_as_given(sides: Sides, texts: Sequence[str], folder: Path) -> bool:
    """Return whether `texts`, for base and candidate, name the same code as `sides`, those of the run in `folder`.

    They do if root folder, commit and interpreter of each side are the same.

    Raises:
        ValueError: a text describes no side.
    """

    def parts(side: Side) -> tuple[Path | str, str, str]:
        return side.root and Path(side.root).resolve(), side.commit, side.python

    typed = [parts(_side(text, _checkout(folder, place))) for place, text in enumerate(texts)]
    return typed == [parts(sides.base), parts(sides.candidate)]


def _on_side(named: Sequence[str], side: Side, missing: dict[str, str]) -> dict[str, str]:
    """Return the spec of each named implementation in one compared state of the code (`side`), by name.

    The reasons for missing ones are put into `missing`. Paths in `named` are relative to the side's folder; for a
    revision or an interpreter, to the current folder.
    """
    specs: dict[str, str] = {}
    for spec in dict.fromkeys(named):
        name = plugins.name_of(spec)
        if name in specs or name in missing:
            raise ValueError(f"{spec} would share the name {name} with another: label it, as in OTHER={spec}")
        path, attribute = plugins.split(spec)
        if side.root:
            if path is None:
                path, attribute = Path(plugins.IMPLEMENTATIONS) / f"{attribute}.py", ""
            path = Path(side.root) / _inside(path, side)
            attribute = attribute or plugins.plug_in(path)
        here = attribute if path is None else f"{path}:{attribute}"
        try:
            plugins.check_specs([f"x={here}"])
            specs[name] = here
        except ValueError as error:
            missing[name] = str(error).replace(f"{side.root}/", "") if side.root else str(error)
    return specs


def _inside(path: Path, side: Side) -> Path:
    """Convert a path that the user typed to one relative to the side's root folder.

    Raises:
        ValueError: the path lies outside of the root.
    """
    is_revision = side.given.startswith(REVISION)
    if not is_revision and not path.is_absolute():
        return path
    top = repository_root() if is_revision else Path(side.root).resolve()
    try:
        return path.resolve().relative_to(top.resolve())
    except ValueError:
        raise ValueError(f"{path} lies outside of {side.given}: give a file inside {top}") from None


def check_out(sides: Sides) -> None:
    """Export the files of each compared state of the code that is a revision, unless its folder exists.

    Raises:
        ValueError: the export fails.
    """
    for side in (sides.base, sides.candidate):
        if side.commit and not Path(side.root).exists():
            export(side.commit, Path(side.root))


def remove_checkouts(folder: Path) -> None:
    """Remove the checked-out files below a run's folder, and then the folder itself if it is empty."""
    shutil.rmtree(folder / SIDES_FOLDER, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def checked_out(planned: Plan, folder: Path) -> Iterator[None]:
    """Provide the files of both compared states of the code inside the context, and remove them at its end.

    A killed process leaves them.

    Raises:
        ValueError: a side cannot be checked out.
    """
    assert planned.sides is not None
    try:
        check_out(planned.sides)
        yield
    finally:
        remove_checkouts(folder)


def is_self_contained(path: Path) -> bool:
    """Return whether a file imports only standard modules, torch, numpy and this package, and changes none of them.

    Two versions of such a file can be loaded into one process without affecting each other.

    Raises:
        SyntaxError: the file is not valid Python.
    """
    text = path.read_text(encoding="utf-8")
    names: set[str] = set()  # top-level modules that the file imports; "" for a relative import
    known, written = set[str](), set[str]()  # names that imports bind, and names whose attributes are assigned
    for node in ast.walk(ast.parse(text, filename=str(path))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
            known |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("" if node.level else (node.module or "").split(".")[0])
            known |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            written.add(ast.unparse(node).split(".")[0])
    is_local = names <= sys.stdlib_module_names | {PACKAGE, "torch", "numpy"}
    return is_local and known.isdisjoint(written) and not any(word in text for word in SHARED)


def side_folders(side: Side) -> list[Path]:
    """Return the module folders of one compared state of the code (`side`), searched before installed packages.

    These are the folders on the path from the side's root to the file of each implementation, and their subfolders
    `src`. The outermost comes first, so that a file next to an implementation, such as `bench/foo.py`, does not hide a
    package `foo` above it. Folders that are packages are left out, because their modules are imported by the package's
    name.
    """
    files = [file for spec in side.implementations.values() if (file := plugins.split(spec)[0]) is not None]
    if not side.root or not files:
        return []
    top = Path(side.root).resolve()
    inside = {folder for file in files for folder in file.resolve().parents if folder.is_relative_to(top)}
    places = [place for folder in {top} | inside for place in (folder, folder / "src") if place.is_dir()]

    def is_searched(place: Path) -> bool:
        is_package = (place / "__init__.py").exists() and place not in {top, top / "src"}
        return not is_package and not any((place / f"{name}.py").exists() for name in LATE)

    return [place for place in sorted(places, key=lambda place: (len(place.parts), place)) if is_searched(place)]


def repository_root() -> Path:
    """Return the root of the repository that contains the current folder.

    Raises:
        ValueError: the folder is in no repository, git refuses to read it, or git is not installed.
    """
    return Path(_git("rev-parse", "--show-toplevel").rstrip("\n"))


def resolve(revision: str) -> str:
    """Return the full hash of the commit that `revision` names: a branch, a tag, a hash or any other name in git.

    Raises:
        ValueError: there is no such revision, or no repository.
    """
    repository_root()
    try:
        return _git("rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}").strip()
    except ValueError:
        raise ValueError(
            f"there is no revision {revision} in this repository: see git branch --all; in a shallow clone fetch it "
            "first (actions/checkout: fetch-depth: 0)"
        ) from None


def export(commit: str, target: Path) -> None:
    """Write all files of a commit to `target` atomically. Submodules stay empty.

    Raises:
        ValueError: the commit is gone, or the folder cannot be written.
    """
    draft = target.with_suffix(".draft").resolve()
    files = draft / "files"
    shutil.rmtree(draft, ignore_errors=True)  # left by a killed process, perhaps with git's lock file
    try:
        files.mkdir(parents=True)
        root, index = repository_root(), str(draft / "index")
        _git("read-tree", commit, folder=root, index=index)
        _git("checkout-index", "--all", "--quiet", f"--prefix={files}/", folder=root, index=index)
        files.rename(target)
    except OSError as error:
        raise ValueError(f"cannot write to {target}: {error.strerror}; choose another folder with --results") from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def current_commit() -> str:
    """Return the current commit, followed by + if tracked files have changed since; "" outside of a repository."""
    try:
        head = _git("rev-parse", "HEAD").strip()
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no").strip() else "")
    except (OSError, ValueError):
        return ""


def _git(*arguments: str, folder: Path = Path(), index: str = "") -> str:
    environment = {**os.environ, **ENGLISH, **({"GIT_INDEX_FILE": index} if index else {})}
    try:
        return subprocess.run(  # noqa: S603 - no shell; revisions follow --end-of-options
            ["git", *arguments],  # noqa: S607 - the user's own git
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except FileNotFoundError:
        raise ValueError("there is no git on this machine: install it, or give two folders or files") from None
    except subprocess.CalledProcessError as error:
        said = " ".join(error.stderr.split())
        raise ValueError(f"git cannot read {folder.resolve()}: {said}; give two folders or files") from None
