"""What a worker is started with: a memory layout of its own, and a heartbeat that outlives it and leaves no file."""

import subprocess
import sys
import tempfile

import pytest

from attnbench.processes.messages import Heartbeat, Start
from attnbench.processes.worker.answers import Worker
from attnbench.processes.worker_client import ProcessClient


def test_a_layout_has_an_environment_of_its_own_size(monkeypatch, tmp_path):
    sizes = []

    def start(*_, env, **__):
        sizes.append(len(env["ATTNBENCH_LAYOUT"]))
        raise OSError("seen enough")

    monkeypatch.setattr(subprocess, "Popen", start)
    for layout in (0, 1, 2, 1):
        with ProcessClient(tmp_path / "log", 5.0) as client, pytest.raises(OSError, match="seen enough"):
            client.start(layout)
    assert len(set(sizes[:3])) == 3
    assert sizes[1] == sizes[3]


def test_a_layout_has_first_blocks_of_its_own(tmp_path):
    found = []
    for layout in (0, 1, 2, 1):
        worker = Worker(Heartbeat())
        worker.answer(Start(layout=layout))
        found.append([len(pad) for pad in worker.pads])
    assert len(set(map(tuple, found))) == 3
    assert found[1] == found[3]


def test_a_heartbeat_is_read_in_another_process_and_leaves_no_file(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    heartbeat = Heartbeat()
    assert list(tmp_path.iterdir()) == []
    code = (
        "from pathlib import Path; from sys import argv; from attnbench.processes.messages import Heartbeat; "
        "Heartbeat(Path(argv[1])).beat(7)"
    )
    command = [sys.executable, "-c", code, str(heartbeat.path)]
    heartbeat.beat(Heartbeat.HARNESS)
    assert heartbeat.read() == (1, Heartbeat.HARNESS)
    subprocess.run(command, check=True)
    assert heartbeat.read() == (2, 7)
    heartbeat.close()
