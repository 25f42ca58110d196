"""A trace holds events but no places: no host, no user, no absolute path; and viewers find all they need."""

import getpass
import gzip
import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.nn.modules.module import register_module_forward_hook
from torch_tb_profiler.profiler.data import RunProfileData

from attnbench import plugins
from attnbench.analysis.results import read
from attnbench.contract.loading import implementation
from attnbench.processes import execution
from attnbench.processes.worker.answers import PreparedWorkload
from attnbench.storage.records import PROBE, Status
from attnbench.tracing import capture, folders
from attnbench.workloads.workload import Workload
from tests import journals
from tests.repositories import PLAIN

LIARS = Path(__file__).parents[1] / "liars.py"
SIZES = {"seq_len": 32, "num_heads": 2, "head_dim": 4, "mask": "causal", "num_threads": 1}
TRAINING = Workload(**SIZES, scope="module", direction="forward_backward")


@pytest.fixture(scope="module")
def traced(tmp_path_factory, forked_workers):
    """Trace some that behave, one of them in a folder with a blank in its name, and some that do not."""
    home = tmp_path_factory.mktemp("home of jane doe")
    (home / "mine.py").write_text(PLAIN)
    chosen = (f"{home}/mine.py:mine", f"{LIARS}:wrong", f"{LIARS}:crashing", "fused")
    points = (Workload(**SIZES, direction="inference"), TRAINING)
    plan = journals.planned(points, chosen, metrics=(), digests={spec: plugins.digest(spec) for spec in chosen})
    execution.execute(plan, home / "traces", lambda _: None, stages=("check", "trace"))
    results = read(home / "traces")
    right = [(record.workload.id, record.implementation) for record in results.records if record.status is Status.ok]
    files = {key: folders.trace_file(results.folder, *key) for key in right}
    return SimpleNamespace(results=results, files=files), home


def unpacked(file):
    return json.loads(gzip.decompress(file.read_bytes()))


def parsed(file, folder):
    """Parse the trace as the plug-in does."""
    return RunProfileData.parse("worker", "1", str(file), str(folder))


def test_what_disagrees_or_crashes_gets_no_trace_and_costs_nobody_else_theirs(traced):
    found, _ = traced
    ended = {(record.workload.direction, record.implementation): record.status for record in found.results.records}
    for workload in found.results.plan.workloads:
        assert ended[workload.direction, "fused"] is Status.ok
        assert found.files[workload.id, "fused"].exists()
    assert ended["inference", "wrong"] is Status.disagrees
    assert ended["inference", "crashing"] is Status.crashed
    assert {name for _, name in found.files} == {"fused", "mine"}
    assert sorted(found.files.values()) == folders.trace_files(found.results.folder)
    assert all(record.measurements == () for record in found.results.records)  # a trace shares no pass with a timing


def test_no_trace_names_the_host_the_user_or_an_absolute_path(traced):
    found, home = traced
    for file in found.files.values():
        text = gzip.decompress(file.read_bytes()).decode()
        assert "host_name" not in text
        for secret in (home, "jane doe", Path.cwd(), f"{Path.home()}/", f"/{getpass.getuser()}/", "/site-packages/"):
            assert str(secret) not in text
        assert not re.search('[";]/', text)
        assert f'"{os.uname().nodename}"' not in text
    mine = gzip.decompress(found.files[found.results.plan.workloads[0].id, "mine"].read_bytes()).decode()
    assert "mine.py(4): mine" in mine


def test_the_plug_in_finds_steps_shapes_memory_stacks_and_modules(traced, tmp_path):
    found, _ = traced
    for (workload_id, name), file in found.files.items():
        profile = parsed(file, tmp_path)
        assert len(profile.steps_names) == 3, name
        assert (
            any("[1, 2, 32, 4]" in op.input_shape for op in profile.op_list_groupby_name_input)
            or "module" in workload_id
        )
        assert profile.memory_snapshot is not None
        assert len(profile.stack_lists_group_by_name) > 3
        if workload_id == TRAINING.id:
            assert {"aten::addmm", "AddmmBackward0"} <= {op.name for op in profile.op_list_groupby_name}
            names = {event["name"] for event in unpacked(file)["traceEvents"]}
            assert {"nn.Module: Forward_0", "nn.Module: Backward_0"} <= names


@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "forward_backward"])
def test_a_step_calls_the_phases_of_its_direction(direction):
    phases = {"Forward"} if direction == "inference" else {each.title() for each in direction.split("_")}
    workload = Workload(**SIZES, direction=direction)
    case = PreparedWorkload(workload).cased(PROBE, implementation("fused"))
    called = set()
    hook = register_module_forward_hook(lambda module, *_: called.add(type(module).__name__))
    try:
        with case.grad_mode():
            step = capture.stepper(case)
            called.clear()  # the graph of a backward step is built before
            for _ in range(2):
                step()
    finally:
        hook.remove()
    assert called & {"Forward", "Backward"} == phases
    assert all(leaf.grad is None for leaf in case.leaves.values())


def test_a_trace_is_a_chrome_trace_as_perfetto_reads_it(traced):
    found, _ = traced
    for file in found.files.values():
        trace = unpacked(file)
        assert isinstance(trace["traceEvents"], list)
        for event in trace["traceEvents"]:
            assert event["ph"] in {"X", "i", "s", "f", "M"}
            assert {"name", "pid", "tid"} <= set(event)
            assert event["ph"] == "M" or isinstance(event["ts"], float | int)
            assert event["ph"] != "X" or event["dur"] >= 0


def x(category, name, ts, dur, **more):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": ts, "dur": dur, "args": {}, **more}


def scripted():
    """Build a trace from a machine with CUDA, as the profiler exports it."""
    kernel = {"External id": 7, "correlation": 5, "device": 0, "stream": 7}
    return {
        "schemaVersion": 1,
        "deviceProperties": [{"id": 0, "name": "NVIDIA H200", "computeMajor": 9, "numSms": 132}],
        "host_name": "janes-laptop",
        "distributedInfo": {"backend": "nccl"},
        "traceName": "/home/jane/trace.json",
        "displayTimeUnit": "ms",
        "traceEvents": [
            x("python_function", "/home/jane doe/bench.py(3): <module>", 0.0, 1000.0),
            x("user_annotation", "ProfilerStep#1", 10.0, 400.0),
            x("gpu_user_annotation", "ProfilerStep#1", 30.0, 380.0, tid=7),
            x("python_function", "/home/jane doe/mine.py(4): attend", 20.0, 100.0),
            x("python_function", "<built-in method bmm of type object at 0x7f2dd10cea40>", 22.0, 90.0),
            x("cpu_op", "aten::bmm", 25.0, 50.0, args={"External id": 7, "Input Dims": [[2, 8, 4], [2, 4, 8]]}),
            x("cuda_runtime", "cudaLaunchKernel", 30.0, 5.0, args={"External id": 7, "correlation": 5}),
            x("kernel", "gemm", 50.0, 60.0, tid=7, args=kernel),
            x("cpu_op", "aten::empty", 300.0, 1.0, args={"External id": 8, "Input Dims": []}),
        ],
    }


def test_host_and_paths_are_taken_out_of_a_trace_and_each_operator_has_its_frames():
    trace = capture.tidied(scripted())
    text = json.dumps(trace)
    for secret in ("jane", "laptop", "/home", "0x7f2dd10cea40", "nccl", "bench.py"):  # the last is around the steps
        assert secret not in text
    operators = [event for event in trace["traceEvents"] if event["cat"] == "cpu_op"]
    stacks = {event["name"]: event["args"].get("Call stack") for event in operators}
    assert stacks == {"aten::bmm": "mine.py(4): attend", "aten::empty": None}


@pytest.mark.filterwarnings("ignore:The copy keyword")  # in the plug-in's own code
def test_an_operator_has_device_time_and_a_repeated_step_counts_once():
    tidy, raw = (RunProfileData.from_json("worker", "1", trace) for trace in (capture.tidied(scripted()), scripted()))
    times = {op.name: op.device_duration for op in tidy.op_list_groupby_name}
    assert times == {"aten::bmm": 60.0, "aten::empty": 0}
    assert all(op.device_duration == 0 for op in raw.op_list_groupby_name)  # without renamed calls of the runtime
    assert (tidy.steps_names, len(raw.steps_names)) == (["1"], 2)


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("/opt/lib/torch/nn/module.py(12): forward", "torch/nn/module.py(12): forward"),
        ("/home/jane doe/my code.py(3): f", "my code.py(3): f"),
        ("/opt/lib/a.py(1): f;/home/jane/b.py(2): g", "a.py(1): f;b.py(2): g"),
        ("reads /home/jane/data.bin twice", "reads data.bin twice"),
        ("aten::div", "aten::div"),
        ("a/b", "a/b"),
        ("<built-in method add of Tensor object at 0x7f00ab>", "<built-in method add of Tensor object>"),
    ],
)
def test_a_path_is_shortened_and_nothing_else(text, short):
    assert capture.shortened(text, ["/opt/lib"]) == short
