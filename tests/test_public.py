"""The public surface: one sorted list of names, each with an example that runs."""

import doctest
import inspect
from pathlib import Path

import pytest

import attnbench
from attnbench.api import Outcome
from tests import journals

ROOT = Path(__file__).parents[1]
PUBLIC = ["check", "compare", "fastest", "load", "run", "samples", "table"]
"""A name that goes, or changes what it does, needs a line in CHANGELOG.md under Removed or Changed."""


def test_the_list_of_public_names_is_frozen_and_sorted():
    assert attnbench.__all__ == PUBLIC == sorted(PUBLIC)
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    assert [name for name in PUBLIC if f"`{name}(" not in text and f"attnbench.{name}(" not in text] == []
    with pytest.raises(AttributeError, match="no attribute 'chec_k'"):
        _ = attnbench.chec_k


DOCUMENTED = {"Outcome": Outcome} | {name: getattr(attnbench, name) for name in PUBLIC}
EXAMPLES = {
    name: doctest.DocTestFinder(recurse=False).find(each, name, module=False) for name, each in DOCUMENTED.items()
}


def test_every_public_function_has_an_example_and_no_other_docstring_has_one():
    for name, found in EXAMPLES.items():
        assert any(test.examples for test in found), name
        assert not [line for line in inspect.getdoc(DOCUMENTED[name]).splitlines() if len(line) > 120]
    run = sum(len(test.examples) for found in EXAMPLES.values() for test in found)
    files = (path.read_text(encoding="utf-8") for path in (ROOT / "harness").rglob("*.py"))
    assert sum(text.count(" >>> ") for text in files) == run, "an example that no test runs"


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_in_the_docstring_runs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    stored = tmp_path / "stored"
    journals.write(stored, journals.workloads(seq_len=(128,), scope=("attention",)), ("sdpa", "fused"))
    runner = doctest.DocTestRunner(verbose=False)
    for test in EXAMPLES[name]:
        test.globs = {"attnbench": attnbench, "stored": stored}
        runner.run(test)
    assert runner.failures == 0
    assert runner.tries > 0
