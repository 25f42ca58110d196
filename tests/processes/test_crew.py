"""Each process lays out memory otherwise: its environment's size, and what is allocated first."""

import subprocess

import pytest

from attnbench.processes.heartbeat import Flight
from attnbench.processes.messages import Hello
from attnbench.processes.worker.answers import Worker
from attnbench.processes.worker_client import Crew


def test_a_layout_has_an_environment_of_its_own_size(monkeypatch, tmp_path):
    sizes = []

    def start(*_, env, **__):
        sizes.append(len(env["ATTNBENCH_LAYOUT"]))
        raise OSError("seen enough")

    monkeypatch.setattr(subprocess, "Popen", start)
    for layout in (0, 1, 2, 1):
        with Crew(tmp_path / "log", 5.0) as crew, pytest.raises(OSError, match="seen enough"):
            crew.hello(layout)
    assert len(set(sizes[:3])) == 3
    assert sizes[1] == sizes[3]


def test_a_layout_has_first_blocks_of_its_own(tmp_path):
    found = []
    for layout in (0, 1, 2, 1):
        worker = Worker(Flight(tmp_path / "flight"))
        worker.answer(Hello(layout=layout))
        found.append([len(pad) for pad in worker.pads])
    assert len(set(map(tuple, found))) == 3
    assert found[1] == found[3]
