import itertools
import json
import math
import re
import shutil
import time
from functools import partial
from types import SimpleNamespace

import msgspec
import numpy as np
import pandas as pd
import pytest
from torch.utils.benchmark import Timer
from typer.testing import CliRunner

from attnbench.devices.cpu import Cpu
from attnbench.timing.functions import FunctionComparison
from studies.acceptance import __main__ as command
from studies.acceptance import chart, engine, kept, on_cuda, plan, power, rivals, suite, table, truth
from studies.acceptance.outcome import LABELS, Outcome
from studies.acceptance.plan import Size
from studies.simulated.machine import VirtualClock

pytestmark = pytest.mark.filterwarnings("default")  # pytest-benchmark runs inside, and warns of what it likes

WAIT_S = 2e-3


def wait():
    time.sleep(WAIT_S)


def wait_longer():
    time.sleep(3 * WAIT_S)


@pytest.fixture
def clock(monkeypatch):
    """A virtual clock in place of the one that rivals read: each reading takes a tick, and work says how long it is."""
    clock = VirtualClock()

    def read():
        clock.spend(1e-7)
        return clock.now()

    read.__module__, read.__name__ = "time", "perf_counter"  # pytest-benchmark loads its timer by these
    monkeypatch.setattr(time, "perf_counter", read)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(1e9 * read()))
    monkeypatch.setattr("torch.utils.benchmark.Timer", partial(Timer, timer=read))
    return clock


class TestRivals:
    @pytest.mark.parametrize("rival", rivals.RIVALS, ids=lambda rival: rival.name)
    def test_each_tells_a_call_from_one_three_times_as_long(self, clock, rival):
        if rival.name == "pyperf":
            pytest.importorskip("pyperf")
        found = rivals.compare(rival, lambda: clock.spend(WAIT_S), lambda: clock.spend(3 * WAIT_S), 0.1)
        assert min(found.a) >= WAIT_S
        assert len(found.a) >= 1
        assert len(found.b) >= 1
        assert 0 < found.wall_s < 5
        for log in found.logs().values():
            assert log == pytest.approx(math.log(3), abs=0.01)
        assert found.logs(2.0) == pytest.approx({name: log + math.log(2) for name, log in found.logs().items()})
        assert set(found.alarms()) == set(rival.rules)

    def test_a_rule_sees_the_slowdown_that_is_put_in_and_nothing_in_identical_times(self):
        times = [1.0 + 0.0001 * (number % 7) for number in range(40)]
        for rival in rivals.RIVALS:
            found = rivals.Timed(rival=rival, a=times, b=list(times), wall_s=1.0)
            assert not any(found.alarms().values()), rival.name
            assert all(found.alarms(1.06).values()), rival.name


class TestEngine:
    def test_a_slowed_clock_slows_one_call_alone(self, monkeypatch):
        monkeypatch.setattr(engine.CpuClock, "elapsed", lambda clock, call, num_calls: 0.5 * num_calls)
        clock = engine.SlowedClock(wait_longer, 3.0)
        assert (clock.elapsed(wait, 2), clock.elapsed(wait_longer, 2)) == (1.0, 3.0)

    def test_a_plain_slowdown_is_found(self, clock, monkeypatch):
        monkeypatch.setattr(Cpu, "interference_probe", lambda cpu: lambda: clock.spend(WAIT_S))
        found = engine.compare(lambda: clock.spend(WAIT_S), lambda: clock.spend(3 * WAIT_S), 0.4, clock=clock)
        assert found.log == pytest.approx(math.log(3), abs=0.01)
        assert found.is_alarm
        assert 0 < found.decided_s <= found.wall_s


class TestOnCuda:
    def test_what_needs_a_device_is_said_to_be_left_out_and_is_no_pass(self):
        found = list(suite.left_out(short=True))
        assert [each.test for each in found] == list(plan.ON_CUDA)
        assert {table.result(each) for each in found} == {suite.NOT_RUN}

    @pytest.mark.parametrize(("share", "passes"), [(0.01, True), (-0.03, False)])
    def test_two_clocks_must_be_close_where_a_call_lasts_long_enough(self, share, passes):
        rows = [
            {"call": "short", "timed_s": 2e-5, "other_s": 1e-5, "share": 1.0},
            {"call": "long", "timed_s": 1e-3, "other_s": 1e-3, "share": share},
        ]
        asked = Outcome(id=LABELS["kernel_sum"], title="", limit="", found="", passes=False)
        found = on_cuda._beside(rows, asked, (20e-6, 0.02))
        assert found.passes is passes
        assert "short +100.00% of 10 us" in found.found
        assert not on_cuda._beside(rows[:1], asked, (20e-6, 0.02)).passes


class TestLimits:
    def test_the_bound_on_alarms_is_the_one_that_was_fixed(self):
        assert plan.largest_count(400) == 27

    def test_every_test_has_a_size_in_both_forms_and_short_is_short(self):
        assert list(plan.SHORT) == list(plan.FULL) == suite.TESTS
        planned_s = sum(size.num_pieces * size.piece_s for size in plan.SHORT.values())
        assert planned_s <= 19 * 60

    def test_the_pieces_of_a_long_test_are_spread_over_the_session(self):
        jobs = suite.jobs(["aa_error", "repeatability"], short=True)
        places = [number for number, job in enumerate(jobs) if job.test == "repeatability"]
        assert places[0] < 2
        assert places[-1] > len(jobs) - 3


def rival_rows(logs, budget_s=1.0):
    at = {"tool": "rival", "statistic": "mean", "share": 0.05, "budget_s": budget_s}
    return [{**at, "same_log": log, "log": log + math.log1p(0.05)} for log in logs]


class TestPowerAtEqualAlarms:
    def test_a_steady_rival_finds_all_and_an_unsteady_one_little(self):
        steady = power.power_of_rivals(pd.DataFrame(rival_rows([0.001, -0.002, 0.001] * 8)))
        unsteady = power.power_of_rivals(pd.DataFrame(rival_rows([0.1, -0.2, 0.05] * 8)))
        assert steady["power"].item() == 1.0
        assert unsteady["power"].item() <= 0.5
        assert (unsteady["alarms"] <= 0.05).all()

    def test_its_time_is_the_shortest_budget_that_is_good_enough(self):
        rows = rival_rows([0.2, -0.2] * 10, 1.0) + rival_rows([0.001, -0.001] * 10, 5.0)
        assert power.rival_times(pd.DataFrame(rows))["seconds"].item() == 5.0


class TestCoverage:
    def test_noise_around_one_ratio_is_covered_about_as_often_as_it_should(self):
        draws = np.random.default_rng(1)
        rows = [
            {"epoch": float(epoch), "visit": float(visit), "log": draws.normal(0.3, 0.01)}
            for epoch in range(20)
            for visit in range(300)
        ]
        sessions = truth.coverage_of_sessions(rows, 200)
        assert len(sessions) == 200
        assert 0.9 <= sessions["covers"].mean() <= 1.0

    def test_the_error_of_the_reference_is_no_lack_of_coverage(self):
        """Where each process has a bias of its own, the reference has as few as it has processes."""
        draws, found = np.random.default_rng(1), []
        for _ in range(40):
            biases = draws.normal(0.3, 0.05, size=plan.FULL["coverage"].num_pieces)
            rows = [
                {"epoch": float(epoch), "visit": float(visit), "log": draws.normal(bias, 0.01)}
                for epoch, bias in enumerate(biases)
                for visit in range(12)
            ]
            found.append(truth.coverage_of_sessions(rows, 20)["covers"].mean())
        assert 0.93 <= np.mean(found) <= 0.98


class TestPermutations:
    def test_sessions_go_on_by_turns_and_none_is_as_another(self, monkeypatch):
        visit, visited = FunctionComparison.visit, []
        monkeypatch.setattr(FunctionComparison, "visit", lambda found: (visited.append(found.seed), visit(found)))
        seconds = itertools.count()  # one for each look: how busy this machine is decides nothing
        monkeypatch.setattr(truth, "time", SimpleNamespace(perf_counter=lambda: next(seconds)))
        rows = truth.permute(0, Size(piece_s=1, compare_s=1.0, num_repeats=4))
        rounds = [set(visited[start : start + 4]) for start in range(0, len(visited), 4)]
        assert len(rounds) == 3
        assert all(each == {0, 1, 2, 3} for each in rounds)
        assert [row["role"] for row in rows] == ["rival", "copy"] * 4
        assert len({(row["place"], row["letter"]) for row in rows}) > 2
        assert all(0 not in {row["place"], row["letter"]} for row in rows)

    @pytest.mark.parametrize("what", ["place", "letter"])
    @pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (0.02, False)])
    def test_who_stands_first_must_not_matter(self, what, shift, passes):
        draws = np.random.default_rng(1)
        rows = []
        for number in range(40):
            at = {"place": draws.choice([-1.0, 1.0]), "letter": draws.choice([-1.0, 1.0])}
            log = draws.normal(0.2, 0.005) + shift * (at[what] > 0)
            rows.append({**at, "role": ("rival", "copy")[number % 2], "log": log, "standard_error": 0.005})
        found = truth.order_and_names(rows, short=False)
        assert found.passes == passes
        assert "20 permutations" in found.found


def outcome(test="aa_error", *, passes=True, rows=(), found="0.1 %", is_short=True):
    return Outcome(
        id=LABELS[test],
        title="a|b",
        limit="<= 1",
        found=found,
        passes=passes,
        is_short=is_short,
        rivals={"pyperf": "mean 3 %\nor more", "torch": "2 | 3"},
        rows=tuple(rows),
        cause="" if passes else "the machine",
    )


T1_ROWS = [
    {"cell": cell, "tool": tool, "statistic": "mean", "log": log, "is_alarm": 0.0}
    for cell in ("one", "two")
    for tool, log in ((chart.OURS, 0.001), ("pyperf", -0.03), ("somebody else", 0.02))
]
T5_ROWS = [
    {"tool": "pyperf", "statistic": "mean", "injected": "timer scaling", "share": 0.05, "budget_s": 5.0}
    | {"same_log": log, "log": log + 0.0488}
    for log in (0.01, -0.02, 0.03)
] + [{"tool": chart.OURS, "injected": "timer scaling", "share": 0.05, "budget_s": 5.0, "decided_s": 0.3}]
T6_ROWS = [
    *rival_rows([0.01, -0.01, 0.2]),
    {"tool": chart.OURS, "share": 0.05, "budget_s": 1.0, "verdict": "slower", "decided_s": 0.2},
]
T8_ROWS = [
    {"session": 0.0, "error": 0.01, "half_width": 0.02, "covers": 1.0},
    {"session": 1.0, "error": -0.03, "half_width": 0.02, "covers": 0.0},
]


class TestShown:
    def test_the_table_tells_misses_and_the_short_form_and_keeps_its_columns(self):
        outcomes = [
            outcome(),
            outcome("false_alarms", passes=False),
            outcome("kernel_sum", found="not run: no CUDA device", is_short=False),
        ]
        text = table.markdown(outcomes, "a machine", short=True)
        rows = [line for line in text.splitlines() if line.startswith("| ")]
        assert {line.replace("\\|", "").count("|") for line in rows} == {9}
        assert "pass (short form)" in rows[2]
        assert "**MISS** (short form) | the machine |" in rows[3]
        assert "| not run |" in rows[4]
        assert "Passed: 1 of 2. Missed: T2. Not run: G1." in text
        assert "This is the short form" in text
        assert "short form" not in table.markdown([outcome(is_short=False)], "a machine", short=False)

    def test_every_picture_draws_and_one_without_rows_is_left_out(self):
        outcomes = [
            outcome("aa_error", rows=T1_ROWS),
            outcome("false_alarms", rows=T1_ROWS),
            outcome("power", rows=T5_ROWS),
            outcome("time_to_verdict", rows=T6_ROWS),
            outcome("coverage", rows=T8_ROWS),
        ]
        drawn = chart.pictures(outcomes)
        assert set(drawn) == {"errors", "power", "times", "coverage"}
        assert all(each.svg.startswith("<svg") for each in drawn.values())
        assert set(chart.pictures(outcomes[:1])) == {"errors"}
        assert set(chart.pictures(outcomes[2:3])) == {"power"}, "without the comparisons of identical code, too"


@pytest.fixture
def stub(monkeypatch, tmp_path):
    """Two quick tests in place of the real ones; tells which pieces were made."""
    made = []
    for test in ("kills", "overhead", "called_share", "order_and_names"):
        monkeypatch.setitem(plan.WHOLE, test, "made by the stub")

    def run(job, folder, *, short):
        made.append(job.name)
        piece = suite.Piece(outcome=outcome(job.test, passes=job.test != "overhead"))
        (folder / f"{job.name}.json").write_bytes(msgspec.json.encode(suite.signed(piece, job.test, short=short)))
        return True

    monkeypatch.setattr(suite, "run", run)
    return made


def call(*args):
    import typer

    app = typer.Typer()
    app.command()(command.accept)
    return CliRunner().invoke(app, list(args))


class TestCommand:
    def test_what_is_finished_is_not_made_again_unless_it_had_another_size(self, stub, tmp_path):
        folder = tmp_path / "parts" / "short"
        folder.mkdir(parents=True)
        for test, size in (
            ("kills", suite.size_of("kills", short=True)),
            ("called_share", "another"),
        ):
            piece = suite.Piece(size=size, outcome=outcome(test))
            (folder / f"{test}-00.json").write_bytes(msgspec.json.encode(piece))
        done = call("--short", "--only", "T14,T11,T16", "--to", str(tmp_path))
        assert done.exit_code == 0, done.output
        assert sorted(stub) == ["called_share-00", "order_and_names-00"]
        assert json.loads(done.stdout.splitlines()[-1])["missed"] == []
        assert "| T14 |" in (tmp_path / "acceptance.md").read_text()
        assert set(kept.load(tmp_path, machine=command.machine(), short=True)) == {
            "kills",
            "order_and_names",
            "called_share",
        }

    def test_a_piece_amid_which_the_session_was_killed_is_made_again(self, stub, tmp_path):
        call("--short", "--only", "T14,T16", "--to", str(tmp_path))
        parts = tmp_path / "parts" / "short"
        whole = (parts / "called_share-00.json").read_bytes()
        (parts / "called_share-00.json").rename(parts / "T16-00.draft")
        (parts / "T16-00.draft").write_bytes(whole[: len(whole) // 2])
        done = call("--short", "--only", "T14,T16", "--to", str(tmp_path))
        assert done.exit_code == 0, done.output
        assert stub == ["called_share-00", "kills-00", "called_share-00"]

    def test_a_miss_gives_exit_code_1_and_is_in_the_table(self, stub, tmp_path):
        done = call("--short", "--only", "T14,T15", "--to", str(tmp_path))
        assert done.exit_code == 1
        assert "**MISS**" in (tmp_path / "acceptance.md").read_text()

    def test_a_test_that_is_run_again_leaves_the_rows_of_the_others(self, stub, tmp_path, monkeypatch):
        call("--short", "--only", "T14,T16", "--to", str(tmp_path))
        first = kept.load(tmp_path, machine=command.machine(), short=True)
        shutil.rmtree(tmp_path / "parts")
        monkeypatch.setattr(suite, "current_commit", lambda: "0123456789+")
        assert call("--short", "--only", "overhead", "--to", str(tmp_path)).exit_code == 1
        assert call("--short", "--only", "called_share", "--to", str(tmp_path)).exit_code == 0, (
            "T15's miss is not its own"
        )
        assert stub == ["called_share-00", "kills-00", "overhead-00", "called_share-00"]
        found = kept.load(tmp_path, machine=command.machine(), short=True)
        assert list(found) == ["kills", "overhead", "called_share"]
        assert found["kills"] == first["kills"]
        assert found["called_share"].made.endswith(", 0123456+")
        text = (tmp_path / "acceptance.md").read_text()
        assert re.findall(r"^\| (T\d+) .* \| ([^|]*) \|$", text, re.MULTILINE) == [
            (each.id, each.made) for each in found.values()
        ]

    def test_two_readings_of_the_same_comparisons_are_renewed_together(self, stub, tmp_path):
        call("--only", "false_alarms", "--to", str(tmp_path))
        assert stub == [f"aa_error-{number:02d}" for number in range(plan.FULL["aa_error"].num_pieces)]
        assert list(kept.load(tmp_path, machine=command.machine(), short=False)) == ["aa_error", "false_alarms"]

    @pytest.mark.parametrize("other", ["machine", "form"])
    def test_rows_of_another_machine_or_form_are_no_neighbours(self, stub, tmp_path, other):
        here = "another machine" if other == "machine" else command.machine()
        kept.save([outcome("order_and_names")], tmp_path, machine=here, short=other == "machine")
        done = call("--short", "--only", "kills", "--to", str(tmp_path))
        assert "another machine or form: it will be replaced" in done.stderr
        assert list(kept.load(tmp_path, machine=command.machine(), short=True)) == ["kills"]

    def test_a_damaged_account_is_reported_before_anything_runs(self, stub, tmp_path):
        (tmp_path / kept.FILE).write_bytes(b"nothing")
        done = call("--short", "--only", "kills", "--to", str(tmp_path))
        assert (done.exit_code, stub) == (2, [])
        assert "cannot be read" in " ".join(done.stderr.split())
        assert (tmp_path / kept.FILE).read_bytes() == b"nothing"

    def test_rows_come_back_as_they_were(self, tmp_path):
        rows = [{"tool": 'one, "two"', "log": 0.1 + 0.2, "found_s": math.inf}, {"tool": "3"}]
        outcomes = [outcome("aa_error", rows=rows), outcome("false_alarms")]
        kept.save(outcomes, tmp_path, machine="here", short=True)
        assert list(kept.load(tmp_path, machine="here", short=True).values()) == outcomes

    def test_a_piece_that_crashes_is_a_miss_of_its_test_alone(self, monkeypatch, tmp_path):
        monkeypatch.setattr(suite, "run", lambda job, folder, *, short: False)
        done = call("--short", "--only", "overhead", "--to", str(tmp_path))
        assert done.exit_code == 1
        assert "1 of 1 pieces crashed" in (tmp_path / "acceptance.md").read_text()

    def test_a_test_that_does_not_exist_is_refused(self, tmp_path):
        assert call("--only", "T99", "--to", str(tmp_path)).exit_code == 2

    def test_a_real_piece_is_read_back_from_its_file(self, monkeypatch, tmp_path):
        monkeypatch.setitem(plan.SHORT, "overhead", Size(piece_s=1, num_repeats=2))
        job = suite.jobs(["overhead"], short=True)[0]
        made = suite.make(job.test, job.number, short=True)
        (tmp_path / "overhead-00.json").write_bytes(msgspec.json.encode(made))
        found = list(suite.conclude(["overhead"], suite.read(tmp_path, [job]), short=True))
        assert found[0].test == "overhead"
        assert "n=2" in found[0].found
