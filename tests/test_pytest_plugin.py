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
from attnbench.storage.records import Status
from tests import forks, journals
from tests.analysis.gate import scripts
from tests.repositories import PLAIN

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
INSTALLED = entry_points(group="pytest11", name="attnbench")
PLUGIN = [] if INSTALLED else ["-p", "attnbench.pytest_plugin"]  # an installation registers it automatically
SMALL = {"seq_len": 8, "num_heads": 1, "head_dim": 8, "num_threads": 1}
SUITE = f"""{PLAIN}

AXES = dict(seq_len=32, num_heads=2, head_dim=16, num_threads=1)


def slow(query, key, value, *, mask=None):
    return [mine(query, key, value, mask=mask) for _ in range(8)][0]


def test_a_much_slower_one_is_slower(attention_bench, benchmark):
    found = attention_bench(slow, "sdpa", **AXES, mask="causal", budget_s=30.0)
    assert found.ratio > 2
    assert found.comparison.effect.num_processes >= 4
    assert benchmark.stats is not None


def test_of_a_planted_slowdown(attention_bench):
    attention_bench(slow, "sdpa", **AXES, budget_s=30.0).require_not_slower()


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
    is_listed = "test_mine.py::test_of_a_planted_slowdown: slow on T=32: " in done.stdout  # beside a busy neighbour
    assert ("1 failed, 2 passed" if is_listed else "2 failed, 1 passed") in done.stdout, done.stdout + done.stderr
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


UNDECIDED = "undecided comparison"
REQUIRED = """
import pytest


def test_speed(attention_bench):
    attention_bench("fused", "sdpa").require_not_slower({chosen})
"""
OLD_FORM = """
def test_speed(attention_bench):
    assert attention_bench("fused", "sdpa").verdict != "slower"
"""
TIMES = {"equal": 1.0, "slower": 1.1, "faster": 0.9, "unclear": 1.0, "disturbed": 3.0}
"""The time of `fused` if that of `sdpa` is 1: `unclear` ones vary between processes, the last is disturbed."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Outcomes of simulated comparisons whose truth is known, by name."""
    points = journals.workloads(seq_len=(128,), scope=("attention",), direction=("inference",))
    found = {}
    for name, ratio in TIMES.items():
        changes = {"unclear": [scripts.shaken], "disturbed": [scripts.disturbed]}.get(name, [])
        times = {"sdpa": 1e-3, "fused": ratio * 1e-3}
        asked = {"names": tuple(times), "points": points, "time_of": lambda _, arm, times=times: times[arm]}
        results = scripts.run(tmp_path_factory.mktemp("measured") / name, *changes, **asked)
        found[name] = attnbench.api.outcome(results)
        assert len(found[name].undecided) == (name in {"unclear", "disturbed"})  # imports what it needs, too
    return found


@pytest.fixture
def suite(pytester, monkeypatch, measured):
    """Run a test whose comparison ends as one of `measured`, in a pytest of its own."""

    def run(text, name, *arguments):
        monkeypatch.setattr(attnbench.api, "compare", lambda *_, **__: measured[name])
        pytester.makepyfile(text)
        return pytester.runpytest_inprocess(*PLUGIN, "-p", "no:benchmark", "-W", "default", *arguments)

    return run


@pytest.mark.parametrize("chosen", ["", "pytest.skip", "pytest.fail"])
@pytest.mark.parametrize(("name", "ends"), [("equal", "passed"), ("faster", "passed"), ("slower", "failed")])
def test_a_decided_comparison_passes_or_fails(suite, name, ends, chosen):
    done = suite(REQUIRED.format(chosen=chosen), name)
    done.assert_outcomes(**{ends: 1})
    assert UNDECIDED not in done.stdout.str()
    if name == "slower":
        done.stdout.fnmatch_lines(["E*AssertionError: fused on T=128: 1.10*x slower than sdpa (*)"])


@pytest.mark.parametrize(
    ("chosen", "ends"),
    [("", {"passed": 1, "warnings": 1}), ("pytest.skip", {"skipped": 1}), ("pytest.fail", {"failed": 1})],
)
@pytest.mark.parametrize(
    ("name", "reason"), [("unclear", "interval too wide"), ("disturbed", "other work disturbed the machine")]
)
def test_an_undecided_comparison_warns_skips_or_fails_and_is_always_listed(suite, chosen, ends, name, reason):
    done = suite(REQUIRED.format(chosen=chosen), name, "-rs")
    done.assert_outcomes(**ends)
    sentence = f"fused on T=128: *x * than sdpa*, undecided: {reason}*"
    done.stdout.fnmatch_lines([f"*= attnbench: 1 {UNDECIDED} =*", f"*::test_speed: {sentence}"])
    assert done.stdout.str().count(f", undecided: {reason}") >= 2  # as a warning or a reason, too


def test_an_undecided_comparison_names_the_budget_that_may_decide_it(tmp_path):
    points = journals.workloads(seq_len=(512,))
    found = attnbench.api.outcome(journals.write(tmp_path / "run", points, ("sdpa", "fused"), num_epochs=3))  # 119 s
    assert found.undecided[0].endswith("undecided: too few processes; a budget of 159 s (4 processes) may decide it")


@pytest.mark.parametrize("arguments", [(), ("-q", "-p", "xdist", "-n1")])
def test_a_slowdown_that_a_busy_machine_hides_is_listed_whatever_the_test_asserts(suite, pytester, measured, arguments):
    if arguments:  # another process: the comparison is replaced there, too
        pytester.makeconftest(
            "import attnbench.api\n"
            f"attnbench.api.compare = lambda *_, **__: attnbench.api.load({str(measured['disturbed'].folder)!r})\n"
        )
    done = suite(OLD_FORM, "disturbed", *arguments)
    done.assert_outcomes(passed=1)
    done.stdout.fnmatch_lines([f"*= attnbench: 1 {UNDECIDED} =*", "*::test_speed: fused on T=128: *"])


def test_what_could_not_be_compared_is_not_passed(tmp_path):
    crash = scripts.ends(Status.crashed, "killed by signal 9")
    found = attnbench.api.outcome(scripts.run(tmp_path / "run", crash, names=("sdpa", "einsum", "fused")))
    with pytest.raises(AssertionError, match=r"fused on .*T=128: not compared \(crashed: killed by signal 9\)$"):
        found.require_not_slower()


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
