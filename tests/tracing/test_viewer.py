"""The viewer makes no requests to the internet, and ends with all of its processes."""

import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from torch_tb_profiler.profiler.diffrun.contract import DiffStats, OpAgg, OpStats

from attnbench.tracing import folders
from attnbench.tracing.viewer import plugin, server

ROOT = Path(__file__).parents[2]
TRACE = {"schemaVersion": 1, "deviceProperties": [], "traceEvents": []}
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=[\"']?(?:https?:)?//")


def cell(run, workload, name):
    folders.write(folders.trace_file(run, workload, name), TRACE)


def test_their_pages_load_from_elsewhere_and_ours_do_not_and_have_all_charts():
    for name in plugin.REPLACED:
        assert LOADED.search((plugin.THEIRS / name).read_text(encoding="utf-8"))
        assert not LOADED.search(plugin.page(name))
    wanted = set(re.findall(r"google\.visualization\.(\w+)", plugin.page("index.html")))
    given = plugin.script(*plugin.CHARTS)
    assert "PieChart" in wanted
    assert all(re.search(rf"^    {name}(: \w+)?,$", given, re.MULTILINE) for name in wanted)


def test_another_page_of_the_plug_in_is_reported_and_not_served(monkeypatch, tmp_path):
    (tmp_path / "index.html").write_text("<html>")
    monkeypatch.setattr(plugin, "THEIRS", tmp_path)
    with pytest.raises(ValueError, match=r"version 0\.4\.3: install that"):
        plugin.page("index.html")


def test_both_sides_of_a_comparison_have_the_same_operators():
    def side(*names):
        return OpStats("a", 1, 0, 1, [OpAgg(name, 1, 2.0, 0, 1.0, 0) for name in names])

    compared = DiffStats(side("aten::bmm", "aten::add"), side("aten::add", "aten::mm", "aten::exp"))
    compared.children.append(DiffStats(side(), side("aten::mm")))
    plugin.align(compared)
    plugin.align(compared)  # aligned text stays as it is
    for each in (compared, *compared.children):
        assert [op.name for op in each.left.op_aggs] == [op.name for op in each.right.op_aggs]
    assert [(op.name, op.calls) for op in compared.left.op_aggs] == [
        ("aten::bmm", 1), ("aten::add", 1), ("aten::mm", 0), ("aten::exp", 0),
    ]  # fmt: skip


def test_the_newest_traces_are_shown_unless_others_are_named(tmp_path):
    older, newer = (tmp_path / "traces" / name for name in ("20260101T000000Z-a-0000", "20260102T000000Z-a-0000"))
    for run in (older, newer):
        cell(run, "workload", "fused")
    (tmp_path / "traces" / "20260103T000000Z-empty").mkdir()
    assert folders.find(None, tmp_path) == newer
    assert folders.find(older.name, tmp_path) == older
    assert folders.find(str(older), tmp_path / "elsewhere") == older
    for name in (None, "nothing", str(tmp_path)[:-1]):
        with pytest.raises(ValueError, match=r"holds no traces .*attnbench profile"):
            folders.find(name, tmp_path / "elsewhere")


def test_a_port_in_use_is_a_users_mistake(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"port {port} cannot be used .*: choose another with --port"):
            server.launch(tmp_path, port)


def attnbench(*arguments, cwd):
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "harness")}
    command = [sys.executable, "-m", "attnbench", "tensorboard", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=cwd, env=environment, stdout=pipe, stderr=pipe, text=True)


@contextmanager
def killed_at_the_end(process):
    """Kill a process that does not end, so that it fails one test instead of all later ones."""
    try:
        yield
    finally:
        process.kill()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_it_says_where_it_is_and_ends_with_all_of_its_processes(tmp_path, how):
    run = tmp_path / "results" / "traces" / "20260101T000000Z-a-0000"
    cell(run, "workload", "fused")
    with attnbench("--port", "0", cwd=tmp_path) as board, killed_at_the_end(board):
        assert board.stdout is not None
        line = board.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
        assert found is not None, line
        with socket.create_connection(("127.0.0.1", int(found[1])), timeout=100):
            pass
        processes = psutil.Process(board.pid).children(recursive=True)
        board.send_signal(how)
        _, reported = board.communicate(timeout=200)
    assert board.returncode == 0
    assert psutil.wait_procs(processes, timeout=100)[1] == []  # none outlives it
    assert reported.rstrip().endswith("ended")
    assert "Traceback" not in reported
