"""A timed process is what a user's own would be: its settings are those of a bare Python that imports torch."""

import json
import os
import subprocess
import sys

import msgspec
import pytest

from attnbench.processes.execution import execute
from attnbench.processes.planning import build_plan

STATE = '''
import ctypes, gc, inspect, json, os, resource, sys
import torch

torch_cpu = ctypes.CDLL(os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so"))


def read():
    """All settings that can be read, by name."""
    found = {"parallel": torch.__config__.parallel_info(), "threads": torch.get_num_threads()}
    of_others = ("cuda", "xpu", "mtia", "tracing", "obj_in", "version_map")  # the map is printed in any order
    for name in dir(torch._C):
        if name.startswith("_get_") and not any(word in name for word in of_others):
            try:
                found[name] = repr(getattr(torch._C, name)())
            except Exception:
                pass  # it needs arguments, or a device
    if hasattr(torch_cpu, "MKL_Set_Num_Threads_Local"):  # returns the earlier number: 0 unless somebody has set it
        found["threads of MKL in this thread"] = torch_cpu.MKL_Set_Num_Threads_Local(0)
    found |= {"denormals": sys.float_info.min / 2, "collector": gc.isenabled(), "collector's pace": gc.get_threshold()}
    found |= {"switches": sys.getswitchinterval(), "priority": os.getpriority(os.PRIO_PROCESS, 0)}
    found |= {"processors": sorted(os.sched_getaffinity(0)), "scheduler": os.sched_getscheduler(0)}
    found |= {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    found |= {"traces": repr((sys.gettrace(), sys.getprofile())), "precision": torch.get_float32_matmul_precision()}
    found |= {f"variable {name}": value for name, value in os.environ.items()}
    return json.loads(json.dumps(found))
'''
IMPLEMENTATION = """

def attention(query, key, value, *, mask=None):
    with open(__file__ + ".jsonl", "a") as file:
        file.write(json.dumps({"process": os.getpid(), "state": read()}) + chr(10))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


def other(query, key, value, *, mask=None):
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
"""
OURS = {
    "RLIMIT_DATA": "memory that is not there is refused before the system kills a process",
    "variable PYTHONPATH": "where attnbench is",
    "variable TORCHINDUCTOR_COMPILE_THREADS": "compiling processes would run beside timed calls",
}
"""Settings that differ, and why."""


def states(tmp_path, threads="0", isolation="process"):
    """What the timed processes of a short run saw, and a bare process."""
    (tmp_path / "mine.py").write_text(STATE + IMPLEMENTATION)
    settings = ("scope=attention", "seq_len=64", "mask=none", "direction=inference", f"num_threads={threads}")
    files = [f"{tmp_path / 'mine.py'}:{name}" for name in ("attention", "other")]
    asked = build_plan(
        sweep="quick", settings=settings, is_exact=True, implementations=files, baseline=files[1], budget_s=0.0,
        metrics=("latency",), isolation=isolation, num_rounds=1,
    )  # fmt: skip
    execute(msgspec.structs.replace(asked, num_blocks=1), tmp_path / "run", lambda _: None)
    lines = [json.loads(line) for line in (tmp_path / "mine.py.jsonl").read_text().splitlines()]
    latest = lines[-1]["process"]
    assert latest != lines[0]["process"]  # which has made the calls of the check
    timed = [line["state"] for line in lines if line["process"] == latest]
    bare = subprocess.run(
        [sys.executable, "-c", STATE + "\nprint(json.dumps(read()))"],
        check=True,
        capture_output=True,
        text=True,
        env=dict(os.environ),  # without it a child also gets what libraries have set for this process alone
    )
    return timed, json.loads(bare.stdout)


@pytest.mark.parametrize("isolation", ["process", "shared"])
def test_a_timed_process_has_the_settings_of_a_bare_one(tmp_path, isolation):
    timed, bare = states(tmp_path, isolation=isolation)
    for state in (timed[0], timed[-1]):
        different = {name for name in state.keys() | bare.keys() if state.get(name) != bare.get(name)}
        assert {name for name in different - OURS.keys() if not name.startswith("variable ATTNBENCH_")} == set()


def test_a_number_of_threads_is_chosen_before_the_process_starts(tmp_path, monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    timed, bare = states(tmp_path, threads="1")
    assert timed[-1]["threads"] == 1
    assert timed[-1]["variable OMP_NUM_THREADS"] == timed[-1]["variable MKL_NUM_THREADS"] == "1"
    if "threads of MKL in this thread" in bare:
        assert timed[-1]["threads of MKL in this thread"] == 0
