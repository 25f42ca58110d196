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
from attnbench.inspection import text
from attnbench.inspection.oracle_diff import look

TIME, FRUIT = "time flies like an arrow", "fruit flies like a banana"
SLIPS = Path(__file__).with_name("slips.py")
EVIL = 'fruit <script>alert(1)</script> "quoted" & \x1b[31mred [bold]not[/bold]'


def shown(found, width=100):
    file = io.StringIO()
    text.write(found, Console(width=width, file=file))
    return file.getvalue()


class Tags(HTMLParser):
    def __init__(self):
        super().__init__()
        self.names, self.texts, self.shades = set(), [], set()

    def handle_starttag(self, tag, attrs):
        self.names.add(tag)
        self.shades |= {value for name, value in attrs if name == "style"}
        assert not [name for name, _ in attrs if name.startswith("on")]

    def handle_data(self, data):
        self.texts.append(data)


def test_words_from_outside_are_harmless_and_shown_as_they_are(tmp_path):
    found = look(f"{SLIPS}:raising", [EVIL])
    source = text.write_page(found, tmp_path).read_text()
    tags = Tags()
    tags.feed(source)
    assert not tags.names & {"script", "img", "link", "iframe"}
    assert any("<script>alert(1)</script>" in text for text in tags.texts)
    assert any("out of <ideas>" in text for text in tags.texts)
    assert "\x1b" not in source
    printed = shown(found)
    assert "\x1b" not in printed
    assert "[bold]not" in printed


def test_the_page_shows_every_step_and_shades_the_weights(tmp_path):
    found = look("fused", [TIME], ["mask=none"])
    tags = Tags()
    tags.feed(text.write_page(found, tmp_path).read_text())
    walk = found.diffs[0].walk
    weights = text.step_tables(walk, "weights")
    assert {text for table in weights for row in table.rows for text in row} <= set(tags.texts)
    assert all(walk.shape(name) in tags.texts for name in walk.steps)
    assert f"background: rgba(86, 180, 233, {walk.steps['weights'].max():.2f})" in tags.shades
    assert not text.step_tables(walk, "scores")[0].shades


def test_tables_are_aligned_and_fit_the_terminal():
    printed = shown(look("fused", ["all of it is attention", "a b c d"]), width=80)
    assert all(len(line) <= 80 for line in printed.splitlines())
    table = text.step_tables(look("fused", [TIME]).diffs[0].walk, "weights")[0]
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


def test_the_command_prints_writes_a_page_and_exits_by_its_finding(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\ndef f(query, key, value): ...\n")
    right = CliRunner().invoke(app, ["inspect", "--sentence", TIME, "--sentence", FRUIT, "--set", "num_heads=1"])
    assert right.exit_code == 0
    assert "fused agrees with the oracle" in right.stdout
    assert FRUIT in (tmp_path / "results/inspect/fused/inspect.html").read_text()
    wrong = CliRunner().invoke(app, ["inspect", f"{SLIPS}:leaving", "--to", "pages/mine", "--json"])
    assert wrong.exit_code == 1
    printed = json.loads(wrong.stdout)
    assert "SystemExit" in printed["first_difference"][0]
    assert all((tmp_path / file).exists() for file in printed["files"])
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
