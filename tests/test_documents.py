"""Every fenced block of the documents does as it says, in order, in a copy of the project.

- `python` runs as a program of its own; with `# file: PATH` as first line it is saved there instead, and with
  `# append to: PATH` it is added to that file. `toml` with `# file: PATH` is saved.
- `diff` is applied.
- `bash` runs; `attnbench` in it is the copy's, on small settings. A block with a comment `# exits N` or
  `# exits N or M` must end with that exit code. Set-up commands (pip, nox, git, ...) are in separate blocks. They do
  not run, but are compared with .ci/run and the existing sessions.
- `text`, `console` and `json` show output, and `yaml` is for CI systems. In the documents of PRINTED, a `text` right
  below a block is its output: numbers match to the last digit or nearly, `...` matches anything, and any white space
  matches any other.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
import typer

from attnbench.cli import app
from tests import forks, recipes
from tests.recipes import Block

ROOT = Path(__file__).parent.parent
WITH_SET_UP = [name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists()]
PRINTED = ["docs/tutorials.md"]
FENCED = [path.name for path in sorted((ROOT / "docs").glob("*.md")) if "\n```" in path.read_text(encoding="utf-8")]
DOCUMENTS = [*WITH_SET_UP, *(f"docs/{name}" for name in FENCED)]
SHOWN = {"text", "console", "json", "yaml"}
SET_UP = re.compile(r"(python[\d.]* -m (pip|venv)|pip|nox|git clone|cd|pre-commit|source)\b")
TIMEOUT_S = 900
ONLY_PLANNED = {"docs/findings.md": "flex +compile"}
"""Dry runs in this document: each compilation takes half a minute, and other documents compile."""

SMALL = r"""
import os, re, runpy, sys
arguments = sys.argv[1:]
if arguments and arguments[0] == "growth" and "--help" not in arguments:
    arguments += ["--set", "seq_len=16,32,64", "--set", "num_heads=1", "--set", "num_threads=1"]
if arguments and arguments[0] == "fastest" and "--help" not in arguments:  # few seconds, short calls
    arguments += ["--set", "num_threads=1", "--budget", "6"]
    arguments += ["--set", "num_heads=2"] * ("--model" not in arguments)  # a model has its own
    if "--policy" in arguments:  # from fewer workloads than these no policy is learned
        del arguments[(place := arguments.index("--sweep")) : place + 2]
        arguments += ["--set", "seq_len=8,16,24,32", "--set", "mask=none,causal", "-i", "fused"]
    elif "--model" in arguments:
        arguments[arguments.index("--model") + 3] = "seq_len=64"
swept = arguments[arguments.index("--sweep") + 1] if "--sweep" in arguments else ""
traced = swept == "serving" or swept.endswith(".jsonl")
if "--sweep" in arguments and "--help" not in arguments and not traced:  # what is set below stands alone
    del arguments[(place := arguments.index("--sweep")) : place + 2]
adjusted = {"run", "check", "compare", "profile"}
if any("paged" in word or word in {"serving", "page_size=16"} for word in arguments):  # batches have their own sizes
    adjusted = set()
    arguments += ["--budget", "8"] * (arguments[0] == "run")
if arguments and arguments[0] in adjusted and "--help" not in arguments and not traced:
    shorter = lambda found: f"padding({','.join(str(int(each) // 64) for each in found[1].split(','))})"
    arguments = [re.sub(r"(?<=[=,])padding\(([\d,]+)\)", shorter, argument) for argument in arguments]
    given = " ".join(arguments)
    if arguments[0] == "run" and any(word in given for word in os.environ["ONLY_PLANNED"].split()):
        from attnbench.commands import running

        running.execute = lambda *_, **__: sys.exit(0)
    fitting = given.replace("symmetric_window(", "").replace("sliding_window(", "").replace("padding(16,", "")
    if "(" not in fitting:  # lengths in a mask must fit the others
        arguments += ["--set", "seq_len=16"]
    if arguments[0] == "check":  # few points: each that disagrees is diagnosed, which takes a second
        few = {"mask": "none,padding", "dtype": "float32", "layout": "contiguous", "bias": "all"}
        few |= {"batch_size": "2", "num_heads": "2", "scope": "attention,module"}
        for axis in few.keys() - {word.partition("=")[0] for word in arguments}:
            arguments += ["--set", f"{axis}={few[axis]}"]
    arguments += ["--set", "head_dim=8", "--set", "num_threads=1"]  # threads that wait for one another take the longest
    if arguments[0] in {"run", "compare"}:
        arguments += ["--budget", "8"]
        for axis, value in (("direction", "inference"), ("dtype", "float32")):  # else all of a sweep's are checked
            arguments += [] if f"{axis}=" in given else ["--set", f"{axis}={value}"]
if arguments and arguments[0] in {"run", "compare"}:  # half of their time would go into pictures; `report` draws them
    from attnbench.reports import style

    style._drawn = lambda *_, **__: b"<svg ></svg>"
sys.argv = ["attnbench", *(argument for argument in arguments if argument != "--open")]
try:
    runpy.run_module("attnbench", run_name="__main__", alter_sys=True)
except SystemExit as done:  # other tests may disturb times, which is no fault of a document
    if done.code != 3 or arguments[0] not in {"run", "fastest", "compare", "model"}:
        raise
"""


def blocks(document: str) -> list[Block]:
    return recipes.blocks(document, (ROOT / document).read_text(encoding="utf-8"))


def commands(block: Block) -> list[str]:
    lines = block.text.replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]


def is_set_up(block: Block) -> bool:
    return block.language == "bash" and any(map(SET_UP.match, commands(block)))


def sessions() -> set[str]:
    found = re.findall(r"@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8"))
    return set(found)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_block_says_its_language_and_set_up_stands_in_blocks_of_its_own(document: str) -> None:
    known = {"bash", "python", "toml", "diff"} | SHOWN
    for block in blocks(document):
        assert block.language in known, f"{block}\na fence is followed by one of {sorted(known)}"
        assert not is_set_up(block) or all(map(SET_UP.match, commands(block))), block


PROGRAMS = r"attnbench|bash|cd|git|nox|pip|pytest|python[\d.]*|ray|srun|source"
TYPED = re.compile(rf"^(?:\$ )?((?:\w+=\S+ )*(?:{PROGRAMS}) .*|#!.*)$", re.MULTILINE)
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
NOT_RUN = {
    ("CONTRIBUTING.md", "nox -s cheats"): "minutes of real measurements; tests/studies/trust runs it in part",
    ("README.md", "attnbench compare rev:main"): "it needs two revisions: docs/side-by-side.md makes them",
    ("docs/ci.md", "python examples/planted_slowdown.py"): "minutes; tests/analysis/gate/test_sides.py runs it",
    ("docs/ci.md", "git bisect start"): "examples/planted_history.py does it",
    ("docs/ci.md", "python -m venv now"): "it installs torch twice",
    ("docs/cluster.md", "python -m pip"): "it installs Ray",
    ("docs/cluster.md", "RAY_worker_niceness=0 ray start"): "it needs Ray: tests/cluster starts it",
    ("docs/cuda.md", "attnbench check mine.py:attention --set device=cuda"): "it needs a GPU",
    ("docs/side-by-side.md", "attnbench compare rev:main"): "it needs two revisions: the next block makes them",
    ("docs/side-by-side.md", "git worktree add"): "it builds a package of the reader's",
    ("docs/cuda.md", "attnbench check my_triton.py"): "it needs triton: tests/implementations/test_triton.py",
    ("docs/profiling.md", "attnbench tensorboard"): "a server, which tests/tracing/test_viewer.py starts",
    ("docs/findings.md", "python -m pip install"): "it needs other packages: `nox -s field`",
    ("docs/findings.md", "attnbench check sdpa"): "docs/findings.py runs it",
}
"""The reason for each block that shows commands and that no test runs, by its document and its beginning."""
GENERATED = {"README.md", "docs/guide.md"}
"""Documents whose blocks of the kind `console` are the output of docs/first_hour.py."""


def typed(block: Block) -> list[str]:
    """The commands in a block that only shows them, with their environment."""
    return TYPED.findall(block.text.replace("\\\n", " ")) if block.language in SHOWN - {"json", "yaml"} else []


def test_a_block_of_commands_that_no_test_runs_has_a_reason() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")]
    names = sorted(path.relative_to(ROOT).as_posix() for path in pages if "```" in path.read_text(encoding="utf-8"))
    assert names == sorted(DOCUMENTS), "a document with blocks whose blocks are not run"
    reasons = dict.fromkeys(NOT_RUN, 0)
    for document in names:
        fences = re.findall(r"^\s*(?:```|~~~)", (ROOT / document).read_text(encoding="utf-8"), re.MULTILINE)
        assert len(fences) == 2 * len(blocks(document)), f"{document}: a block that is not found"
        for block in blocks(document):
            if not typed(block) or (document in GENERATED and block.language == "console"):
                continue
            (why,) = [key for key in NOT_RUN if key[0] == document and typed(block)[0].startswith(key[1])] or [None]
            assert why, f"{block}\nmake it `bash`, which is run, or give the reason in NOT_RUN"
            reasons[why] += 1
    assert [key for key, number in reasons.items() if not number] == []


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_command_that_is_only_shown_can_be_typed(document: str) -> None:
    for command in (line for block in blocks(document) for line in typed(block)):
        for part in re.split(r"&&|;|\|", command):
            words = shlex.split(part, comments=True)
            if "attnbench" in words:
                name, *arguments = words[words.index("attnbench") + 1 :]
                COMMANDS[name].make_context(name, arguments)


@pytest.mark.parametrize("document", WITH_SET_UP)
def test_set_up_is_what_ci_runs(document: str) -> None:
    run = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    tests = next(line for line in run if "nox -s tests" in line and not line.startswith("#"))
    typed_in_set_up = [command for block in blocks(document) if is_set_up(block) for command in commands(block)]
    assert tests in typed_in_set_up
    for command in typed_in_set_up:
        for path, _, name in re.findall(r" (tests/\S+\.py)(::(\w+))?", command):
            assert f"def {name}" in (ROOT / path).read_text(encoding="utf-8"), command
        for named in re.findall(r"\bnox\b.* -s (\w+)", command):
            assert named in sessions(), f"{command}: there is no session {named}"
        if " && nox" in command:
            assert command.split(" -s ")[0] == tests.split(" -s ")[0]


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """A copy of packages and documents in which `attnbench` is the copy's command line on small settings.

    Its Python is forked from one that has imported torch, but not the project.
    """
    for folder in ("harness", "implementations", "examples", "docs", "results/gallery"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored, symlinks=True)
    shutil.copy(ROOT / "README.md", tmp_path)
    bin_folder = tmp_path / ".commands"
    bin_folder.mkdir()
    (bin_folder / "small.py").write_text(SMALL, encoding="utf-8")
    programs = {"pytest": "-m pytest", "pytest-benchmark": "-m pytest_benchmark", "python": ""}
    for name, program in {"attnbench": f'"{bin_folder / "small.py"}"', **programs}.items():
        (bin_folder / name).write_text(f'#!/bin/sh\nexec "{forks.python()}" {program} "$@"\n', encoding="utf-8")
        (bin_folder / name).chmod(0o755)
    return tmp_path


QUICK = {"docs/cluster.md", "docs/cuda.md"}
"""Documents whose commands take seconds; the others belong to the long tests."""


@pytest.mark.parametrize(
    "document", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in DOCUMENTS]
)
def test_every_block_runs(document: str, workplace: Path) -> None:
    found = blocks(document)
    for block, below in zip(found, [*found[1:], None], strict=True):
        if not is_set_up(block) and block.language not in SHOWN:
            printed = follow(block, workplace)
            if document in PRINTED and below is not None and below.language == "text":
                assert is_shown(below.text, printed), f"{below}\nit printed:\n{printed}"


NUMBER = re.compile(r"(?<![\w.])-?\d+\.?\d*(?:e[-+]\d+)?(?![\w.])")


def is_shown(shown: str, printed: str) -> bool:
    """Whether a text matches the output; each number may be off by one and a half in its last digit."""
    parts = re.split(rf"({NUMBER.pattern}|\.\.\.|\s+)", shown.strip())
    pattern, numbers = "", []
    for part in parts:
        if NUMBER.fullmatch(part):
            numbers.append(part)
            pattern += f"({NUMBER.pattern})"
        else:
            pattern += ".*?" if part == "..." else r"\s+" if part.isspace() else re.escape(part)
    found = re.fullmatch(pattern, printed.strip(), re.DOTALL)
    return found is not None and all(
        abs(float(number) - float(other)) <= 1.5 * 10.0**exponent
        if (exponent := digits(number)) < 0
        else number == other
        for number, other in zip(numbers, found.groups(), strict=True)
    )


def digits(number: str) -> int:
    """Return the power of ten of the last digit; 0 for a whole number, which must match."""
    return int(Decimal(number).as_tuple().exponent)


@pytest.mark.parametrize(
    ("shown", "printed", "expected"),
    [
        ("tensor([0.5313, 1.3607])", "tensor([0.5313,\n   1.3606])\n", True),
        ("tensor([0.5313, 1.3607])", "tensor([0.5315, 1.3607])", False),
        ("shape (1, 8)", "shape (1, 7)", False),
        ("1.2e-07 and -0.0000", "1.3e-07 and 0.0000", True),
        ("...\nwrong on ...: 2.00.", "a\nb\nwrong on t16-k8: 2.00.", True),
        ("...\nright ...", "a\nwrong", False),
        ("float32", "float64", False),
    ],
)
def test_what_is_shown_is_held_against_what_is_printed(shown: str, printed: str, expected: bool) -> None:  # noqa: FBT001
    assert is_shown(shown, printed) is expected


def follow(block: Block, workplace: Path) -> str:
    if block.save(workplace) or block.language == "toml":
        return ""
    command = {
        "diff": ["git", "apply", "-C1", "-"],
        "python": ["python", "-W", "error", "-"],
        "bash": ["bash", "-eu", "-o", "pipefail", "-c", block.text],
    }[block.language]
    path = os.pathsep.join([str(workplace / ".commands"), str(Path(sys.executable).parent), os.environ["PATH"]])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}  # it is a copy
    environment = inherited | {
        "PATH": path,
        "PYTHONPATH": str(workplace / "harness"),
        "ONLY_PLANNED": ONLY_PLANNED.get(block.document, ""),
        "BROWSER": "true",
        "MPLBACKEND": "agg",
        "GIT_CEILING_DIRECTORIES": str(workplace.parent),
    }
    given = "" if block.language == "bash" else block.text
    place = {"cwd": workplace, "env": environment, "timeout": TIMEOUT_S}
    done = subprocess.run(command, **place, input=given, capture_output=True, text=True, check=False)
    exits = re.search(r"# exits (\d(?: or \d)*)", block.text)
    said = f"{block}\nexit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert str(done.returncode) in (exits[1].split(" or ") if exits else ["0"]), said
    return done.stdout


def test_it_is_reported_where_everything_is() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    reported = set(re.findall(r"`(\w+(?:\.py|/))`", text.partition("## Where things are")[2].partition("\n## ")[0]))
    there = {path.name if path.suffix else f"{path.name}/" for path in (ROOT / "harness" / "attnbench").iterdir()}
    hidden = {"__init__.py", "__main__.py", "__pycache__/", "py.typed"}
    assert reported - {"harness/", "src/", "examples/", "studies/", "tools/"} == there - hidden


def test_the_glossary_names_what_is_there() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    missing = [
        path
        for path in re.findall(r"`((?:harness|implementations)/(?:\w+/)*\w+\.py)`", text)
        if not (ROOT / path).exists()
    ]
    for module, name in re.findall(r"`([a-z]\w*)\.([A-Za-z]\w*)(?:\(\))?`", text):
        harness = ROOT / "harness" / "attnbench"
        paths = [harness / f"{module}.py", harness / module / "__init__.py", *harness.rglob(f"{module}.py")]
        source = "\n".join(path.read_text(encoding="utf-8") for path in paths if path.exists())
        if name != "jsonl" and not re.search(rf"^(class|def) {name}\b|^{name}\b", source, re.MULTILINE):
            missing.append(f"{module}.{name}")
    assert not missing
