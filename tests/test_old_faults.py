"""The faults of tests/old_faults.toml fit today's source, and the gallery lists each; their session runs them."""

import msgspec
import pytest

from tests import old_faults
from tests.old_faults import ROOT, Change

FAULTS = old_faults.faults()
FIRST = next(fault for fault in FAULTS if fault.change[0].file.endswith("devices/cuda.py"))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.test.partition("::")[2])
def test_a_fault_applies_once_and_changes_something(fault):
    for path, text in old_faults.changed(fault, ROOT).items():
        assert text != path.read_text(encoding="utf-8")
    file, _, name = fault.test.partition("::")
    assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8")


@pytest.mark.parametrize(("now", "number"), [("nowhere to be found\n", 0), ("        import torch\n", "")])
def test_a_text_that_is_not_there_once_is_an_error_that_names_the_file(now, number):
    fault = msgspec.structs.replace(FIRST, change=(Change(file=FIRST.change[0].file, now=now, was=""),))
    with pytest.raises(ValueError, match=rf"cuda\.py has this {number}\d* times, not once"):
        old_faults.changed(fault, ROOT)


def test_a_file_is_as_before_when_its_fault_is_gone(tmp_path):
    file = tmp_path / FIRST.change[0].file
    file.parent.mkdir(parents=True)
    file.write_text((ROOT / FIRST.change[0].file).read_text(encoding="utf-8"), encoding="utf-8")
    before = file.read_bytes(), file.stat().st_mtime_ns
    with old_faults.planted(FIRST, tmp_path):
        assert FIRST.change[0].was in file.read_text(encoding="utf-8")
        assert FIRST.change[0].now not in file.read_text(encoding="utf-8")
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


@pytest.mark.parametrize(
    ("output", "error", "wrong"),
    [
        ("FAILED a.py::b - assert 1 == 2", "", ""),
        ("FAILED a.py::b - ValueError: no index", "ValueError: no", ""),
        ("1 passed in 1 s", "", "passes with the fault"),
        ("FAILED a.py::b - ImportError: cannot import name", "", "but not by an assertion"),
        ("FAILED a.py::b[1] - assert 0\nFAILED a.py::b[2] - NameError: x", "", "but not by an assertion: NameError"),
        ("ERROR a.py::b - NameError: name 'x' is not defined", "", "did not run"),
    ],
)
def test_a_test_must_fail_by_an_assertion_or_by_the_error_of_the_fault(output, error, wrong):
    fault = msgspec.structs.replace(FIRST, error=error)
    objection = old_faults.objection(fault, f"\n{output}\n1 failed in 1 s")
    assert bool(objection) == bool(wrong)
    assert wrong in objection


def test_the_page_has_every_fault():
    (block,) = old_faults.BLOCK.findall(old_faults.PAGE.read_text(encoding="utf-8"))
    assert block == old_faults.table(), "run: python -m tests.old_faults"
