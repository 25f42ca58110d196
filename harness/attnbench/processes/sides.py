"""Two states of the code as one run: a revision, folder, file or environment against another (docs/adr/0020).

Each implementation takes part twice, from the base's files and from the candidate's; the harness that checks and times
both is this one.
"""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from attnbench import plugins
from attnbench.processes import checkout, planning
from attnbench.processes.isolation import SIDES_FOLDER, is_self_contained
from attnbench.processes.planning import Selection
from attnbench.statistics.effects import FEWEST_EPOCHS
from attnbench.storage.events import Plan, Side, Sides

REVISION = "rev:"
WORKTREE = "WORKTREE"
IMPLEMENTATION = "IMPLEMENTATION"
OWNER = "pid"
FORMS = "rev:REVISION, rev:WORKTREE, a folder, the path of a python, or FILE.py:NAME"


@dataclass(frozen=True, kw_only=True)
class SidesSelection:
    """What was typed: the two sides, and the rest of the selection."""

    base: str
    candidate: str
    selection: Selection
    is_apart: bool = False
    build: str = ""


class OneSided(NamedTuple):
    """An implementation on one side: its spec, and why it is missing there, or ""."""

    spec: str
    missing: str


Pair = tuple[OneSided, OneSided]
"""An implementation on the base's side and on the candidate's."""


def plan(asked: SidesSelection, folder: Path) -> tuple[Plan | None, list[str]]:
    """The plan of a run in `folder`, with the sides checked out below it, and the names that need no comparison.

    No plan where every implementation is the same on both sides.

    Raises:
        ValueError: whatever was given that is not possible; the message says what is allowed. Nothing is left behind.
    """
    try:
        claim(folder)
        return _plan(asked, folder)
    except BaseException:
        remove_checkouts(folder)
        raise


def _plan(asked: SidesSelection, folder: Path) -> tuple[Plan | None, list[str]]:
    given, selection = (asked.base, asked.candidate), asked.selection
    if asked.build and not any(text.startswith(REVISION) and text != REVISION + WORKTREE for text in given):
        raise ValueError("--build is for revisions: what else a side can be is measured as it lies there")
    same: list[str] = []
    if any(plugins.split(text)[0] is not None for text in given):  # two files, under the name of the second
        if selection.implementations:
            raise ValueError("--implementation is not allowed with FILE.py:NAME, which says what is compared")
        for text in given:
            if plugins.split(text)[0] is None:
                raise ValueError(f"{text} cannot be compared with a file: give FILE.py:NAME for both")
        plugins.check_specs([f"base={asked.base}", f"candidate={asked.candidate}"])
        base, candidate = (Side(given=text) for text in given)
        kept: dict[str, Pair] = {
            plugins.name_of(asked.candidate): (OneSided(asked.base, ""), OneSided(asked.candidate, ""))
        }
    else:
        below = folder / SIDES_FOLDER
        base, candidate = _side(asked.base, below / "base"), _side(asked.candidate, below / "candidate")
        check_out(Sides(base=base, candidate=candidate, build=asked.build))
        pairs = _pairs(selection.implementations, base, candidate)
        if not selection.implementations and not asked.build:  # what was built may come in by ways no text shows
            same = [name for name, pair in pairs.items() if _are_same(pair, base, candidate)]
        pairs = {name: pair for name, pair in pairs.items() if name not in same}
        kept = {name: pair for name, pair in pairs.items() if not all(each.missing for each in pair)}
        if gone := [pair[1].missing for name, pair in pairs.items() if name not in kept]:
            raise ValueError(f"on neither side: {gone[0]}")
    if not kept:
        return None, same
    own = [{name: pair[place].spec for name, pair in kept.items() if not pair[place].missing} for place in (0, 1)]
    compared = Sides(
        base=msgspec.structs.replace(base, implementations=own[0]),
        candidate=msgspec.structs.replace(candidate, implementations=own[1]),
        # One process cannot hold two interpreters, nor files that import others of their side.
        is_apart=asked.is_apart
        or bool(asked.build)
        or base.python != candidate.python
        or not all(_is_self_contained(spec, base, candidate) for specs in own for spec in specs.values()),
        build=asked.build,
        lost={name: pair[1].missing for name, pair in kept.items() if pair[1].missing},
        new={name: pair[0].missing for name, pair in kept.items() if pair[0].missing},
    )
    allocator = selection.allocator or ("retain" if compared.is_apart else "system")
    usual = planning.plan(replace(selection, implementations=(), allocator=allocator), with_baseline=False)
    planned = msgspec.structs.replace(
        usual,
        implementations=(),
        baseline="",
        digests={spec: plugins.digest(spec) for specs in own for spec in specs.values()},
        sides=compared,
        num_epochs=max(usual.num_epochs, FEWEST_EPOCHS),  # with fewer there is no verdict on the whole
    )
    return planned, same


def _side(text: str, target: Path) -> Side:
    """The side that a text stands for; a revision's files are to lie at `target`."""
    if text == REVISION + WORKTREE:
        return Side(given=text, root=os.path.relpath(checkout.repository_root()))
    if text.startswith(REVISION):
        return Side(given=text, root=str(target), commit=checkout.resolve(text.removeprefix(REVISION)))
    path = Path(text)
    if path.is_dir():
        return Side(given=text, root=text)
    if path.is_file() and path.name.startswith("python"):
        return Side(given=text, python=str(path.absolute()))
    raise ValueError(f"{text} is not a side of a comparison: give {FORMS}")


def _pairs(given: Sequence[str], *sides: Side) -> dict[str, Pair]:
    """By name, each implementation on both sides: those given, or else every file of implementations/ on either."""
    roots = [Path(side.root) for side in sides if side.root]
    specs = list(dict.fromkeys(given))
    if not specs and not roots:  # two environments: what is installed here
        specs = plugins.implementation_names()
    elif not specs:
        files = [file for root in roots for file in sorted((root / plugins.IMPLEMENTATIONS).glob("[a-z]*.py"))]
        specs = list(dict.fromkeys(file.stem for file in files))
        if not specs:
            raise ValueError(
                "neither side has implementations/*.py: say what is compared with --implementation FILE.py:NAME"
            )
    pairs: dict[str, Pair] = {}
    for spec in specs:
        name = plugins.name_of(spec)
        if name in pairs:
            raise ValueError(f"{spec} would share the name {name} with another: label it, as in OTHER={spec}")
        base, candidate = (_on_side(spec, side) for side in sides)
        pairs[name] = (base, candidate)
    return pairs


def _on_side(spec: str, side: Side) -> OneSided:
    """A path that was typed lies below the side's root; in a repository, it was typed from the current folder in it."""
    path, attribute = plugins.split(spec)
    if side.root:
        if path is None:
            path, attribute = Path(plugins.IMPLEMENTATIONS) / f"{attribute}.py", IMPLEMENTATION
        is_revision = side.given.startswith(REVISION)
        if is_revision or path.is_absolute():
            top = checkout.repository_root() if is_revision else Path(side.root).resolve()
            try:
                path = path.resolve().relative_to(top.resolve())
            except ValueError:
                raise ValueError(f"{path} lies outside of {side.given}: give a file inside {top}") from None
        path = Path(side.root) / path
    here = attribute if path is None else f"{path}:{attribute}"
    try:
        plugins.check_specs([f"x={here}"])
    except ValueError as error:
        return OneSided(here, str(error).replace(f"{side.root}/", "") if side.root else str(error))
    return OneSided(here, "")


def _is_self_contained(spec: str, *sides: Side) -> bool:
    path, _ = plugins.split(spec)
    return path is None or is_self_contained(path, [Path(side.root) for side in sides if side.root])


def _are_same(pair: Pair, *sides: Side) -> bool:
    """Whether both run the very same code: the same bytes, which import no file of their side."""
    files = [plugins.split(each.spec)[0] for each in pair if not each.missing and _is_self_contained(each.spec, *sides)]
    contents = [file.read_bytes() for file in files if file is not None]
    return len(contents) == len(pair) and len(set(contents)) == 1


def check_out(sides: Sides) -> None:
    """Check out each side that is a revision and is not there yet, and build it.

    Raises:
        ValueError: that fails.
    """
    for side in (sides.base, sides.candidate):
        if side.commit and not Path(side.root).exists():
            checkout.check_out(side.commit, Path(side.root))
            if sides.build:
                checkout.build(sides.build, Path(side.root), side.given)


def claim(folder: Path) -> None:
    """Note which process owns the files below a run's folder; those of one that was killed may not be whole."""
    _remove_if_abandoned(folder / SIDES_FOLDER / OWNER)
    (folder / SIDES_FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / SIDES_FOLDER / OWNER).write_text(str(os.getpid()), encoding="utf-8")


def remove_abandoned(results: Path) -> None:
    """Remove what comparisons that were killed left below `results`: a run that is resumed checks out again."""
    for owner in (results / "runs").glob(f"*/{SIDES_FOLDER}/{OWNER}"):
        _remove_if_abandoned(owner)


def _remove_if_abandoned(owner: Path) -> None:
    with contextlib.suppress(ValueError, OSError):  # gone meanwhile, or not ours
        if not psutil.pid_exists(int(owner.read_text(encoding="utf-8"))):
            shutil.rmtree(owner.parent)


def remove_checkouts(folder: Path) -> None:
    """Remove what was checked out below a run's folder, and the folder where it holds nothing else."""
    shutil.rmtree(folder / SIDES_FOLDER, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def checked_out(planned: Plan, folder: Path) -> Iterator[None]:
    """Both sides' files are there within, and removed afterwards; after a kill the next attempt removes them.

    Raises:
        ValueError: a side cannot be checked out.
    """
    assert planned.sides is not None
    claim(folder)
    try:
        check_out(planned.sides)
        yield
    finally:
        remove_checkouts(folder)
