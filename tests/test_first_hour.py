"""The page of the first hour shows its generator's commands with their outputs; each command can be typed."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import typer

from attnbench.cli import app

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "first_hour.py"
PROGRAM = typer.main.get_command(app)
pytestmark = pytest.mark.skipif(not FILE.exists(), reason="the documents are not here")


@pytest.fixture(scope="module")
def made():
    spec = importlib.util.spec_from_file_location("first_hour", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_question_is_answered_by_its_own_command_in_time(made):
    page = made.PAGE.read_text(encoding="utf-8")
    assert "Made on 20" in page
    for number, question in enumerate(made.QUESTIONS, 1):
        begin, end = page.index(f"<!-- begin {number} -->"), page.index(f"<!-- end {number} -->")
        assert f"## {number}. {question.text}" in page[:begin]
        block = page[begin:end]
        assert f"$ {question.command}\n" in block
        took = re.search(r"It took (\d+) s", block)
        assert took, f"{number} is not answered: python docs/first_hour.py {number}"
        assert question.is_sweep or int(took[1]) <= 60


def test_the_readme_shows_what_its_commands_print(made):
    text = made.README.read_text(encoding="utf-8")
    for name, question in made.SHOWN.items():
        block = text[text.index(f"<!-- begin {name} -->") : text.index(f"<!-- end {name} -->")]
        assert f"$ {question.command}\n" in block, "run: python docs/first_hour.py readme"
        assert len(block.splitlines()) > 8


def test_the_readme_is_short(made):
    assert len(made.README.read_text(encoding="utf-8").split()) <= 700


def test_each_command_can_be_typed(made):
    for question in [*made.QUESTIONS, *made.SHOWN.values()]:
        for command in re.split("&&|;", f"{question.before} && {question.command}"):
            words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=.*", word)]
            if words and words[0] == "attnbench":
                name, *arguments = words[1:]
                PROGRAM.commands[name].make_context(name, arguments)
            for word in words:
                if word.endswith(".py") or ".py:" in word:
                    name = word.partition(":")[0]
                    assert (made.EXAMPLES / name).is_file()


def test_an_answer_replaces_the_one_before(made):
    text = "a\n<!-- begin 0 -->\n<!-- end 0 -->\nb\n<!-- begin 2 -->\nold\n<!-- end 2 -->\nc"
    assert made.page(text, {2: "new", 0: "here"}) == (
        "a\n<!-- begin 0 -->\n\nhere\n\n<!-- end 0 -->\nb\n<!-- begin 2 -->\n\nnew\n\n<!-- end 2 -->\nc"
    )
