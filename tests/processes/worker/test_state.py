"""An implementation's changes to the process are named, and are undone or end the process."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from attnbench.devices import cpu
from attnbench.processes.messages import Failed, Heartbeat, Prepared, SampleBlocks
from attnbench.processes.worker import state
from attnbench.processes.worker.answers import Worker
from attnbench.storage.events import VisitFinished
from attnbench.workloads.workload import Workload
from tests.checks import cell_of

MODES = "from torch.utils._python_dispatch import TorchDispatchMode\nfrom torch.overrides import TorchFunctionMode\n"
BACK = {  # these can be undone
    "torch.backends.cuda.enable_flash_sdp(False)": "flash",
    "torch._C._set_sdp_priority_order([2, 1, 0, 3, 4])": "sdp_priority_order",
    "torch._C._set_mkldnn_enabled(False)": "mkldnn_enabled",
    "torch.backends.cudnn.benchmark = True": "benchmark",
    "torch.set_float32_matmul_precision('medium')": "float32 matmul precision from highest to medium",
    "torch.set_default_dtype(torch.float64)": "default dtype from torch.float32 to torch.float64",
    "torch.set_default_device('meta')": "default device",
    "torch.set_num_threads(torch.get_num_threads() + 1)": "number of threads",
    "torch.use_deterministic_algorithms(True)": "deterministic",
    "torch.autograd.set_detect_anomaly(True)": "anomaly",
    "torch.set_flush_denormal(True)": "denormals",
    "torch.set_autocast_enabled('cpu', True)": "autocast on cpu",
    "sys.settrace(lambda *_: None)": "trace",
    "import time; time.perf_counter = lambda: 0.0": "time.perf_counter",
    "torch.matmul = lambda a, b: a": "torch.matmul",
    "torch.Tensor.softmax = lambda self, dim: self": "Tensor.softmax",
    "torch.nn.functional.scaled_dot_product_attention = lambda *a, **k: 0": "scaled_dot_product_attention",
}
STUCK = {  # these end the process
    "os.held = torch.inference_mode(); os.held.__enter__()": "inference mode",
    MODES + "class M(TorchDispatchMode): pass\nM().__enter__()": "dispatch modes",
    MODES + "class M(TorchFunctionMode): pass\nM().__enter__()": "function modes",
}
FILE = """
import os, sys, torch
{at_import}
def f(query, key, value, *, mask=None):
    {in_call}
    return (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1) @ value
"""
POINT = Workload(seq_len=4, num_heads=2, head_dim=4)


def apart(task: Callable[[], object]) -> object:
    """Run a task in a process of its own, and return its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.environ["OMP_NUM_THREADS"] = "1"  # a forked process that has used several threads has lost them
            torch.set_num_threads(1)
            os.write(writing, pickle.dumps(task()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return pickle.loads(said)  # noqa: S301 - from this very test


def changed(source: str) -> tuple[str, str]:
    guard = state.Guard()
    exec(source, {"torch": torch, "os": os, "sys": __import__("sys")})  # noqa: S102 - the change that is planted
    return guard.restored(), guard.restored()


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("source", "said"), BACK.items())
def test_a_setting_is_named_and_put_back(source, said):
    first, second = apart(lambda: changed(source))
    assert said in first
    assert not second


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("source", "said"), STUCK.items())
def test_what_cannot_be_put_back_is_named_as_such(source, said):
    _, second = apart(lambda: changed(source))
    assert said in second


FIRST_CHOICE = (
    "getattr(torch, 'has_chosen', False) or "
    "(torch._C._set_sdp_priority_order([3, 1, 2, 0, 4]), setattr(torch, 'has_chosen', True))"
)
"""What torch does in the first call of SDPA on a Hopper GPU: once in a process, it puts cuDNN first."""


def test_nobody_is_blamed_for_what_torch_itself_changes_at_the_first_use_of_a_device(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu.Cpu, "apply_first_use_changes", lambda _: exec(FIRST_CHOICE, {"torch": torch}))  # noqa: S102 - our own
    (prepared, ends), (visited, _) = planted(tmp_path, in_call=FIRST_CHOICE)
    assert isinstance(prepared, Prepared), prepared
    assert not ends
    assert isinstance(visited, VisitFinished)


def asked(spec: str):
    """Return the reply, and whether the process ends: for a preparation, and for a visit."""
    worker, cell = Worker(Heartbeat()), cell_of(spec, POINT)
    arms = ((cell.arm, spec),)
    visit = SampleBlocks(workload=POINT, arms=arms, epoch=0, number=0, num_blocks=1, seed=0, verifies=False)
    prepared = worker.answer("prepare", cell=cell, limit_s=60.0), worker.is_broken
    return [prepared, (worker.answer("sample_blocks", visit=visit), worker.is_broken)]


def planted(tmp_path, at_import: str = "", in_call: str = "pass"):
    (tmp_path / "planted.py").write_text(FILE.format(at_import=at_import, in_call=in_call))
    return apart(lambda: asked(f"{tmp_path / 'planted.py'}:f"))


@pytest.mark.parametrize("at_import", ["torch.backends.cuda.matmul.allow_tf32 = True", "torch.matmul = None"])
def test_an_import_may_set_what_can_be_put_back(tmp_path, at_import):
    (prepared, ends), (visited, _) = planted(tmp_path, at_import)
    assert isinstance(prepared, Prepared)
    assert not ends
    assert isinstance(visited, VisitFinished)


@pytest.mark.parametrize(("where", "is_unloadable"), [("at_import", True), ("in_call", False)], ids=["import", "call"])
def test_only_what_fails_as_it_is_imported_cannot_be_loaded(tmp_path, where, is_unloadable):
    _, (visited, _) = planted(tmp_path, **{where: "raise RuntimeError('no such library')"})
    assert isinstance(visited, Failed)
    assert visited.is_unloadable is is_unloadable


@pytest.mark.parametrize(
    ("where", "source", "words"),
    [
        ("at_import", "os.held = torch.inference_mode(); os.held.__enter__()", "it changed inference mode"),
        ("in_call", "import time; time.perf_counter = lambda: 0.0", "it changed time.perf_counter"),
        ("in_call", "torch.set_default_dtype(torch.float64)", "default dtype from torch.float32 to torch.float64"),
    ],
)
def test_what_may_not_be_changed_costs_the_cell_and_the_process(tmp_path, where, source, words):
    replies = planted(tmp_path, **{where: source})
    failed, ends = replies[where == "in_call"]
    assert isinstance(failed, Failed)
    assert words in failed.message
    assert ends


def test_a_call_that_moves_elsewhere_is_taken_back(tmp_path):
    def moved():
        replies = asked(f"{tmp_path / 'planted.py'}:f")
        return [(isinstance(reply, Failed), ends) for reply, ends in replies], Path.cwd()

    (tmp_path / "planted.py").write_text(FILE.format(at_import="pass", in_call="os.chdir('/')"))
    assert apart(moved) == ([(False, False), (False, False)], Path.cwd())
