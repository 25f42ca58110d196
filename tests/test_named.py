"""Documents and workflows name only what is there: sessions of nox, commands, options, sweeps, axes and masks."""

import re
from pathlib import Path

import pytest
import typer

from attnbench.cli import app
from attnbench.workloads import models
from attnbench.workloads.masks import masks
from attnbench.workloads.sweep import AXES, Sweep

ROOT = Path(__file__).parents[1]
PATTERNS = ("*.md", "*.y*ml", "docs/**/*.md", ".github/**/*.*", "examples/**/*.y*ml", "results/gallery/**/*.md")
HISTORY = ("CHANGELOG.md", "0049-fourteen-commands-and-what-went.md")  # they list what is gone
PAGES = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern)) if page.name not in HISTORY]
COMMANDS = vars(typer.main.get_command(app))["commands"]
OPTIONS = {name: {word for each in command.params for word in each.opts} for name, command in COMMANDS.items()}
SWEEPS = {path.stem for path in (ROOT / "harness" / "attnbench" / "workloads" / "sweeps").glob("*.toml")}
KNOWN = {"axis": {*AXES}, "mask": {*masks()}, "sweep": SWEEPS, "command": {*COMMANDS}}
SPAN = re.compile(r"^```\w*\n(.*?)^```|`([^`]+)`", re.MULTILINE | re.DOTALL)
CALL = re.compile(r"^\s*(?:\$ |- run: )?attnbench ([a-z][a-z|]*)((?: [^\s;#>&][^\s]*)*)", re.MULTILINE)
OPTION = re.compile(r"(?:^|(?<= ))--[a-z][\w-]*")
PROGRAM = re.compile(r"^python (?:-m ([\w.]+)|(\S+\.py))")
OF_PYTEST = ("--attnbench-seed", "--benchmark-compare", "--benchmark-autosave")
NAMED = {
    "axis": re.compile(r"--set[ =]['\"]?([a-z]\w*)="),
    "mask": re.compile(r"\bmask=([a-z]\w*)(?![\w.\[])|(?<=[+,])([a-z]\w*)(?=\(\d)"),
    "sweep": re.compile(r"--sweep[ =](\w+)(?![\w.])"),
}
ADDED = re.compile(r"^# file: \S*/(\w+)\.|^\+ {4}(\w+): |^ {4}name = \"(\w+)\"$", re.MULTILINE)
"""A plug, an axis or a mask that a recipe on the same page adds."""


def sessions() -> set[str]:
    return set(re.findall(r"@nox\.session.*\ndef (\w+)", (ROOT / "noxfile.py").read_text(encoding="utf-8")))


def not_there(text: str, *, is_prose: bool) -> list[str]:
    """Names in the code of a text that attnbench does not know."""
    added = {name for names in ADDED.findall(text) for name in names if name}
    spans = ["".join(found) for found in SPAN.findall(text)] if is_prose else [text]
    missing = []
    for span in (re.sub(r"\\\n *", "", each) for each in spans):
        for what, pattern in NAMED.items():
            names = {"".join(found) for found in pattern.findall(span)}
            missing += [f"{what} {name}" for name in names - KNOWN[what] - added]
        for commands, words in CALL.findall(span):
            names = set(commands.split("|")) - added
            known = {"--help"}.union(*(OPTIONS.get(name, ()) for name in names))
            missing += [f"command {name}" for name in names - KNOWN["command"]]
            options = {word.partition("=")[0] for word in re.findall(r"(?<= )--?[a-z][\w=-]*", words)}
            missing += [f"option {commands} {option}" for option in options - known if names]
    return missing


def options_not_there(text: str) -> list[str]:
    """Options in spans of code that stand alone, or behind a program of this project, which neither knows."""
    missing = []
    for span in (span for _, span in SPAN.findall(text) if span):
        named, program = OPTION.findall(span), PROGRAM.match(span)
        if program:
            path = ROOT / (program[2] or program[1].replace(".", "/"))
            files = [path, path.with_suffix(".py"), *path.glob("*.py")]
            source = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
            missing += [f"{span}: {option}" for option in named if not re.search(rf'"(--)?{option[2:]}"', source)]
        elif span.startswith("--"):
            known = {"--help", "--rehearse", "--sessions", *OF_PYTEST}.union(*OPTIONS.values())
            missing += [f"{span}: {option}" for option in named if option not in known]
    return missing


def test_every_session_that_a_workflow_or_a_document_names_exists():
    pages = [*PAGES, ROOT / ".ci" / "run", ROOT / "noxfile.py"]
    lists = [(page, names) for page in pages for names in re.findall(r"\bnox -s ((?:\w+ ?)+)", page.read_text())]
    named = [(page, word) for page, names in lists for word in names.split()]
    assert {"tests", "tests_long", "lint", "docs", "package"} <= {word for _, word in named}
    assert [f"{page.relative_to(ROOT)}: {word}" for page, word in named if word not in sessions()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_name_in_a_document_exists(page):
    text, is_prose = page.read_text(encoding="utf-8"), page.suffix == ".md"
    assert not_there(text, is_prose=is_prose) == []
    assert not is_prose or options_not_there(text) == []


def test_the_presets_of_models_are_counted():
    number = len(list(Path(models.__file__).with_name("presets").glob("*.toml")))
    assert f"one of {number} presets" in (ROOT / "docs" / "fastest.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("`attnbench measure fused`", ["command measure"]),
        ("`attnbench check|run --budget 3`, `attnbench check --budget 3`", ["option check --budget"]),
        ("```bash\nattnbench run -i sdpa \\\n  --dry-run\n```", ["option run --dry-run"]),
        ("`attnbench run --sweep slow`", ["sweep slow"]),
        ("`attnbench run --sweep mine.toml --set pages=4`", ["axis pages"]),
        ("| `mask=causal+blocks(8)` |", ["mask blocks"]),
        ("attnbench measures `mask=causal+chunks(8)`; `attnbench list axes`", []),
    ],
)
def test_a_name_that_does_not_exist_is_found(text, found):
    assert not_there(text, is_prose=True) == found


def test_an_option_that_does_not_exist_is_found():
    text = "`--budget 3` and `--salvaged`; `python -m studies.gpu --out DIR --rehearsed`; `pip --no-deps`"
    assert [found.rpartition(" ")[2] for found in options_not_there(text)] == ["--salvaged", "--rehearsed"]


def test_contributing_names_every_key_of_a_sweep():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (sentence,) = re.findall(r"Other keys: .*?The default of `budget_s`", text, re.DOTALL)
    named = set(re.findall(r"`([a-z_]+)`", sentence))
    assert named == set(Sweep.__struct_fields__) - {"summary", "grid"}
