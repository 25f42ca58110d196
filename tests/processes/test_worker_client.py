"""The start of a worker: a memory layout of its own, and a heartbeat that outlives it and leaves no file."""

import itertools
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import torch

from attnbench.processes import worker_client
from attnbench.processes.messages import FORK, NUMBER, Declared, Failed, Heartbeat, line, request
from attnbench.processes.worker_client import ProcessClient, Template
from attnbench.storage.events import CellMeasured
from attnbench.storage.records import Status
from attnbench.workloads.workload import Workload
from tests.checks import cell_of

START = line(request("start", {"layout": 0}))
PYTHON = sys.executable
"""The real interpreter, even if a fixture replaces it."""


@pytest.fixture
def forked(tmp_path, forked_workers):
    """A template, one of its workers, and our end of the worker's line."""
    template, heartbeat = Template(tmp_path / "log"), Heartbeat()
    mine, theirs = socket.socketpair()
    with theirs:
        worker = psutil.Process(template.fork(theirs, heartbeat.file))
    yield template, worker, mine
    mine.close()
    template.close()


def test_a_worker_ends_with_its_coordinator_though_an_answer_was_not_read(forked):
    """A socket closed with unread bytes is reset, instead of reaching its end."""
    _, worker, mine = forked
    mine.sendall(START)
    assert select.select([mine], [], [], 60)[0]
    mine.close()
    assert has_ended(worker)


def test_a_template_ends_its_workers_though_its_answer_was_not_read(forked, tmp_path):
    template, worker, mine = forked
    with (tmp_path / "log").open("ab") as log:
        socket.send_fds(template._line, [NUMBER.pack(FORK)], [mine.fileno(), log.fileno(), Heartbeat().file])
    assert select.select([template._line], [], [], 60)[0]
    template._line.close()
    assert has_ended(worker)
    assert template._process.wait(60) == 0


@pytest.mark.long
def test_a_template_compiles_in_its_own_processes_alone(tmp_path, monkeypatch):
    monkeypatch.delenv(worker_client.COMPILERS, raising=False)
    assert Template(tmp_path / "log").environment[worker_client.COMPILERS] == "1"
    monkeypatch.setenv(worker_client.COMPILERS, "3")  # the user knows better
    assert Template(tmp_path / "log").environment[worker_client.COMPILERS] == "3"


def test_a_late_answer_of_a_template_is_not_taken_for_the_next_one(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_client, "CLOSING_S", 0.5)
    monkeypatch.setattr(sys, "executable", PYTHON)  # no process stands between this one and the template
    template, heartbeat = Template(tmp_path / "log"), Heartbeat()
    (mine, theirs), (mine_next, theirs_next) = socket.socketpair(), socket.socketpair()
    with theirs:
        first = psutil.Process(template.fork(theirs, heartbeat.file))
    stopped = psutil.Process(template._process.pid)
    template._line.settimeout(0.5)
    stopped.suspend()
    while stopped.status() != psutil.STATUS_STOPPED:  # a signal takes time
        time.sleep(1e-3)
    with pytest.raises(OSError, match="timed out"):
        template.end(first.pid)
    assert has_ended(first)
    with suppress(psutil.NoSuchProcess):
        stopped.resume()
    with theirs_next:
        second = psutil.Process(template.fork(theirs_next, heartbeat.file))
    assert second.ppid() == template._process.pid
    assert template.end(first.pid) == -signal.SIGKILL  # of a template that is gone: no stranger is killed
    assert second.is_running()
    template.close()
    mine.close()
    mine_next.close()


def test_a_line_that_was_cut_off_is_no_request(forked, tmp_path):
    _, worker, mine = forked
    mine.sendall(START[:5])
    mine.close()
    assert has_ended(worker)
    assert "Error" not in (tmp_path / "log").read_text()


def has_ended(process: psutil.Process) -> bool:
    """Whether a process ends soon, even if nothing collects its exit code."""
    for _ in range(2000):
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                time.sleep(0.05)
                continue
        return True
    process.kill()
    return False


FORGES = """
line = b'{}\\n'
for n in range(3, 64):
  with suppress(OSError): S_ISSOCK(os.fstat(n).st_mode) and os.write(n, line)
"""
RINGS = """
class Rung(BaseException): pass
def ring(*_): raise Rung("by a timer")
signal.signal(signal.SIGALRM, ring)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
time.sleep(600)
"""
DEEDS = {
    "exits": ("os._exit(3)", "exited with code 3"),
    "is killed": ("os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
    "leaves a child that holds all files": ("os.fork() and os._exit(4)\ntime.sleep(600)", "exited with code 4"),
    "leaves a daemon of its own session": (
        "os.fork() and os._exit(5)\nos.setsid()\nos.fork() and os._exit(0)\ntime.sleep(600)",
        "exited with code 5",
    ),
    "closes all files": ("os.closerange(0, 256)", "exited with code 1"),
    "forges an answer": (FORGES.format("{}"), "wrote no valid answer"),
    "forges a check that it passed": (
        FORGES.format('{"type": "Reply", "failed": {"status": "ok", "message": "forged"}}'),
        "wrote no valid answer",
    ),
    "hangs": ("time.sleep(600)", "no end in sight"),
    "sets a timer": (RINGS, "Rung: by a timer"),
}
IMPORTS = "import os, signal, time\nfrom contextlib import suppress\nfrom stat import S_ISSOCK\n"


def template_of(client):
    return psutil.Process(client.template._process.pid)


@pytest.mark.parametrize("deed", DEEDS)
def test_however_a_worker_ends_it_is_said_and_nothing_of_it_remains(tmp_path, deed):
    code, words = DEEDS[deed]
    (tmp_path / "bad.py").write_text(f"{IMPORTS}{code}\ndef bad(query, key, value): return query\n")
    cell = cell_of(f"{tmp_path / 'bad.py'}:bad", Workload(seq_len=4))
    with ProcessClient(Template(tmp_path / "log"), 3.0 if deed == "hangs" else 60.0) as client:
        client.start()
        failed = client.ask("observe", CellMeasured, cell=cell, metric="peak_memory")
        assert isinstance(failed, Failed)
        assert failed.status is (Status.timeout if deed == "hangs" else Status.crashed)
        assert words in failed.message
        assert not client.is_running
        template = template_of(client)
        assert template.children(recursive=True) == []
        client.start()
        cell = cell_of("fused", Workload(seq_len=4))
        assert isinstance(client.ask("observe", CellMeasured, cell=cell, metric="peak_memory"), CellMeasured)
    assert not template.is_running()


def test_a_request_is_not_sent_after_its_answer(tmp_path):
    client = ProcessClient(Template(tmp_path / "log"), 5.0)
    client._line, theirs = socket.socketpair()
    client._arrivals.register(client._line, select.POLLIN)
    with client._line, theirs:
        message = request("start", {"layout": 0})
        client._send(message)
        assert theirs.recv(1024) == START
        theirs.sendall(b"an answer")
        with pytest.raises(msgspec.DecodeError, match="an answer before its request"):
            client._send(message)


def test_a_worker_whose_template_is_gone_is_noticed_and_the_next_has_a_new_one(tmp_path):
    with ProcessClient(Template(tmp_path / "log"), 5.0) as client:
        client.start()
        template = template_of(client)
        worker = template.children()
        template.kill()
        client.stop()
        assert psutil.wait_procs(worker, timeout=100)[1] == []
        assert client.start().environment.versions["torch"] == torch.__version__


def test_a_judge_outlives_the_template_that_code_under_test_has_killed(tmp_path, forked_workers):
    """Its first start once ended the whole check: it closed the heartbeat that the judge was about to use."""
    with ProcessClient(Template(tmp_path / "log"), 60.0) as client:
        client.start()
        judge = client.template.judge = client.sibling()
        template_of(client).kill()
        assert judge.start().environment.python
        assert client.template.judge is judge


def test_an_abandoned_client_waits_for_no_answer_and_starts_no_process(tmp_path, forked_workers):
    (tmp_path / "hangs.py").write_text(f"{IMPORTS}time.sleep(1000)\n")
    with ProcessClient(Template(tmp_path / "log"), 1000.0) as client:
        client.start()
        timer = threading.Timer(0.2, client.abandon)
        timer.start()
        assert isinstance(client.ask("declare", Declared, spec=f"{tmp_path / 'hangs.py'}:f"), Failed)
        timer.join()
        with pytest.raises(ValueError, match="interrupted"):
            client.start()


def test_a_template_that_was_killed_and_does_not_look_so_yet_is_started_again(tmp_path, monkeypatch):
    with ProcessClient(Template(tmp_path / "log"), 30.0) as client:
        client.start()
        process = client.template._process
        process.kill()
        psutil.wait_procs([psutil.Process(process.pid)], timeout=100)
        monkeypatch.setattr(process, "poll", lambda: None)
        assert client.start(1).environment.python


def test_a_request_ends_though_steps_are_announced_without_end(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_client, "POLL_S", 0.01)
    client, (mine, theirs) = ProcessClient(Template(tmp_path / "log"), 60.0), socket.socketpair()
    monkeypatch.setattr(client, "_has_ended", lambda: bool(client._heartbeat.beat()))
    monkeypatch.setattr(client, "_line", mine)
    hundredths = itertools.count()  # each look at the clock
    monkeypatch.setattr(worker_client, "time", SimpleNamespace(monotonic=lambda: next(hundredths) / 100))
    with mine, theirs, pytest.raises(TimeoutError):
        client._read_line(0.05, 4)
    assert 19 <= client._heartbeat.read()[0] <= 22


DETACHED = """
import os, subprocess, sys
if os.fork() == 0:
    os.setsid()
    held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(held.pid, file=open({file!r}, "w"))
    os._exit(0)
os.wait()
def mine(query, key, value): return value
"""


@pytest.mark.usefixtures("forked_workers")
def test_a_detached_process_ends_with_its_own_worker_and_not_with_another(tmp_path):
    (tmp_path / "daemon.py").write_text(DETACHED.format(file=f"{tmp_path / 'pid'}"))
    with ProcessClient(Template(tmp_path / "log"), 60.0) as one:
        one.start()
        one.ask("declare", Declared, spec=f"{tmp_path / 'daemon.py'}:mine")
        detached = psutil.Process(int((tmp_path / "pid").read_text()))
        two = one.sibling()
        for other in (two, one):
            assert detached.is_running()
            two.start()
            other.stop()
        assert has_ended(detached)
        two.close()
