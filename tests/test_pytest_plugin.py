"""The fixture for other projects' suites, in a separate pytest and called directly."""

import json
import os
import subprocess
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.nn.functional import scaled_dot_product_attention

import attnbench.api
from attnbench.pytest_plugin import MOST_SEEDS, AttentionBench, pytest_configure
from tests import forks
from tests.repositories import PLAIN

ROOT = Path(__file__).parents[1]
INSTALLED = entry_points(group="pytest11", name="attnbench")
PLUGIN = [] if INSTALLED else ["-p", "attnbench.pytest_plugin"]  # an installation registers it automatically
SMALL = {"seq_len": 8, "num_heads": 1, "head_dim": 8, "num_threads": 1}
SUITE = f"""{PLAIN}

AXES = dict(seq_len=32, num_heads=2, head_dim=16, num_threads=1)


def slow(query, key, value, *, mask=None):
    return [mine(query, key, value, mask=mask) for _ in range(8)][0]


def test_a_much_slower_one_is_slower(attention_bench, benchmark):
    found = attention_bench(slow, "sdpa", **AXES, mask="causal", budget_s=1.0)
    assert found.ratio > 2
    assert found.comparison.effect.num_processes >= 4
    assert benchmark.stats is not None


def test_that_fails(attention_bench):
    attention_bench("sdpa", "fused", **AXES, budget_s=0.0)
    raise ValueError("no")
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [forks.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    own = os.environ | {"PYTHONPATH": str(ROOT / "harness")}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=300)


def test_a_suite_of_ones_own_uses_the_engine_and_pytest_benchmark_in_a_few_lines(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    stored = f"--benchmark-storage={tmp_path / 'stored'}"
    options = [stored, "--benchmark-save=one", "--benchmark-save-data", "--attnbench-seed=7"]
    done = run_pytest(tmp_path, *PLUGIN, *options)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "The same inputs again: --attnbench-seed 7" in done.stdout
    assert "<sdpa: " in done.stdout  # the outcome, in the report of the test that fails
    (path,) = tmp_path.glob("stored/*/*_one.json")
    (entry,) = json.loads(path.read_text())["benchmarks"]
    assert len(entry["stats"]["data"]) >= 4
    assert all(value > 0 for value in entry["stats"]["data"])
    assert entry["extra_info"]["ratio"] > 2
    command = [forks.python(), "-m", "pytest_benchmark", f"--storage={tmp_path / 'stored'}", "compare"]
    read = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert read.returncode == 0, read.stderr
    assert "test_a_much_slower_one" in read.stdout


def seed_of(option=None):
    config = SimpleNamespace(option=SimpleNamespace(attnbench_seed=option))
    pytest_configure(config)
    return config.option.attnbench_seed


def test_each_session_draws_a_seed_unless_it_is_given_one():
    seeds = {seed_of() for _ in range(3)}
    assert len(seeds) > 1
    assert all(0 <= seed < MOST_SEEDS for seed in seeds)
    assert seed_of(option=0) == 0
    with pytest.raises(pytest.UsageError, match="--attnbench-seed -1 is not allowed: give 0 or more"):
        seed_of(option=-1)


def versions():
    """Build the new and the old version of a function, as from two modules; they are in no file."""
    found = []
    for _ in range(2):

        def attention(query, key, value, *, mask=None):
            return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value

        found.append(attention)
    return found


@pytest.mark.long
@pytest.mark.usefixtures("forked_workers")
def test_two_functions_of_one_name_are_compared_in_fresh_processes():
    new, old = versions()
    found = AttentionBench(seed=5)(new, old, budget_s=0.0, false_share=0.01, **SMALL)
    assert isinstance(found, attnbench.api.Outcome)
    assert (found.comparison.implementation, found.comparison.baseline) == ("attention (candidate)", "attention")
    assert found.verdicts.keys() == {"attention (candidate)"}
    assert found.comparison.effect.num_processes >= 4
    assert found.comparison.low < found.ratio < found.comparison.high
    assert (found.results.plan.seed, found.results.plan.false_share) == (5, 0.01)
    assert not found.folder.exists()


@pytest.mark.long
@pytest.mark.usefixtures("forked_workers")
def test_wrong_answers_and_wrong_use_are_reported():
    def wrong(query, key, value, mask):
        return scaled_dot_product_attention(query, key, value) * 1.5

    bench, new = AttentionBench(seed=5), versions()[0]
    with pytest.raises(AssertionError, match=r"is wrong on .* \(seed 6\)"):
        bench(wrong, new, budget_s=0.0, seed=6, **SMALL)
    with pytest.raises(ValueError, match="does not support"):
        bench("torch_mha", new, budget_s=0.0, **SMALL)
    with pytest.raises(ValueError, match=r"there is no axis seq_lenght .did you mean seq_len"):
        bench(new, seq_lenght=3)


@pytest.mark.parametrize("given", ["sdpa", "mine.py:mine", versions()[0], AttentionBench])
def test_nobody_is_compared_with_itself(given):
    with pytest.raises(ValueError, match="would be compared with itself"):
        AttentionBench(seed=5)(given, given)
