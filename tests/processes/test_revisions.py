"""Two sides: finding them, checking them out, cleaning up, and their place in a plan."""

import hashlib
import os
import sysconfig
from importlib.machinery import PathFinder
from pathlib import Path

import msgspec
import pytest

from attnbench import plugins
from attnbench.processes import revisions, worker_client
from attnbench.processes.execution import client_for
from attnbench.processes.revisions import is_self_contained
from attnbench.storage.events import Side, Sides
from attnbench.storage.records import BASE, CANDIDATE
from studies.simulated import virtual
from tests.repositories import PLAIN, SLOW, commit, git, repository

TINY = ("seq_len=8", "num_heads=2", "head_dim=8", "direction=inference", "mask=none")
REFUSAL = """#!/bin/sh
[ "$LC_ALL" = C ] || { echo "fatal: translated" >&2; exit 128; }
echo "fatal: detected dubious ownership in repository at '/theirs'" >&2
echo "To add an exception for this directory, call:" >&2
exit 128
"""


@pytest.fixture
def repo(tmp_path, monkeypatch):
    folder = repository(tmp_path / "theirs")
    (folder / "implementations").mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "other.py").write_text(PLAIN)
    commit(folder, "one", mine=PLAIN, helped="import mine\nhelped = mine.mine\n")
    (folder / "implementations" / "same.py").write_text(PLAIN + "IMPLEMENTATION = mine\n")
    (folder / "implementations" / "grown.py").write_text(PLAIN + "IMPLEMENTATION = mine\n")
    (folder / "implementations" / "gone.py").write_text(PLAIN + "IMPLEMENTATION = mine\n")
    commit(folder, "two", mine=SLOW)
    (folder / "implementations" / "grown.py").write_text(SLOW + "IMPLEMENTATION = mine\n")
    (folder / "implementations" / "gone.py").unlink()
    (folder / "implementations" / "fresh.py").write_text(PLAIN.replace("def mine", "def attention"))
    commit(folder, "three")
    monkeypatch.chdir(folder)
    return folder


def planned(base: str, candidate: str, *implementations: str, folder: str = "out/run", allocator=None, **more):
    fields = {"sweep": "sides", "settings": TINY, "is_exact": True, "implementations": implementations}
    fields |= {} if allocator is None else {"allocator": allocator}
    return revisions.plan(base, candidate, fields, Path(folder), **more)


def specs(found) -> tuple[str, ...]:
    """Return the two files of the only implementation, the base's first."""
    assert len({arm.implementation for arm in found.specs}) == 1
    assert [arm.side for arm in found.specs] == [BASE, CANDIDATE]
    return tuple(found.specs.values())


def names(found) -> list[str]:
    assert (found.implementations, found.baseline) == ((), "")
    return list(map(str, found.specs))


def tree(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and ".git" not in path.parts)
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_a_revision_is_checked_out_whole_and_the_repository_is_left_as_it_was(repo, tmp_path):
    (repo / "mine.py").write_text("half done\n")
    before, status = tree(repo), git(repo, "status", "--porcelain")
    revisions.export(revisions.resolve("one"), tmp_path / "out" / "one")
    revisions.export(revisions.resolve("three~1"), tmp_path / "out" / "two")
    assert (tmp_path / "out" / "one" / "mine.py").read_text() == PLAIN
    assert set(tree(tmp_path / "out" / "one")) == {"mine.py", "helped.py", "sub/other.py"}
    assert (tmp_path / "out" / "two" / "mine.py").read_text() == SLOW
    assert tree(repo) == before
    assert git(repo, "status", "--porcelain") == status
    assert len(git(repo, "worktree", "list").splitlines()) == 1
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"one", "two"}


def test_a_checkout_begins_anew_after_a_kill(repo, tmp_path):
    commit, git_here, target = revisions.resolve("one"), revisions._git, tmp_path / "out" / "one"

    def killed(*words, **more):
        if words[0] == "read-tree":
            Path(more["index"] + ".lock").touch()  # git's, which is killed, too
            os._exit(0)
        return git_here(*words, **more)

    child = os.fork()
    if not child:
        revisions._git = killed
        revisions.export(commit, target)
    os.waitpid(child, 0)
    assert list(target.parent.iterdir())
    revisions.export(commit, target)
    assert (target / "mine.py").read_text() == PLAIN
    assert [path.name for path in target.parent.iterdir()] == ["one"]


def test_a_resumed_run_links_the_harness_at_work(tmp_path):
    (tmp_path / "attnbench").symlink_to(tmp_path / "gone")
    assert (worker_client.harness_folder(tmp_path) / "attnbench" / "__init__.py").exists()


@pytest.mark.parametrize(
    ("base", "candidate", "implementations", "said"),
    [
        ("rev:nowhere", "rev:two", ["mine.py:mine"], "there is no revision nowhere"),
        ("rev:--help", "rev:two", ["mine.py:mine"], "there is no revision --help"),
        ("rev:one", "nonsense", ["mine.py:mine"], "nonsense is not a side of a comparison: give rev:REVISION"),
        ("rev:one", "rev:two", ["no_such.py:mine"], "missing on both sides: cannot read no_such.py"),
        ("rev:one", "rev:two", ["no_such"], "missing on both sides: cannot read implementations/no_such.py"),
        ("rev:one", "rev:two", [], "no implementation is named: give --implementation"),
        ("rev:one", "rev:two", ["../elsewhere.py:f"], "lies outside of rev:one"),
        ("rev:one", "rev:two", ["mine.py:mine", "sub/other.py:mine"], "would share the name mine"),
        ("mine.py:mine", "rev:two", [], "rev:two cannot be compared with a file"),
        ("mine.py:mine", "helped.py:helped", ["mine.py:mine"], "--implementation is not allowed with FILE"),
        ("mine.py:mine", "helped.py:no", [], "there is no name no"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_words_and_leaves_nothing(repo, base, candidate, implementations, said):
    with pytest.raises(ValueError, match=said):
        planned(base, candidate, *implementations)
    assert not Path("out/run").exists()


def test_outside_a_repository_revisions_are_refused_and_folders_are_not(repo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(ValueError, match="not a git repository"):
        planned("rev:one", "rev:two", "mine.py:mine")
    assert specs(planned("theirs", "theirs", "mine.py:mine")) == (2 * ("theirs/mine.py:mine",))


def test_what_git_says_is_quoted_where_there_is_a_repository_that_it_refuses(tmp_path, monkeypatch):
    stub = tmp_path / "bin" / "git"
    stub.parent.mkdir()
    stub.write_text(REFUSAL)
    stub.chmod(0o755)
    monkeypatch.setenv("PATH", f"{stub.parent}{os.pathsep}{os.environ['PATH']}")
    said = "detected dubious ownership in repository at '/theirs' To add an exception for this directory, call:"
    with pytest.raises(ValueError, match=said):
        revisions.repository_root()


def test_a_plan_has_each_implementation_from_both_sides(repo):
    found = planned("rev:one", "rev:two", "mine.py:mine")
    assert names(found) == ["mine (base)", "mine"]
    base, candidate = (plugins.split(spec)[0].read_text() for spec in specs(found))
    assert (base, candidate) == (PLAIN, SLOW)
    assert found.sides.base.commit == revisions.resolve("one")
    assert not found.sides.is_apart
    assert len(found.workloads) == 1


def test_paths_are_typed_from_where_one_stands_in_the_repository(repo, monkeypatch):
    monkeypatch.chdir(repo / "sub")
    found = planned("rev:one", "rev:WORKTREE", "other.py:mine")
    assert [str(plugins.split(spec)[0]) for spec in specs(found)] == [
        "out/run/sides/base/sub/other.py",
        "../sub/other.py",
    ]


def test_what_is_on_one_side_only_is_lost_or_new(repo):
    found = planned("rev:two", "rev:three", "gone", "fresh", "grown")
    assert names(found) == ["gone (base)", "grown (base)", "grown", "fresh"]
    assert list(found.sides.lost) == ["gone"]
    assert found.sides.lost["gone"] == "cannot read implementations/gone.py: No such file or directory"
    assert list(found.sides.new) == ["fresh"]


def test_two_files_are_two_sides_under_the_name_of_the_second(repo):
    found = planned("mine.py:mine", "sub/other.py:mine")
    assert names(found) == ["mine (base)", "mine"]
    base, candidate = (
        Side(given=spec, implementations={"mine": spec}) for spec in ("mine.py:mine", "sub/other.py:mine")
    )
    assert found.sides == Sides(base=base, candidate=candidate)


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("import torch, math\nimport numpy as np", True),
        ("from types import SimpleNamespace", True),
        ("from attnbench.contract import Attention", True),
        ("import neighbour", False),
        ("def f():\n    from package.deep import g", False),
        ("from . import anything", False),
        ("import torch\ntorch.library.define('a::b', '()')", False),
        ("from torch.utils.cpp_extension import load", False),
        ("import importlib", False),
        ("import torch.nn.functional as F\nF.softmax = None", False),
    ],
)
def test_a_file_is_alone_if_it_imports_only_python_torch_numpy_and_us(tmp_path, text, alone):
    path = tmp_path / "it.py"
    path.write_text(text)
    assert is_self_contained(path) is alone


def test_sides_that_cannot_share_a_process_get_one_each(repo, tmp_path):
    assert planned("rev:one", "rev:two", "helped.py:helped").sides.is_apart
    assert planned("rev:one", "rev:two", "mine.py:mine", is_apart=True).sides.is_apart
    python = tmp_path / "python3"
    python.touch()
    found = planned(str(python), str(python), "sdpa")
    assert specs(found) == ("sdpa", "sdpa")
    assert not found.sides.is_apart
    other = tmp_path / "python4"
    other.touch()
    assert planned(str(python), str(other), "sdpa").sides.is_apart
    assert planned("rev:one", str(other), "mine.py:mine").sides.is_apart


def test_both_sides_have_the_allocator_of_the_system_unless_another_is_chosen(repo):
    for file in ("mine.py:mine", "helped.py:helped"):
        assert planned("rev:one", "rev:two", file).allocator == "system"
    assert planned("rev:one", "rev:two", "helped.py:helped", allocator="steady").allocator == "steady"


def test_sides_are_in_place_while_a_run_is_at_work_and_are_removed_after_it(repo):
    found = planned("rev:one", "rev:two", "mine.py:mine")
    run = Path("out/run")
    revisions.remove_checkouts(run)  # as when a run is resumed
    assert not run.exists()
    with revisions.checked_out(found, run):
        assert (run / "sides" / "base" / "mine.py").read_text() == PLAIN
        assert all(plugins.digest(spec) == digest for spec, digest in found.digests.items())
    assert not (run / "sides").exists()


def test_the_folder_of_an_environment_is_a_side(tmp_path):
    python = tmp_path / "next" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert revisions._side(f"env:{tmp_path / 'next'}", tmp_path).python == str(python)
    with pytest.raises(ValueError, match=r"env:none is not a side .* env:FOLDER"):
        revisions._side("env:none", tmp_path)


def modules(tmp_path, side, implementation, files, names):
    """Return the file that a process of a side would import for each module; None for no file, or Python's own."""
    both = {}
    for name in (BASE, CANDIDATE):
        for file in (implementation, *files):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).touch()
        specs = {"x": f"{tmp_path / name / implementation}:f"}
        both[name] = Side(given=name, root=str(tmp_path / name), implementations=specs)
    plan = virtual.with_sides(virtual.plan(1, ("x",), budget_s=1.0), is_apart=True)
    apart = Sides(base=both[BASE], candidate=both[CANDIDATE], is_apart=True)
    python = [sysconfig.get_path("stdlib"), f"{sysconfig.get_path('platstdlib')}/lib-dynload"]
    with client_for(msgspec.structs.replace(plan, sides=apart), tmp_path / "run") as client:
        folders = [*python, *map(str, client.clients[side].template.folders)]
    specs = [PathFinder.find_spec(name, folders) for name in names]
    origins = ["" if spec is None or spec.origin is None else spec.origin for spec in specs]
    return [None if not each or each.startswith(tuple(python)) else Path(each).resolve() for each in origins]


PACKAGE = ("__init__", "ops", "types", "triton", "torch")
CHANCE = ("helper.py", "kernels/next_to_it.py", "types.py", "kernels/random.py", "kernels/json/__init__.py")


@pytest.mark.parametrize("side", [BASE, CANDIDATE])
@pytest.mark.parametrize(
    ("implementation", "files", "found", "hidden"),
    [
        *(
            (f"{own}/attn.py", [f"{own}/{name}.py" for name in PACKAGE], {"foo": f"{own}/__init__.py"}, PACKAGE[1:])
            for own in ("foo", "src/foo", "packages/foo/foo", "packages/foo/src/foo")
        ),
        ("kernels/attn.py", CHANCE, {"helper": CHANCE[0], "next_to_it": CHANCE[1]}, ("types", "random", "json")),
        ("bench/attn.py", ("bench/foo.py", "foo/__init__.py"), {"foo": "foo/__init__.py"}, ()),
    ],
    ids=["flat", "src", "packages", "packages and src", "what lies there by chance", "a package above"],
)
def test_each_process_finds_its_own_side_and_hides_no_package(tmp_path, side, implementation, files, found, hidden):
    places = modules(tmp_path, side, implementation, files, [*found, *hidden])
    assert places == [*(tmp_path / side / file for file in found.values()), *(None for _ in hidden)]
