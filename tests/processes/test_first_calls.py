"""First calls: in fresh processes, with compile caches of their own."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from attnbench.analysis.first_calls import break_evens
from attnbench.analysis.recommendation import recommend
from attnbench.analysis.results import Results, read
from attnbench.analysis.table import table
from attnbench.api import read_first_calls
from attnbench.cli import app
from attnbench.contract.loading import from_value
from attnbench.processes import execution, first_calls
from attnbench.processes.messages import Failed, FirstCalls
from attnbench.processes.planning import build_plan, plan_to_choose
from attnbench.processes.worker import first_calls as worker_first_calls
from attnbench.processes.worker.first_calls import elsewhere
from attnbench.reports import cells, verdict
from attnbench.reports.answers import first_calls_line, shapes
from attnbench.statistics.break_even import Payoff
from attnbench.storage.records import FIRST_CACHED, FIRST_CALL, FIRST_CALLS, FIRST_OTHERS, Status
from attnbench.workloads.workload import Workload
from studies.simulated import virtual
from studies.simulated.worlds import WORLDS

TINY = ("seq_len=16", "num_heads=2", "head_dim=8", "scope=attention")
FIRST_S = {"sdpa": 0.002, "fused": 3.002, "bmm": 1.0, "einsum": 0.001}
CALL_S = {"sdpa": 1e-3, "fused": 0.5e-3, "bmm": 2e-3, "einsum": 0.5e-3}
SLEEPS = """
import time
from pathlib import Path

time.sleep(0.05)
lengths = set()


def attention(query, key, value, is_causal=False):
    if query.shape[-2] not in lengths:
        time.sleep(0.05)
        lengths.add(query.shape[-2])
    return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(dim=-1) @ value
"""


class Client(virtual.SimulatedClient):
    """A simulated client whose first calls are known; that of `fused` is cached."""

    def __init__(self) -> None:
        super().__init__(WORLDS["calm"], lambda _, name: CALL_S[name])
        self.num_starts = 0
        self.first: list[tuple[str, int]] = []  # implementations, with the process that answered

    def start(self, layout: int = 0):
        self.num_starts += 1
        return super().start(layout)

    def first_calls(self, cell, settings, *, has_others) -> FirstCalls | Failed:
        name, cache = cell.arm.implementation, Path(settings["TORCHINDUCTOR_CACHE_DIR"])
        self.first.append((name, self.num_starts))
        is_cached = cache.exists()
        if name == "fused":
            cache.mkdir(exist_ok=True)
        if name == "bmm":
            return Failed(status=Status.timeout, message="it hangs")
        others_s = dict.fromkeys(FIRST_OTHERS, 0.25) if has_others and name != "einsum" else {}
        return FirstCalls(first_s=FIRST_S[name] / (1 + is_cached), others_s=others_s)


def simulated(folder: Path, *metrics: str) -> tuple[Results, Client]:
    client = Client()
    plan = build_plan(sweep="quick", settings=TINY, is_exact=True, implementations=(*FIRST_S,), seed=3)
    plan = msgspec.structs.replace(plan, metrics=("latency", *metrics), budget_s=20.0)
    return virtual.execute(plan, folder / "run", client), client


def test_every_reading_has_a_fresh_process_and_the_baseline_is_first(tmp_path):
    results, client = simulated(tmp_path, FIRST_CALL)
    processes = [number for _, number in client.first]
    assert len(set(processes)) == len(processes)
    names = [name for name, _ in client.first]
    assert names == ["sdpa"] * 3 + ["fused"] * 6 + ["bmm"] + ["einsum"] * 3
    by_name = {cell.name: cell for cell in cells.all_cells(results).values()}
    fused = {name: by_name["fused"].metrics[name] for name in FIRST_CALLS}
    assert fused == pytest.approx({FIRST_CALL: 3.002, FIRST_CACHED: 1.501, **dict.fromkeys(FIRST_OTHERS, 0.25)})
    assert FIRST_CACHED not in by_name["sdpa"].metrics
    assert not {*FIRST_OTHERS} & {*by_name["einsum"].metrics}
    assert FIRST_CALL not in by_name["bmm"].metrics
    assert by_name["bmm"].seconds is not None  # a first call that failed does not take its time away


def test_the_break_even_is_in_every_report(tmp_path):
    results, _ = simulated(tmp_path, FIRST_CALL)
    seen = {arm.implementation: each for (_, arm), each in break_evens(results).items()}
    assert set(seen) == {"fused", "einsum"}
    assert seen["einsum"].payoff is Payoff.at_once
    assert seen["fused"].payoff is Payoff.after
    assert seen["fused"].calls == pytest.approx(3.0 / 0.5e-3, rel=0.05)
    assert seen["fused"].low <= seen["fused"].calls <= seen["fused"].high
    line = first_calls_line(shapes(results))
    others = "new length 250 ms, new batch 250 ms, new dtype 250 ms"
    assert f"fused 3.0 s (cached 1.5 s, {others}, paid after: {seen['fused'].words})" in line
    assert "has paid after" in [column.heading for column in cells.columns(results)]
    rows = table(results).set_index("implementation")
    assert rows.loc["fused", "paid_after_calls"] == seen["fused"].calls
    assert rows.loc["einsum", "paid"] == "at_once"
    found = {each.implementation: each for each in verdict._cells(results)}
    assert found["fused"].break_even == seen["fused"]
    assert found["sdpa"].break_even is None


def test_a_time_that_leaves_out_the_gathering_of_keys_has_paid_for_nothing(tmp_path, monkeypatch):
    results, _ = simulated(tmp_path, FIRST_CALL)
    monkeypatch.setattr(Results, "is_gathered", lambda _, record: record.implementation == "fused")
    break_evens.cache_clear()
    assert {arm.implementation for _, arm in break_evens(results)} == {"einsum"}


def test_a_dtype_that_it_cannot_take_is_left_out():
    def narrow(query, key, value):
        if query.dtype is not torch.float32:
            raise TypeError("float32 alone")
        return torch.nn.functional.scaled_dot_product_attention(query, key, value)

    seen = worker_first_calls.measure(Workload(seq_len=16), lambda: from_value(narrow, "narrow"), {})
    assert {*seen.others_s} == {"first_call_new_length", "first_call_new_batch"}


def test_the_choice_and_pytorch_s_own_alone_are_read_for_a_recommendation(tmp_path):
    plan = plan_to_choose(
        build_plan(sweep="fastest", settings=TINY, is_exact=True, implementations=(*FIRST_S,), seed=3)
    )
    plan, client = msgspec.structs.replace(plan, budget_s=20.0), Client()
    then = partial(read_first_calls, memory_bytes=0, is_deterministic=False)
    more = {"then": then, "read_counters": lambda: None}
    execution.execute(plan, tmp_path, lambda _: None, client=client, clock=client.clock.now, **more)
    (found,) = recommend(read(tmp_path))
    assert {name for name, _ in client.first} == {found.choice, "sdpa"} == set(found.first_s)
    again, num_read = Client(), len(client.first)
    execution.execute(plan, tmp_path, lambda _: None, client=again, clock=again.clock.now, **more)
    assert (num_read, again.first) == (len(client.first), [])  # the journal has them


def test_a_run_without_the_metric_reads_no_first_call(tmp_path):
    results, client = simulated(tmp_path)
    assert client.first == []
    assert first_calls_line(shapes(results)) == ""
    assert "has paid after" not in [column.heading for column in cells.columns(results)]
    assert not [name for name in table(results).columns if "paid" in name or "first_call" in name]


def test_a_slow_first_call_is_read_once_and_its_caches_are_removed():
    folders, asked = [], []

    def read(settings, *, has_others):
        folders.append(Path(settings["TRITON_CACHE_DIR"]).parent)
        (folders[-1] / "kernel").touch()
        asked.append(has_others)
        return FirstCalls(first_s=2 * first_calls.SLOW_S)

    seen = {each.metric: len(each.samples) for each in first_calls.measurements(read)}
    assert seen == {FIRST_CACHED: 1, FIRST_CALL: 1}
    assert folders[0] == folders[1]
    assert asked == [True, False]  # with empty caches alone
    assert not folders[0].exists()


def test_another_length_keeps_a_single_query_and_another_batch_has_one_more():
    usual, decoding = dict(elsewhere(Workload(seq_len=32))), dict(elsewhere(Workload(seq_len=1, kv_len=64)))
    longer, batch, dtype = usual.values()
    assert longer.seq_len == longer.kv_len > 32
    assert (batch.batch_size, batch.seq_len, dtype.dtype) == (2, 32, "bfloat16")
    assert [(each.seq_len, each.kv_len) for each in decoding.values()] == [(1, 80), (1, 64), (1, 64)]


def test_each_request_of_another_length_has_more_keys():
    workload = Workload(batch="q5_16q1kv1k", page_size=16, dtype="bfloat16", direction="inference")
    longer, batch, dtype = dict(elsewhere(workload)).values()
    assert (longer.batch, batch.batch, dtype.dtype) == ("q21_16q1kv1040", "q5_17q1kv1k", "float32")
    assert len({each.id for each in (workload, longer, batch, dtype)}) == 4


def test_the_preparation_of_arguments_is_not_part_of_a_first_call():
    class Prepared:
        device = SimpleNamespace(synchronize=lambda: None)
        grad_mode = staticmethod(nullcontext)

        def call(self):
            time.sleep(0.05)
            return lambda: time.sleep(0.02)

    assert worker_first_calls._called(Prepared(), time.perf_counter()) < 0.05


@pytest.mark.usefixtures("forked_workers")
def test_import_and_first_calls_are_in_the_time_of_a_real_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(SLEEPS)
    words = [f"--set={each}" for each in TINY]
    done = CliRunner().invoke(
        app, ["run", "mine.py:attention", *words, "--metrics", "first_call", "--budget", "0.5", "--json"]
    )
    found = {each["implementation"]: each for each in json.loads(done.stdout)["cells"]}
    assert found["attention"]["metrics"][FIRST_CALL] >= 0.1  # import and call
    assert found["attention"]["metrics"]["first_call_new_length"] >= 0.05
    assert found["sdpa"]["metrics"][FIRST_CALL] > 0
    assert FIRST_CACHED not in found["attention"]["metrics"]
    assert found["attention"]["break_even"]["payoff"] in {"never", "unknown"}


COMPILED = """
import sys
from functools import partial

from torch._dynamo.utils import counters

from attnbench.contract.loading import implementation
from attnbench.processes.worker.first_calls import measure
from attnbench.workloads.workload import Workload

load, settings = partial(implementation, "fused+compile"), {"TORCHINDUCTOR_CACHE_DIR": sys.argv[1]}
seen = measure(Workload(seq_len=16, num_heads=2, head_dim=8), load, settings)
found = counters["inductor"]
print(found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], seen.first_s > 0, len(seen.others_s))
"""


@pytest.mark.long
def test_a_second_process_compiles_from_the_caches_of_the_first(tmp_path):
    words = [sys.executable, "-c", COMPILED, str(tmp_path / "cache")]
    seen = [subprocess.run(words, capture_output=True, text=True, check=True).stdout.split() for _ in range(2)]
    assert seen == [["4", "0", "True", "3"], ["0", "4", "True", "3"]]  # two lengths, another batch and dtype


@pytest.mark.long
def test_a_compiled_form_is_read_with_empty_and_with_filled_caches(tmp_path):
    plan = build_plan(sweep="quick", settings=TINY, is_exact=True, implementations=("fused", "fused+compile"), seed=3)
    plan = msgspec.structs.replace(plan, metrics=(FIRST_CALL,))
    before = dict(os.environ)
    execution.execute(plan, tmp_path / "run", lambda _: None, ("check", "metrics"))
    assert dict(os.environ) == before
    seen = {cell.name: set(cell.metrics) for cell in cells.all_cells(read(tmp_path / "run")).values()}
    assert seen["fused+compile"] == {*FIRST_CALLS}
    assert seen["fused"] == {FIRST_CALL, *FIRST_OTHERS}
