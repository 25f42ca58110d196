"""Defaults of options: their precedence, the messages for mistakes, and every command's help."""

import re
import shlex
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from attnbench import cli
from attnbench.cli import app
from attnbench.commands import defaults
from attnbench.plugins import plugs

PROGRAM = typer.main.get_command(app)
OPTIONS = defaults.options_of(PROGRAM)
COMMANDS = plugs("attnbench.commands", "COMMAND")
TYPES = re.compile(r"<(?!=|x|\w+\|)")
"""Typer's names for types of values, except lists of choices."""


def found(folder: Path, text: str = "", **environment: str) -> dict[str, dict[str, defaults.Default]]:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    inner = folder / "a" / "b"
    inner.mkdir(parents=True, exist_ok=True)
    return defaults.defaults(OPTIONS, environment, inner)


TABLE = """
[tool.attnbench]
budget = 30
results = "there"

[tool.attnbench.run]
budget = 40
set = ["seq_len=64", "mask=causal"]
"""


def test_the_nearest_file_gives_defaults_to_every_command_that_has_the_option(tmp_path):
    made = found(tmp_path, TABLE)
    assert made["run"]["budget"].value == 40
    assert made["compare"]["budget"].value == 30
    assert made["gate"]["results"].value == "there"
    assert "budget" not in made["gate"]
    assert made["run"]["budget"].source.endswith("pyproject.toml: [tool.attnbench.run] budget")


def test_variables_go_before_the_file_and_those_of_one_command_before_those_of_all(tmp_path):
    made = found(tmp_path, TABLE, ATTNBENCH_BUDGET="50", ATTNBENCH_RUN_BUDGET="60", ATTNBENCH_OTHER="x")
    assert (made["run"]["budget"].value, made["compare"]["budget"].value) == ("60", "50")
    assert made["run"]["budget"].source == "ATTNBENCH_RUN_BUDGET"


def test_what_may_be_repeated_becomes_a_list(tmp_path):
    made = defaults.as_map(OPTIONS, found(tmp_path, TABLE, ATTNBENCH_RUN_IMPLEMENTATION="sdpa fused"))
    assert made["run"]["settings"] == ["seq_len=64", "mask=causal"]
    assert made["run"]["implementations"] == ["sdpa", "fused"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[tool.attnbench]\nbugdet = 3", r"pyproject.toml: \[tool.attnbench\] there is no option bugdet .*mean budget"),
        ("[tool.attnbench.rnu]\nbudget = 3", r"\[tool.attnbench.rnu\]: there is no command rnu .*mean run"),
        ("[tool.attnbench.gate]\nbudget = 3", r"\[tool.attnbench.gate\] there is no option budget; choose among"),
        ("[tool", "pyproject.toml cannot be read"),
        ("[tool.attnbench]\ncache = 'cold'", "cache is gone: give --conditions cold"),
        ("[tool.attnbench]\nresume = 'x'", "there is no option resume"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, said):
    with pytest.raises(ValueError, match=said):
        found(tmp_path, text)


def test_what_is_typed_goes_first_and_a_wrong_value_names_its_source(tmp_path, monkeypatch, capsys):
    (tmp_path / "pyproject.toml").write_text('[tool.attnbench]\nsweep = "none"\n')
    monkeypatch.chdir(tmp_path)
    for arguments, said in (([], "no sweep none"), (["--sweep", "other"], "no sweep other")):
        monkeypatch.setattr("sys.argv", ["attnbench", "run", "--dry-run", *arguments])
        with pytest.raises(SystemExit):
            cli.main()
        assert said in capsys.readouterr().err
    monkeypatch.setenv("ATTNBENCH_BUDGET", "soon")
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    assert "'--budget'" in (message := capsys.readouterr().err)
    assert "(ATTNBENCH_BUDGET)" in message


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_the_help_has_examples_that_can_be_typed_and_names_no_types(name):
    made = PROGRAM.commands[name]
    shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).output
    assert not TYPES.findall(shown)
    assert "--json" in shown
    assert "--quiet" in shown
    assert COMMANDS[name].examples
    for example in COMMANDS[name].examples:
        program, command, *arguments = shlex.split(example)
        assert (program, command) == ("attnbench", name)
        assert example in shown
        made.make_context(name, arguments)
