"""The Python interface: one sorted list of names, each with an example that runs, and what they do."""

import doctest
import inspect
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from torch import nn

import attnbench
from attnbench.api import Outcome
from tests import journals, liars

pytestmark = pytest.mark.usefixtures("forked_workers")

ROOT = Path(__file__).parents[1]
SMALL = {"seq_len": 16, "num_heads": 2, "head_dim": 8, "num_threads": 1}


def closure(factor):
    """Return a function that is in no file."""

    def mine(query, key, value):
        return factor * nn.functional.scaled_dot_product_attention(query, key, value)

    return mine


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_a_name_and_a_value_are_checked():
    right = attnbench.check(closure(1.0), **SMALL)
    assert right.verdict == "right", right.results.records
    assert [workload.seq_len for workload in right.results.plan.workloads] == [16]
    wrong = attnbench.check(closure(1.25), "fused", **SMALL)
    assert wrong.verdicts == {"mine": "WRONG", "fused": "right"}
    assert "is 1.25 times what it should be" in repr(wrong)
    with pytest.raises(ValueError, match="there are 2 verdicts"):
        _ = wrong.verdict


def test_a_function_of_a_file_is_named_by_it():
    found = attnbench.check(liars.wrong, mask="causal", **SMALL)
    assert found.verdict == "WRONG"
    assert found.results.plan.implementations[0].endswith("liars.py:wrong")
    assert "is 1.01 times what it should be" in " ".join(found.answer)


def test_two_are_compared_and_everything_is_stored(tmp_path):
    found = attnbench.compare(closure(1.0), "einsum", budget=0.0, **SMALL | {"seq_len": [16, 32]})
    assert found.results.plan.baseline == "einsum"  # the last
    # A busy machine may disturb every block, so that nothing is compared.
    assert found.verdict in {"faster", "slower", "equivalent", "undecided", "not compared"}
    assert {workload.seq_len for workload in found.results.plan.workloads} == {16, 32}
    assert len(found.to_frame()) == 4
    assert found.folder.parent == tmp_path.joinpath("results", "runs").relative_to(tmp_path)
    again = attnbench.load(found.folder.name)
    assert again.verdicts == found.verdicts
    assert repr(again) == repr(found)
    assert len(attnbench.table("results")) == 4


def test_the_wrong_one_of_two_is_not_timed():
    found = attnbench.compare(closure(1.25), budget=0.0, **SMALL)
    assert found.verdict == "WRONG"
    assert any(line.startswith("mine: ") for line in found.answer)


def test_an_outcome_is_shown_and_drawn(tmp_path):
    journals.write(tmp_path / "run", journals.workloads(seq_len=(128, 512)), ("sdpa", "fused", "<b>"))
    found = attnbench.load(tmp_path / "run")
    shown = found._repr_html_()
    assert "&lt;b&gt;" in shown
    assert "<b>:" not in shown
    assert "sdpa" in repr(found)
    assert found.plot("latency").save("a.png").read_bytes().startswith(b"\x89PNG")
    assert found.plot()._repr_png_().startswith(b"\x89PNG")
    assert "<svg " in found.plot("ratio").save("a.svg").read_text()
    with pytest.raises(ValueError, match=r"there is no plot speed; choose among"):
        found.plot("speed")
    with pytest.raises(ValueError, match=r"end its name with"):
        found.plot().save("a.gif")


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: attnbench.check("fusde"), "did you mean fused"),
        (lambda: attnbench.compare("fused", length=3), "did you mean"),
        (lambda: attnbench.run("qiuck"), "did you mean quick"),
        (lambda: attnbench.load("nothing"), "there is no run nothing"),
    ],
)
def test_a_mistake_says_what_is_allowed(call, said):
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.long
def test_a_script_that_defines_and_compares_is_not_run_again_by_its_workers(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import attnbench
        from torch.nn import functional as F

        def mine(query, key, value):
            return F.scaled_dot_product_attention(query, key, value)

        open("runs.txt", "a").write("once\\n")
        found = attnbench.run("quick", mine, "sdpa", budget=0, scope="attention", dtype="float32", seq_len=128)
        print(found.verdict, (found.folder / "report.html").exists())
        """)
    )
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "True"
    assert (tmp_path / "runs.txt").read_text() == "once\n"


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


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_example_in_the_docstring_runs(name, tmp_path):
    stored = tmp_path / "stored"
    journals.write(stored, journals.workloads(seq_len=(128,), scope=("attention",)), ("sdpa", "fused"))
    runner = doctest.DocTestRunner(verbose=False)
    for test in EXAMPLES[name]:
        test.globs = {"attnbench": attnbench, "stored": stored}
        runner.run(test)
    assert runner.failures == 0
    assert runner.tries > 0
