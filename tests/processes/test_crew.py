"""Each process lays out memory otherwise: its environment's size, and what is allocated first."""

import subprocess

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
