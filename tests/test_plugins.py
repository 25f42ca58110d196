"""Plugs: users' files are included; invalid ones are refused in words, and nothing is imported for that."""

import os
import re
import sys

import pytest

from attnbench import plugins
from attnbench.case import reason_against
from attnbench.checking.agreement import References, check
from attnbench.contract import loading
from attnbench.workloads.workload import Workload
from tests.repositories import PLAIN

FORMS = f"""{PLAIN.replace("mine", "function")}
import torch
from torch import nn
from attnbench.contract import Attention, Implementation

class Subclass(Attention):
    def attend(self, query, key, value, mask):
        return function(query, key, value, mask=mask.visible)

class Bare:
    def attend(self, query, key, value, mask=None):
        return function(query, key, value, mask=mask)

IMPLEMENTATION = Implementation(build=Subclass, source="a test")
number = 3
class Nothing: ...
"""


@pytest.fixture
def forms(tmp_path):
    file = tmp_path / "forms.py"
    file.write_text(FORMS)
    return file


@pytest.mark.parametrize("name", ["function", "Subclass", "Bare", "IMPLEMENTATION"])
def test_every_form_takes_part_and_agrees(forms, name):
    found = loading.implementation(f"{forms}:{name}")
    for scope in ("attention", "module"):
        workload = Workload(seq_len=9, num_heads=2, head_dim=4, mask="causal", scope=scope, direction="forward")
        assert reason_against(found, workload) is None
        assert check(References(workload, 0), found).agrees


def test_a_file_of_a_folder_of_implementations_says_what_is_unsupported(tmp_path):
    file = tmp_path / "implementations" / "mine.py"
    file.parent.mkdir()
    file.write_text("def attention(query, key, value): ...\ndef unsupported(workload): return 'on Sundays'\n")
    assert plugins.plug_in(file) == "attention"
    assert loading.implementation(f"{file}:attention").unsupported(Workload()) == "on Sundays"
    file.write_text(FORMS)
    assert plugins.plug_in(file) == plugins.plug_in(tmp_path / "none.py") == "IMPLEMENTATION"


@pytest.mark.parametrize(("name", "said"), [("number", "is an int: give"), ("Nothing", "(docs/adapters.md)")])
def test_what_cannot_take_part_is_reported_what_could(forms, name, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        loading.implementation(f"{forms}:{name}")


def test_names_come_from_the_file_or_the_value(tmp_path):
    file = tmp_path / "a+b.py"
    file.write_text(FORMS)
    specs = ["sdpa", f"{file}:function", f"{file}:function+compile", f"{file}:IMPLEMENTATION"]
    assert [plugins.name_of(spec) for spec in specs] == ["sdpa", "function", "function+compile", "a+b"]
    plugins.check_specs(specs)


def test_specs_are_checked_without_running_the_file(tmp_path):
    file = tmp_path / "bomb.py"
    file.write_text("raise SystemExit('imported')\ndef attend(query, key, value): ...\n")
    plugins.check_specs([f"{file}:attend"])
    with pytest.raises(ValueError, match="did you mean attend"):
        plugins.check_specs([f"{file}:atend"])
    file.write_text("def broken(:\n")
    with pytest.raises(ValueError, match="not valid Python"):
        plugins.check_specs([f"{file}:broken"])


def test_two_implementations_cannot_share_a_name(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same.py").write_text("def f(query, key, value): ...\n")
    with pytest.raises(ValueError, match="would share the name f"):
        plugins.check_specs([f"{tmp_path}/one/same.py:f", f"{tmp_path}/two/same.py:f"])
    clash = tmp_path / "sdpa.py"
    clash.write_text("IMPLEMENTATION = None\n")
    with pytest.raises(ValueError, match="would share the name sdpa"):
        plugins.check_specs([f"{clash}:IMPLEMENTATION"])


def test_an_installed_package_takes_part_by_its_entry_point(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text(FORMS)
    info = tmp_path / "elsewhere-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[attnbench.implementations]\ntheirs = elsewhere:IMPLEMENTATION\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert "theirs" in plugins.implementation_names()
        plugins.check_specs(["theirs"])
        assert loading.implementation("theirs").source == "a test"
    finally:
        sys.modules.pop("elsewhere", None)


def test_a_file_that_is_edited_within_a_second_is_the_new_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "mine.py"
    for number in (1, 2):
        file.write_text(f"NUMBER = {number}\n")
        os.utime(file, (0, 0))
        assert plugins.load(f"{file}:NUMBER") == number
    assert not (tmp_path / "__pycache__").exists()
