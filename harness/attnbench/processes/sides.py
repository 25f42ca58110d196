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
from attnbench.processes.isolation import is_alone
from attnbench.processes.paired_client import FOLDER
from attnbench.processes.planning import Selection
from attnbench.statistics.effects import FEWEST_EPOCHS
from attnbench.storage.events import Plan, Side, Sides

REVISION = "rev:"
WORKTREE = "WORKTREE"
IMPLEMENTATION = "IMPLEMENTATION"
OWNER = "pid"
FORMS = "rev:REVISION, rev:WORKTREE, a folder, the path of a python, or FILE.py:NAME"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What was typed: the sides, and the rest of the selection."""

    base: str
    candidate: str
    selection: Selection
    is_apart: bool = False
    build: str = ""


@dataclass(frozen=True, kw_only=True)
class Found:
    """One implementation on one side: its spec, or why it is not there."""

    spec: str
    missing: str = ""

    @property
    def path(self) -> Path | None:
        """Its file; None for an installed one."""
        return plugins.split(self.spec)[0]


def plan(asked: Asked, folder: Path) -> tuple[Plan | None, list[str]]:
    """The plan of a run in `folder`, with the sides checked out below it, and the names that need no comparison.

    No plan where every implementation is the same on both sides.

    Raises:
        ValueError: whatever was given that cannot be; the message says what is allowed. Nothing is left behind.
    """
    try:
        claim(folder)
        return _plan(asked, folder)
    except BaseException:
        clear(folder)
        raise


def _plan(asked: Asked, folder: Path) -> tuple[Plan | None, list[str]]:
    texts = {"base": asked.base, "candidate": asked.candidate}
    files = {name: text for name, text in texts.items() if plugins.split(text)[0] is not None}
    if asked.build and not any(map(_is_built, texts.values())):
        raise ValueError("--build is for revisions: what else a side can be is measured as it lies there")
    if files:
        sides, found = _files(asked), _specs_of_files(asked)
        same: list[str] = []
    else:
        sides = {name: _side(text, folder / FOLDER / name) for name, text in texts.items()}
        put_in_place(Sides(base=sides["base"], candidate=sides["candidate"], build=asked.build))
        found, same = _implementations(asked.selection.implementations, sides, is_built=bool(asked.build))
    kept = {name: pair for name, pair in found.items() if not all(each.missing for each in pair)}
    if gone := [pair[1].missing for name, pair in found.items() if name not in kept]:
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


def _plan_of(given: Selection, compared: Sides) -> Plan:
    """The usual plan, with two sides in place of implementations and a baseline."""
    allocator = given.allocator or ("retain" if compared.is_apart else "system")
    specs = [*compared.base.implementations.values(), *compared.candidate.implementations.values()]
    made = planning.plan(replace(given, implementations=(), allocator=allocator), with_baseline=False)
    return msgspec.structs.replace(
        made,
        implementations=(),
        baseline="",
        digests={spec: plugins.digest(spec) for spec in specs},
        sides=compared,
        num_epochs=max(made.num_epochs, FEWEST_EPOCHS),  # nothing is said of the whole with fewer
    )


def _side(text: str, target: Path) -> Side:
    """What a text stands for; a revision's files shall lie at `target`."""
    if text == REVISION + WORKTREE:
        return Side(given=text, root=os.path.relpath(checkout.top()))
    if text.startswith(REVISION):
        return Side(given=text, root=str(target), commit=checkout.resolve(text.removeprefix(REVISION)))
    path = Path(text)
    if path.is_dir():
        return Side(given=text, root=text)
    if path.is_file() and path.name.startswith("python"):
        return Side(given=text, python=str(path.absolute()))
    raise ValueError(f"{text} is not a side of a comparison: give {FORMS}")


def _files(asked: Asked) -> dict[str, Side]:
    if asked.selection.implementations:
        raise ValueError("--implementation is not allowed beside FILE.py:NAME, which says what is compared")
    for text in (asked.base, asked.candidate):
        if plugins.split(text)[0] is None:
            raise ValueError(f"{text} cannot be compared with a file: give FILE.py:NAME for both")
    return {"base": Side(given=asked.base), "candidate": Side(given=asked.candidate)}


def _specs_of_files(asked: Asked) -> dict[str, tuple[Found, Found]]:
    plugins.check_specs([f"base={asked.base}", f"candidate={asked.candidate}"])
    return {plugins.name_of(asked.candidate): (Found(spec=asked.base), Found(spec=asked.candidate))}


def _implementations(
    given: Sequence[str], sides: Mapping[str, Side], *, is_built: bool
) -> tuple[dict[str, tuple[Found, Found]], list[str]]:
    """By name: the implementation on the base's side and on the candidate's; and who was left out, being the same.

    Where something was built nobody is the same: it may come in by ways that a text does not show.
    """
    specs = list(dict.fromkeys(given)) or _in_folders(sides)
    found: dict[str, tuple[Found, Found]] = {}
    for spec in specs:
        name = plugins.name_of(spec)
        if name in found:
            raise ValueError(f"{spec} would share the name {name} with another: label it, as in OTHER={spec}")
        found[name] = (_find(spec, sides["base"]), _find(spec, sides["candidate"]))
    same = [] if given or is_built else [name for name, pair in found.items() if _are_same(pair, sides)]
    return {name: pair for name, pair in found.items() if name not in same}, same


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


def _find(spec: str, side: Side) -> Found:
    path, attribute = plugins.split(spec)
    if side.root and path is None:
        path, attribute = Path(plugins.IMPLEMENTATIONS) / f"{attribute}.py", IMPLEMENTATION
    if path is not None and side.root:
        path = Path(side.root) / _inside(path, side)
    here = attribute if path is None else f"{path}:{attribute}"
    try:
        plugins.check_specs([f"x={here}"])
    except ValueError as error:
        return Found(spec=here, missing=str(error).replace(f"{side.root}/", "") if side.root else str(error))
    return Found(spec=here)


def _inside(path: Path, side: Side) -> Path:
    """Where a path that was typed lies below the side's root; for a repository, typed from where one stands in it.

    Raises:
        ValueError: it lies outside.
    """
    if not side.given.startswith(REVISION) and not path.is_absolute():
        return path
    upper = checkout.top() if side.given.startswith(REVISION) else Path(side.root).resolve()
    try:
        return path.resolve().relative_to(upper.resolve())
    except ValueError:
        raise ValueError(f"{path} lies outside of {side.given}: give a file inside {upper}") from None


def _must_be_apart(sides: Mapping[str, Side], kept: Mapping[str, tuple[Found, Found]]) -> bool:
    """Whether one process cannot hold both: another interpreter, or files that are not all that they need."""
    if sides["base"].python != sides["candidate"].python:
        return True
    return not all(_is_alone(each, sides) for pair in kept.values() for each in pair if not each.missing)


def _is_alone(found: Found, sides: Mapping[str, Side]) -> bool:
    roots = [Path(side.root) for side in sides.values() if side.root]
    return found.path is None or is_alone(found.path, roots)


def _are_same(pair: tuple[Found, Found], sides: Mapping[str, Side]) -> bool:
    """Whether both run the very same code: the same bytes, and no file of the side beside them."""
    if any(each.missing or each.path is None for each in pair) or not all(_is_alone(each, sides) for each in pair):
        return False
    digests = {hashlib.sha256(each.path.read_bytes()).digest() for each in pair if each.path is not None}
    return len(digests) == 1


def put_in_place(sides: Sides) -> None:
    """Check out what is a revision and not there, and build it.

    Raises:
        ValueError: it cannot be.
    """
    for side in (sides.base, sides.candidate):
        if side.commit and not Path(side.root).exists():
            checkout.check_out(side.commit, Path(side.root))
            if sides.build:
                checkout.build(sides.build, Path(side.root), side.given)


def claim(folder: Path) -> None:
    """Note whose the files below a run's folder are; those of somebody who was killed may not be whole."""
    _sweep_up(folder / FOLDER / OWNER)
    (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    (folder / FOLDER / OWNER).write_text(str(os.getpid()), encoding="utf-8")


def sweep_up(results: Path) -> None:
    """Remove what comparisons that were killed left below `results`: a run that is resumed checks out anew."""
    for note in (results / "runs").glob(f"*/{FOLDER}/{OWNER}"):
        _sweep_up(note)


def _sweep_up(note: Path) -> None:
    with contextlib.suppress(ValueError, OSError):  # gone meanwhile, or not ours
        if not psutil.pid_exists(int(note.read_text(encoding="utf-8"))):
            shutil.rmtree(note.parent)


def clear(folder: Path) -> None:
    """Remove what was checked out below a run's folder, and the folder where it holds nothing else."""
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


@contextmanager
def at_work(made: Plan, folder: Path) -> Iterator[None]:
    """Both sides in place while the run is at work, and removed afterwards; after a kill the next attempt does it.

    Raises:
        ValueError: a side cannot be checked out.
    """
    assert made.sides is not None
    claim(folder)
    try:
        put_in_place(made.sides)
        yield
    finally:
        clear(folder)
