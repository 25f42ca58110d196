"""The display of an inspection: aligned, safe for any words, with the right exit code."""

import io
import json
import math
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.inspection import page, text
from attnbench.inspection.oracle_diff import look
from attnbench.reports import style
from tests.test_cli import command

TIME, FRUIT = "time flies like an arrow", "fruit flies like a banana"
SLIPS = Path(__file__).with_name("slips.py")
EVIL = 'fruit <script>alert(1)</script> "quoted" & \x1b[31mred [bold]not[/bold]'


@pytest.fixture
def undrawn(monkeypatch):
    """Save empty pictures, in tests of other things: drawing takes most of an inspection's time."""
    monkeypatch.setattr(style, "_drawn", lambda *_, **__: b"<svg />")


def found_in(name, *sentences, settings=()):
    return look(f"{SLIPS}:{name}", sentences or [TIME], settings)


def shown(found, width=100):
    file = io.StringIO()
    text.write(found, Console(width=width, file=file))
    return file.getvalue()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.texts = set(), []

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def test_words_from_outside_are_harmless_and_shown_as_they_are(tmp_path):
    found = found_in("raising", EVIL)
    paths = page.write(found, tmp_path)
    source = paths[0].read_text()
    tags = Tags()
    tags.feed(source)
    assert not tags.names & {"script", "img", "link", "iframe"}
    assert any("<script>alert(1)</script>" in reported for reported in tags.texts)
    assert any("out of <ideas>" in reported for reported in tags.texts)
    assert "\x1b" not in source
    reported = shown(found)
    assert "\x1b" not in reported
    assert "[bold]not" in reported
    assert "<svg " in source


@pytest.mark.usefixtures("undrawn")
def test_a_page_takes_the_place_of_an_earlier_one(tmp_path):
    two = page.write(look("fused", [TIME, FRUIT]), tmp_path)
    assert tmp_path / "beside.png" in two
    page.prepare(tmp_path)
    page.write(look("torch_mha", [TIME]), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"inspect.html", "weights.png"}


def test_tables_are_aligned_and_fit_the_terminal():
    reported = shown(look("fused", ["all of it is attention", "a b c d"]), width=80)
    assert all(len(line) <= 80 for line in reported.splitlines())
    table = text.step_tables(look("fused", [TIME]).walks[0], "weights")[0]
    assert len({len(line) for line in table.lines(200)[2:]}) == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([[1.5, -0.25]], [["1.50", "-0.25"]]),
        ([[0.5, 0.0]], [["0.500", "0"]]),
        ([[-math.inf, 123.4]], [["-inf", "123"]]),
        ([[math.nan, 1e-7]], [["nan", "1.00e-07"]]),
        ([[2e6, -1.0]], [["2.00e+06", "-1.00e+00"]]),
        ([[3.0, -0.001]], [["3.00", "0.00"]]),
    ],
)
def test_numbers_have_as_many_digits_as_they_need(values, expected):
    assert text.formatted(np.array(values)) == expected


def test_the_command_prints_and_draws(tmp_path):
    found = command("inspect", "--sentence", TIME, "--sentence", FRUIT, "--set", "num_heads=1", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    assert "fused agrees with the oracle" in found.stdout
    assert {"inspect.html", "weights.png", "beside.png"} <= {
        p.name for p in (tmp_path / "results/inspect/fused").iterdir()
    }


@pytest.mark.usefixtures("undrawn")
def test_the_command_exits_as_it_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\ndef f(query, key, value): ...\n")
    wrong = CliRunner().invoke(app, ["inspect", f"{SLIPS}:leaving", "--to", "pages/mine", "--json"])
    assert wrong.exit_code == 1
    reported = json.loads(wrong.stdout)
    assert "SystemExit" in reported["first_difference"][0]
    assert all((tmp_path / file).exists() for file in reported["files"])
    assert CliRunner().invoke(app, ["inspect", "broken.py:f"]).exit_code == 1
    assert CliRunner().invoke(app, ["inspect", f"{SLIPS}:unmasked"]).exit_code == 3


@pytest.mark.parametrize(
    "arguments", [["--sentence", ""], ["fusde"], ["--set", "num_heads=3", "--set", "embed_dim=8"], ["--to", "file/x"]]
)
def test_a_mistake_is_reported_in_one_line(tmp_path, monkeypatch, arguments):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=r"^[^\n]+$"):
        CliRunner().invoke(app, ["inspect", *arguments], catch_exceptions=False)
