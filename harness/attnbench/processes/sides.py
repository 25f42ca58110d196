"""Two states of the code as one run: a revision, folder, file or environment against another (docs/adr/0020).

Each implementation takes part twice, from the base's files and from the candidate's; the harness that checks and times
both is this one.
"""

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

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


@dataclass(frozen=True, kw_only=True)
class OneSided:
    """An implementation on one side: its spec, or why it is missing there."""

    spec: str
    missing: str = ""

    @property
    def path(self) -> Path | None:
        """Its file; None for an installed one."""
        return plugins.split(self.spec)[0]


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
    texts = {"base": asked.base, "candidate": asked.candidate}
    if asked.build and not any(map(_is_built, texts.values())):
        raise ValueError("--build is for revisions: what else a side can be is measured as it lies there")
    same: list[str] = []
    if any(plugins.split(text)[0] is not None for text in texts.values()):
        sides, pairs = _files(asked)
    else:
        sides = {name: _side(text, folder / SIDES_FOLDER / name) for name, text in texts.items()}
        check_out(Sides(base=sides["base"], candidate=sides["candidate"], build=asked.build))
        pairs, same = _implementations(asked.selection.implementations, sides, is_built=bool(asked.build))
    kept = {name: pair for name, pair in pairs.items() if not all(each.missing for each in pair)}
    if gone := [pair[1].missing for name, pair in pairs.items() if name not in kept]:
        raise ValueError(f"on neither side: {gone[0]}")
    if not kept:
        return None, same
    own = [{name: pair[place].spec for name, pair in kept.items() if not pair[place].missing} for place in (0, 1)]
    compared = Sides(
        base=msgspec.structs.replace(sides["base"], implementations=own[0]),
        candidate=msgspec.structs.replace(sides["candidate"], implementations=own[1]),
        is_apart=asked.is_apart or bool(asked.build) or _must_be_apart(sides, kept),
        build=asked.build,
        lost={name: pair[1].missing for name, pair in kept.items() if pair[1].missing},
        new={name: pair[0].missing for name, pair in kept.items() if pair[0].missing},
    )
    return _plan_of(asked.selection, compared), same


def _is_built(text: str) -> bool:
    return text.startswith(REVISION) and text != REVISION + WORKTREE


def _plan_of(selection: Selection, compared: Sides) -> Plan:
    """The usual plan, with two sides in place of implementations and a baseline."""
    allocator = selection.allocator or ("retain" if compared.is_apart else "system")
    specs = [*compared.base.implementations.values(), *compared.candidate.implementations.values()]
    usual = planning.plan(replace(selection, implementations=(), allocator=allocator), with_baseline=False)
    return msgspec.structs.replace(
        usual,
        implementations=(),
        baseline="",
        digests={spec: plugins.digest(spec) for spec in specs},
        sides=compared,
        num_epochs=max(usual.num_epochs, FEWEST_EPOCHS),  # with fewer there is no verdict on the whole
    )


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


def _files(asked: SidesSelection) -> tuple[dict[str, Side], dict[str, Pair]]:
    """Two files as two sides, under the name of the second."""
    if asked.selection.implementations:
        raise ValueError("--implementation is not allowed with FILE.py:NAME, which says what is compared")
    for text in (asked.base, asked.candidate):
        if plugins.split(text)[0] is None:
            raise ValueError(f"{text} cannot be compared with a file: give FILE.py:NAME for both")
    plugins.check_specs([f"base={asked.base}", f"candidate={asked.candidate}"])
    sides = {"base": Side(given=asked.base), "candidate": Side(given=asked.candidate)}
    return sides, {plugins.name_of(asked.candidate): (OneSided(spec=asked.base), OneSided(spec=asked.candidate))}


def _implementations(
    given: Sequence[str], sides: Mapping[str, Side], *, is_built: bool
) -> tuple[dict[str, Pair], list[str]]:
    """By name, each implementation on both sides; and the names of those left out because they are the same.

    Where something was built none counts as the same: it may come in by ways that a text does not show.
    """
    specs = list(dict.fromkeys(given)) or _in_folders(sides)
    pairs: dict[str, Pair] = {}
    for spec in specs:
        name = plugins.name_of(spec)
        if name in pairs:
            raise ValueError(f"{spec} would share the name {name} with another: label it, as in OTHER={spec}")
        pairs[name] = (_on_side(spec, sides["base"]), _on_side(spec, sides["candidate"]))
    same = [] if given or is_built else [name for name, pair in pairs.items() if _are_same(pair, sides)]
    return {name: pair for name, pair in pairs.items() if name not in same}, same


def _in_folders(sides: Mapping[str, Side]) -> list[str]:
    """Every file of implementations/ on either side; what is installed here, for environments."""
    if not any(side.root for side in sides.values()):
        return plugins.implementation_names()
    folders = [Path(side.root) / plugins.IMPLEMENTATIONS for side in sides.values() if side.root]
    stems = dict.fromkeys(file.stem for folder in folders for file in sorted(folder.glob("[a-z]*.py")))
    if not stems:
        raise ValueError(
            "neither side has implementations/*.py: say what is compared with --implementation FILE.py:NAME"
        )
    return list(stems)


def _on_side(spec: str, side: Side) -> OneSided:
    path, attribute = plugins.split(spec)
    if side.root and path is None:
        path, attribute = Path(plugins.IMPLEMENTATIONS) / f"{attribute}.py", IMPLEMENTATION
    if path is not None and side.root:
        path = Path(side.root) / _inside(path, side)
    here = attribute if path is None else f"{path}:{attribute}"
    try:
        plugins.check_specs([f"x={here}"])
    except ValueError as error:
        return OneSided(spec=here, missing=str(error).replace(f"{side.root}/", "") if side.root else str(error))
    return OneSided(spec=here)


def _inside(path: Path, side: Side) -> Path:
    """Where a path that was typed lies below the side's root; in a repository, typed from the current folder in it.

    Raises:
        ValueError: it lies outside.
    """
    if not side.given.startswith(REVISION) and not path.is_absolute():
        return path
    root = checkout.repository_root() if side.given.startswith(REVISION) else Path(side.root).resolve()
    try:
        return path.resolve().relative_to(root.resolve())
    except ValueError:
        raise ValueError(f"{path} lies outside of {side.given}: give a file inside {root}") from None


def _must_be_apart(sides: Mapping[str, Side], kept: Mapping[str, Pair]) -> bool:
    """Whether one process cannot hold both: another interpreter, or files that import others of their side."""
    if sides["base"].python != sides["candidate"].python:
        return True
    return not all(_is_self_contained(each, sides) for pair in kept.values() for each in pair if not each.missing)


def _is_self_contained(one: OneSided, sides: Mapping[str, Side]) -> bool:
    roots = [Path(side.root) for side in sides.values() if side.root]
    return one.path is None or is_self_contained(one.path, roots)


def _are_same(pair: Pair, sides: Mapping[str, Side]) -> bool:
    """Whether both run the very same code: the same bytes, which import no file of their side."""
    if any(each.missing or each.path is None or not _is_self_contained(each, sides) for each in pair):
        return False
    return len({hashlib.sha256(each.path.read_bytes()).digest() for each in pair if each.path is not None}) == 1


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
