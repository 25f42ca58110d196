"""The check finds mistakes planted in copies of our implementations, and describes them as the catalogue does."""

import importlib.util
from pathlib import Path

import pytest
import torch

from attnbench.checking.agreement import check
from attnbench.checking.mistakes import catalogue
from attnbench.contract.loading import from_module
from tests.checks import references
from tests.implementations.edits import BY_TILES, EDITS

ROOT = Path(__file__).parents[2]
RIGHT = sorted({(each.values[0], each.values[2]) for each in EDITS}, key=str)


def copied(folder, file, changed):
    text = (ROOT / "implementations" / f"{file}.py").read_text(encoding="utf-8")
    for old, new in ([BY_TILES] if file == "chunked" else []) + list(changed.items()):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / f"copy_of_{file}.py"
    copy.write_text(text, encoding="utf-8")
    return copy


def judged(copy, point):
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = from_module(module, copy.stem.removeprefix("copy_of_"))
    assert found.unsupported(point) is None
    return check(references(point), found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("file", "changed", "point", "name", "reported"), EDITS)
def test_a_planted_mistake_is_found_and_reported(file, changed, point, name, reported, tmp_path):
    found = judged(copied(tmp_path, file, changed), point)
    assert not found.agrees
    assert set(found.mistakes) == ({name} if name else set()), found.diagnosis
    assert reported in found.diagnosis
    # the catalogue's description up to the colon; the effect after it may be given in numbers
    known = [each.words.partition(":")[0] for each in catalogue(point) if each.name == name]
    assert not known or any(words in found.diagnosis for words in known), found.diagnosis


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("file", "point"), RIGHT, ids=[f"{file}-{point.id}" for file, point in RIGHT])
def test_the_copy_as_it_is_agrees(file, point, tmp_path):
    assert judged(copied(tmp_path, file, {}), point).agrees
