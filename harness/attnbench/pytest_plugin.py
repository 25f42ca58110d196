"""The pytest fixture `attention_bench`, which checks and times attention inside your own test suite.

    def test_mine_is_no_slower(attention_bench):
        found = attention_bench(my_attention, "sdpa", seq_len=512, mask="causal", budget_s=30.0)
        found.require_not_slower()

The end of pytest's output lists each undecided comparison, whatever the test asserts.

Pytest loads the fixture automatically if attnbench is installed. Slow imports wait until a test uses it. If a test also
has the fixture `benchmark` of pytest-benchmark, the samples of the candidate become the rounds of this benchmark.
"""

import secrets
import tempfile
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from attnbench.api import Given, Outcome

MOST_SEEDS = 2**31  # seeds are drawn below this number
BUDGET_S = 5.0
FALSE_SHARE = 0.001  # a suite may have hundreds of comparisons
STEADY = "steady"  # fixes how freed memory is handled, which otherwise differs by chance between the few processes
UNDECIDED = "attnbench-undecided"
"""Name of the property, in a test's report, whose value is the sentence about an undecided comparison. pytest-xdist and
JUnit XML keep such properties."""


class AttentionBench:
    """A function that checks a candidate and times it against a baseline, in fresh processes and in random order."""

    def __init__(self, seed: int, benchmark: Any = None, node: pytest.Item | None = None) -> None:  # noqa: ANN401
        """Store the seed, pytest-benchmark's fixture if there is one, and the test whose report gets each outcome."""
        self.seed, self.benchmark, self.node = seed, benchmark, node

    def __call__(
        self,
        candidate: "Given",
        baseline: "Given" = "sdpa",
        *,
        budget_s: float = BUDGET_S,
        **more: Any,  # noqa: ANN401 - one value of an axis, or several; or another parameter of `attnbench.compare`
    ) -> "Outcome":
        """Compare the candidate with the baseline; return the outcome of `attnbench.compare`: ratio, verdict and more.

        `more` takes the axes of a workload, such as seq_len, num_heads, dtype, mask and direction (default: inference),
        each with a value or a list of values. It also takes the parameters `seed` (default: the seed of the session),
        `smallest_effect`, `false_share` (default: 0.001) and `conditions` (default: steady) of `attnbench.compare`. The
        comparison ends when all verdicts are decided, or after `budget_s` seconds for all workloads together. Nothing
        stays on disk.

        Raises:
            AssertionError: an answer of the candidate or the baseline disagrees with the float64 oracle; the message
                has the diagnosis.
            ValueError: there is no such axis or implementation, an implementation does not support a workload, or
                candidate and baseline are the same.
        """
        from attnbench.api import compare
        from attnbench.storage.records import LATENCY, Status

        if candidate == baseline:
            raise ValueError(f"{candidate} would be compared with itself: give two different ones")
        usual: dict[str, Any] = {"seed": self.seed, "direction": "inference", "false_share": FALSE_SHARE}
        usual["conditions"] = STEADY
        with tempfile.TemporaryDirectory(prefix="attnbench-pytest-") as folder:
            outcome = compare(candidate, baseline=baseline, results=folder, budget=budget_s, **(usual | more))
        if self.node is not None:
            self.node.add_report_section("call", "attnbench", repr(outcome))
            self.node.user_properties += [(UNDECIDED, sentence) for sentence in outcome.undecided]
        for record in outcome.results.records:
            if record.is_wrong:
                where = f"{record.workload.id} (seed {outcome.results.plan.seed})"
                raise AssertionError(f"{record.implementation} is wrong on {where}: {record.message}")
            if record.status is Status.unsupported:
                raise ValueError(f"{record.implementation} does not support {record.workload.id}: {record.message}")
        if self.benchmark is not None:
            (name,) = outcome.verdicts
            cell = next(record for record in outcome.results.records if record.implementation == name)
            values = [sample.value for sample in cell.samples(LATENCY)]
            self.benchmark.extra_info.update(ratio=outcome.ratio, verdict=outcome.verdict)
            CLOCK.samples = iter(values)
            self.benchmark.pedantic(CLOCK.play, rounds=len(values), iterations=1)
        return outcome


class ReplayClock:
    """A timer for pytest-benchmark that replays samples: each call of `play` advances it by the value of one sample."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.samples: Iterator[float] = iter(())  # seconds per call, to be played in this order

    def play(self) -> None:
        """Advance by the value of the next sample, in seconds; after the last sample, do nothing."""
        self.now_s += next(self.samples, 0.0)

    def __call__(self) -> float:
        """Return the seconds that were played so far."""
        return self.now_s


CLOCK = ReplayClock()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Make pytest-benchmark use the replay clock in tests with the fixtures `attention_bench` and `benchmark`."""
    if {"attention_bench", "benchmark"} <= {*getattr(item, "fixturenames", ())}:
        item.add_marker(pytest.mark.benchmark(timer=CLOCK))


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option --attnbench-seed."""
    text = "Seed of the inputs that are checked, and of all orders. Default: drawn for each session."
    parser.getgroup("attnbench").addoption("--attnbench-seed", type=int, default=None, metavar="N", help=text)


def pytest_configure(config: pytest.Config) -> None:
    """Draw the seed of the session unless the option gives one, since code could be fitted to known inputs.

    Raises:
        UsageError: the seed is below 0.
    """
    if config.option.attnbench_seed is None:
        config.option.attnbench_seed = secrets.randbelow(MOST_SEEDS)
    if config.option.attnbench_seed < 0:
        raise pytest.UsageError(f"--attnbench-seed {config.option.attnbench_seed} is not allowed: give 0 or more")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List each undecided comparison, since its test may pass although the candidate could be slower."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    lines = [
        f"{report.nodeid}: {text}"
        for report in reports
        if getattr(report, "when", "") == "teardown"  # a test's last report, which has all of its properties
        for name, text in report.user_properties
        if name == UNDECIDED
    ]
    if lines:
        terminalreporter.section(f"attnbench: {len(lines)} undecided comparison{'s' * (len(lines) > 1)}")
        for line in lines:
            terminalreporter.line(line)
        terminalreporter.line(
            "A larger budget_s, a larger false_share for few tests, num_threads=1, or a quiet machine may decide them."
        )


@pytest.fixture
def attention_bench(request: pytest.FixtureRequest) -> AttentionBench:
    """Provide a function that compares a candidate with a baseline; see `AttentionBench.__call__`.

    A failing test reports the seed that reproduces it.
    """
    seed = request.config.getoption("--attnbench-seed")
    request.node.add_report_section("setup", "attnbench", f"The same inputs again: --attnbench-seed {seed}")
    has_benchmark = "benchmark" in request.fixturenames
    return AttentionBench(seed, request.getfixturevalue("benchmark") if has_benchmark else None, request.node)
