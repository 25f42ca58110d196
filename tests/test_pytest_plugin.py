"""The fixture for other projects' suites, and our own suite of pytest-benchmark, each in a separate pytest."""

import itertools
import json
import os
import re
import shutil
import subprocess
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.nn.functional import scaled_dot_product_attention

import attnbench.api
from attnbench import devices
from attnbench.devices import Clock, waiting
from attnbench.devices.cpu import Cpu
from attnbench.pytest_plugin import (
    MOST_SEEDS,
    AttentionBench,
    _contenders,
    pytest_assertrepr_compare,
    pytest_configure,
)
from attnbench.pytest_suite.conftest import Cell, ReplayClock, chosen
from attnbench.storage.records import Counters
from attnbench.workloads.workload import Workload
from tests import forks


@pytest.fixture(autouse=True)
def quiet_processors() -> None:
    """Restore the real rule: each test here sets the load."""


ROOT = Path(__file__).parents[1]
INSTALLED = entry_points(group="pytest11", name="attnbench")
PLUGIN = [] if INSTALLED else ["-p", "attnbench.pytest_plugin"]  # an installation registers it automatically
CAN_DRAW = find_spec("pygal") is not None

SUITE = """
import pytest
import torch

AXES = dict(seq_len=32, num_heads=2, head_dim=16, num_threads=1)


def mine(query, key, value, *, mask=None):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    for _ in range(30):
        scores.softmax(-1)
    return scores.softmax(-1) @ value


def wrong(query, key, value, *, mask=None):
    return mine(query, key, value, mask=mask) * 1.01


def test_a_much_slower_one_is_slower(attention_bench):
    found = attention_bench(mine, "sdpa", **AXES, mask="causal")
    assert found.verdict == "slower"
    assert found.ratio > 2
    assert found.low < found.ratio < found.high


def test_a_wrong_one_is_reported(attention_bench):
    with pytest.raises(AssertionError, match="wrong is wrong on .*seed 7"):
        attention_bench(wrong, "fused", **AXES)
    with pytest.raises(AssertionError, match="seed 8"):
        attention_bench(wrong, "fused", **AXES, seed=8)


def test_that_fails(attention_bench):
    raise ValueError("no")


def test_wrong_use_is_reported(attention_bench):
    with pytest.raises(ValueError, match="compared with itself"):
        attention_bench("sdpa", "sdpa", **AXES)
    with pytest.raises(ValueError, match="does not support"):
        attention_bench("torch_mha", **AXES)
    with pytest.raises(ValueError, match="there is no axis seq_lenght .did you mean seq_len"):
        attention_bench(mine, seq_lenght=3)
"""


def run_pytest(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [forks.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    own = os.environ | {"PYTHONPATH": str(ROOT / "harness")}
    return subprocess.run(command, cwd=folder, env=own, capture_output=True, text=True, check=False, timeout=300)


def test_a_suite_of_ones_own_uses_the_engine_in_a_few_lines(tmp_path):
    (tmp_path / "test_mine.py").write_text(SUITE, encoding="utf-8")
    patch = "from attnbench.analysis import comparisons\n\ncomparisons.MOST_WAITING = 1.0  # others may be at work\n"
    (tmp_path / "conftest.py").write_text(patch, encoding="utf-8")
    done = run_pytest(tmp_path, *PLUGIN, f"--benchmark-storage={tmp_path}", "--attnbench-seed=7")
    assert "1 failed, 3 passed" in done.stdout, done.stdout + done.stderr
    assert "The same inputs again: --attnbench-seed 7" in done.stdout


def seed_of(option=None, ini=""):
    """Return the seed of a session with these settings."""
    config = SimpleNamespace(option=SimpleNamespace(attnbench_seed=option), getini={"attnbench_seed": ini}.get)
    pytest_configure(config)
    return config.option.attnbench_seed


def test_each_session_draws_a_seed_unless_it_is_given_one():
    seeds = {seed_of() for _ in range(3)}
    assert len(seeds) > 1
    assert all(0 <= seed < MOST_SEEDS for seed in seeds)
    assert seed_of(ini="5") == 5
    assert seed_of(option=0, ini="5") == 0
    with pytest.raises(pytest.UsageError, match="attnbench_seed=-1 is not allowed: give a whole number, 0 or more"):
        seed_of(option=-1)


def versions():
    """Build the new and the old version of a function, as from two modules."""
    found = []
    for _ in range(2):

        def attention(query, key, value, *, mask=None):
            return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value

        found.append(attention)
    return found


SMALL = {"seq_len": 8, "num_heads": 1, "head_dim": 8, "num_threads": 1}


def test_two_functions_of_one_name_are_compared_and_the_candidate_is_called_so():
    new, old = versions()
    found = AttentionBench(seed=0)(new, old, budget_s=0.0, **SMALL)
    (compared,) = found.comparisons
    assert (compared.implementation, compared.baseline) == ("attention (candidate)", "attention")
    assert found.verdicts.keys() == {"attention (candidate)"}


def test_the_outcome_is_that_of_the_python_interface():
    new, old = versions()
    found = AttentionBench(seed=5)(new, old, budget_s=0.0, false_share=0.01, **SMALL | {"seq_len": [8, 16]})
    assert isinstance(found, attnbench.api.Outcome)
    assert found.verdict in {"faster", "slower", "equivalent", "undecided"}
    frame = found.to_frame()
    assert sorted(frame["seq_len"]) == [8, 8, 16, 16]
    assert frame["latency_s"].gt(0).all()
    assert found.plot() is not None
    assert "<li>" in found._repr_html_()
    assert (found.results.plan.seed, found.results.plan.false_share) == (5, 0.01)
    with pytest.raises(ValueError, match="there are 2 comparisons: see `comparisons`"):
        _ = found.ratio


@pytest.mark.parametrize(("others_s", "is_doubtful"), [(0.0, False), (4.0, True)])
def test_other_work_on_the_machine_is_the_first_thing_said(monkeypatch, others_s, is_doubtful):
    spent = iter([(100.0, 50.0, 10.0), (110.0, 50.0, 20.0 - others_s)])

    def counters() -> Counters:
        total_s, idle_s, own_s = next(spent)
        return Counters(began_s=1.0, total_s=total_s, idle_s=idle_s, stolen_s=0.0, own_s=own_s, free_bytes=2**30)

    monkeypatch.setattr(devices, "read_counters", counters)
    monkeypatch.setattr(waiting, "OWN", Path("/nothing"))  # else samples would include the contention
    found = AttentionBench(seed=5)(*versions(), budget_s=0.0, **SMALL)
    assert ("CPU contention" in found.answer[0]) is is_doubtful
    assert ("doubtful" in found.answer[-1]) is is_doubtful
    assert ("CPU contention" in found.verdict.evidence[0]) is is_doubtful


class Counting(Clock):
    """A call that takes a tenth of a millisecond plus the steps of the function under test."""

    resolution_s = 1e-9
    now_s = 0.0

    def now(self):
        return self.now_s

    def elapsed(self, call, num_calls):
        start_s = self.now_s
        for _ in range(num_calls):
            call()
            self.now_s += 1e-4
        return self.now_s - start_s


@pytest.fixture
def calm(monkeypatch):
    """Simulate a quiet machine on which a slow function takes twice as long, whatever the real one does."""
    clock = Counting()

    def slow(query, key, value, mask):
        clock.now_s += 1e-4
        return scaled_dot_product_attention(query, key, value)

    monkeypatch.setattr(Cpu, "clock", property(lambda _: clock, lambda *_: None), raising=False)
    monkeypatch.setattr(devices, "read_counters", lambda: None)
    monkeypatch.setattr(waiting, "waits_s", lambda _: 0.0)
    return slow


@pytest.mark.parametrize(("step_s", "verdict"), [(0.0, "slower"), (1.0, "undecided")])
def test_a_time_that_waited_for_a_processor_has_no_verdict(calm, monkeypatch, step_s, verdict):
    """As with a busy neighbour, for which two threads wait at each barrier."""
    readings = itertools.count()
    monkeypatch.setattr(waiting, "waits_s", lambda _: step_s * next(readings))
    found = AttentionBench(seed=5)(calm, versions()[0], budget_s=0.0, **SMALL)
    assert found.verdict == verdict
    if verdict == "slower":
        return
    assert "waited for a processor" in found.answer[0]
    assert "waited for a processor" in found.verdict.evidence[0]


def test_one_process_decides_nothing_small_and_names_what_does(calm):
    found = AttentionBench(seed=5)(*versions(), budget_s=0.0, **SMALL)
    assert found.verdict == "undecided"
    assert 'isolation="process"' in found.answer[-1]
    assert 'isolation="process"' in found.verdict.evidence[0]
    sure = AttentionBench(seed=5)(calm, versions()[0], budget_s=0.0, **SMALL)
    assert sure.verdict == "slower"
    assert "isolation" not in "".join(sure.answer)


@pytest.mark.usefixtures("forked_workers")
def test_fresh_processes_time_the_same_functions():
    """Pass them by value, as they are in no file that a process could import; with one name, as two versions have."""
    new, old = versions()
    found = AttentionBench(seed=5)(new, old, budget_s=0.0, isolation="process", **SMALL)
    assert found.comparison.implementation == "attention (candidate)"
    assert found.comparison.num_processes >= 4
    assert found.comparison.low < found.ratio < found.comparison.high
    samples = [sample for record in found.results.records for sample in record.samples("latency")]
    assert len({sample.epoch for sample in samples}) >= 4
    with pytest.raises(AssertionError, match=r"is wrong on .* \(seed 5\)"):
        AttentionBench(seed=5)(wrong, new, budget_s=0.0, isolation="process", **SMALL)
    with pytest.raises(ValueError, match="does not support"):
        AttentionBench(seed=5)("torch_mha", old, budget_s=0.0, isolation="process", **SMALL)


def wrong(query, key, value, mask):
    return scaled_dot_product_attention(query, key, value) * 1.5


@pytest.mark.usefixtures("calm")
def test_an_assertion_that_fails_prints_three_lines():
    verdict = AttentionBench(seed=5)(*versions(), budget_s=0.0, **SMALL).verdict
    first, *others = pytest_assertrepr_compare("!=", verdict, "slower")
    assert first == f"{verdict!r} != 'slower'"
    assert others == list(verdict.evidence)
    said, sure, again = others
    assert "undecided" in said
    assert "blocks discarded because of interference" in sure
    assert again == "The same inputs again: seed=5."
    assert pytest_assertrepr_compare("==", "faster", "slower") is None


@pytest.mark.parametrize("pair", [versions(), ("new.py:mine", "old.py:mine"), (lambda query: query, lambda key: key)])
def test_who_shares_a_name_is_distinguished(pair):
    candidate, baseline = pair
    (reference, first), (name, second) = _contenders(candidate, baseline).items()
    assert (first, second) == (baseline, candidate)
    assert reference != name


@pytest.mark.parametrize("given", ["sdpa", "mine.py:mine", versions()[0], AttentionBench])
def test_nobody_is_compared_with_itself(given):
    with pytest.raises(ValueError, match="would be compared with itself"):
        _contenders(given, given)


def run_suite(folder: Path, *options: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run our suite on a tiny sweep; all of its files go to `folder`."""
    sweep = folder / "tiny.toml"
    sweep.write_text('summary = "tiny"\n[[grid]]\nseq_len = 16\nnum_heads = 2\nnum_threads = 1\n', encoding="utf-8")
    asked = ["--attnbench-sweep", str(sweep), "--attnbench-set", "direction=inference"]
    asked += ["--attnbench-implementation", "fused", "--attnbench-implementation", "torch_mha"]
    asked += ["--attnbench-budget", "0", "--attnbench-results", str(folder), "--override-ini=addopts="]
    asked += [f"--benchmark-storage={folder / 'stored'}", "--benchmark-autosave", "--benchmark-save-data", "-rs"]
    return run_pytest(cwd, *PLUGIN, str(ROOT / "harness" / "attnbench" / "pytest_suite"), *asked, *options)


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    folder = tmp_path_factory.mktemp("suite")
    return folder, run_suite(folder)


@pytest.fixture(scope="module")
def again(stored, tmp_path_factory):
    """Run it once more: next to a copy of the stored results, and plotted if possible."""
    folder = tmp_path_factory.mktemp("again")
    shutil.copytree(stored[0] / "stored", folder / "stored")
    options = ["--benchmark-compare=0001", "-W", "default"]  # the clock's resolution may differ: a warning
    options += [f"--benchmark-histogram={folder / 'drawn' / 'plot'}"] if CAN_DRAW else []
    return folder, run_suite(folder, *options, cwd=folder)


def test_each_cell_is_a_test_of_pytest_benchmark(stored):
    folder, done = stored
    assert done.returncode == 0, done.stdout + done.stderr
    assert "has no attend" in done.stdout
    (path,) = (folder / "stored").glob("*/*.json")
    document = json.loads(path.read_text())
    assert "node" not in document["machine_info"]
    tests = {each["name"].split("[")[1].split("-")[0]: each for each in document["benchmarks"]}
    assert set(tests) == {"fused", "sdpa"}
    (journal,) = folder.glob("runs/*/journal.jsonl")
    assert tests["fused"]["extra_info"]["run"] == journal.parent.name
    assert tests["fused"]["extra_info"]["baseline"] == "sdpa"
    assert tests["fused"]["extra_info"]["peak_memory_bytes"] > 0


def test_the_rounds_are_the_samples_of_the_run(stored):
    folder, _ = stored
    (path,) = (folder / "stored").glob("*/*.json")
    rounds = {each["name"]: each["stats"]["data"] for each in json.loads(path.read_text())["benchmarks"]}
    taken = attnbench.samples(folder)
    taken = taken[taken["metric"] == "latency"]
    for name, data in rounds.items():
        own = taken[taken["implementation"] == name.split("[")[1].split("-")[0]]
        assert data == pytest.approx(own["value"].tolist())


def test_what_is_stored_can_be_compared_by_its_own_command(stored):
    folder, _ = stored
    command = [forks.python(), "-m", "pytest_benchmark", f"--storage={folder / 'stored'}", "compare"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "test_attention[fused-" in done.stdout


def test_a_later_run_is_compared_with_the_one_that_was_saved(again):
    folder, done = again
    assert done.returncode == 0, done.stdout + done.stderr
    saved = [json.loads(path.read_text()) for path in sorted((folder / "stored").glob("*/*.json"))]
    assert len(saved) == 2
    names = {each["name"] for document in saved for each in document["benchmarks"]}
    rows = re.findall(r"^(test_attention\S+) \((0001|NOW)", done.stdout, re.MULTILINE)
    assert sorted(rows) == sorted((name, source) for name in names for source in ("0001", "NOW"))


@pytest.mark.skipif(not CAN_DRAW, reason="needs pygal: pip install 'pytest-benchmark[histogram]'")
def test_a_histogram_is_drawn_for_each_workload(again):
    folder, done = again
    assert done.returncode == 0, done.stdout + done.stderr
    (path, *_) = (folder / "stored").glob("*/0002_*.json")
    groups = {each["group"] for each in json.loads(path.read_text())["benchmarks"]}
    assert {drawn.name for drawn in (folder / "drawn").iterdir()} == {f"plot-{group}.svg" for group in groups}
    for drawn in (folder / "drawn").iterdir():
        text = drawn.read_text(encoding="utf-8")
        assert "<svg" in text
        assert "test_attention[fused-" in text


def test_tests_beside_the_suite_may_have_parameters_of_their_own():
    cell = Cell(Workload(), "sdpa")
    parameters = [{"cell": cell}, {"number": 1}, {"cell": "of a table"}, {}]
    items = [SimpleNamespace(callspec=SimpleNamespace(params=each)) for each in parameters]
    assert chosen([*items, SimpleNamespace()]) == [cell]


def test_a_replayed_clock_ends_with_its_samples():
    clock = ReplayClock()
    clock.load([0.5, 0.25])
    seen = []
    for _ in range(3):
        start = clock()
        clock.play()
        seen.append(clock() - start)
    assert seen == [0.5, 0.25, 0.0]


def test_a_wrong_option_is_one_line(tmp_path):
    suite = str(ROOT / "harness" / "attnbench" / "pytest_suite")
    done = run_pytest(ROOT, *PLUGIN, suite, "--attnbench-sweep", "nothing", "--override-ini=addopts=", "--co")
    assert done.returncode != 0
    assert "nothing" in done.stdout + done.stderr
