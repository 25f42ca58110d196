"""A host's work: it has the machine to itself, and takes only unchanged files of the plan."""

import itertools
import os
import socket
import subprocess
import sys
import threading
import time

import msgspec
import psutil
import pytest

from attnbench.analysis.results import read
from attnbench.cluster import host as hosts
from attnbench.cluster.host import Answer, bench_slot, measure, own_name
from attnbench.cluster.shares import Share, split
from attnbench.plugins import name_of
from attnbench.processes.planning import build_plan
from attnbench.storage.journal import JOURNAL
from tests.processes.test_resume import SMALL, SOURCE

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    """Provide a slot that no other test uses."""
    monkeypatch.setenv(hosts.HOST, "one")
    monkeypatch.setattr(hosts, "LOCK", tmp_path / "bench-slot")
    monkeypatch.setattr(hosts, "SLOT", f"ATTNBENCH_TEST_{os.getpid()}")


def share_of(*specs: str) -> Share:
    chosen = build_plan(sweep="quick", settings=(*SMALL, "batch_size=1"), is_exact=True, implementations=specs)
    planned = msgspec.structs.replace(chosen, budget_s=0.0, metrics=())
    (share,) = split(planned, 1)
    return share


def answer_to(share: Share) -> Answer:
    return msgspec.json.decode(measure(msgspec.json.encode(share)), type=Answer)


def test_a_share_is_measured_and_its_journal_handed_back(tmp_path):
    answer = answer_to(share_of("fused"))
    assert answer.host == "one"
    (tmp_path / JOURNAL).write_bytes(answer.journal)
    results = read(tmp_path)
    assert results.elapsed_s is not None
    assert {record.status for record in results.records} == {"ok"}


def test_a_host_with_another_version_takes_no_part():
    with pytest.raises(ValueError, match=r"and the driver 0\.0\.1"):
        answer_to(msgspec.structs.replace(share_of("fused"), attnbench="0.0.1"))


def test_a_file_of_the_plan_is_found_from_anywhere_keeps_its_name_and_is_not_changed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    for spec in ("mine.py:mine", "other=mine.py:mine", "mine.py:mine+compile"):
        share = share_of(spec)
        assert str(file) in share.plan.implementations[0]
        assert [*map(name_of, share.plan.implementations)] == [name_of(spec), "sdpa"]
        assert share.plan.digests.keys() == set(share.plan.implementations)
    file.write_text("import os\n")
    with pytest.raises(ValueError, match="has changed since the run began"):
        answer_to(share)


def test_two_never_have_the_slot_at_once():
    spans, lock = [], threading.Lock()

    def hold() -> None:
        with bench_slot():
            start_s = time.monotonic()
            time.sleep(0.05)
            with lock:
                spans.append((start_s, time.monotonic()))

    threads = [threading.Thread(target=hold) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans.sort()
    assert len(spans) == 3
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans))


def test_what_a_killed_task_has_left_behind_is_ended():
    orphan = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, hosts.SLOT: "1"}
    )
    with bench_slot():
        assert not psutil.pid_exists(orphan.pid)
    orphan.wait()


def test_threads_that_ray_has_set_are_not_the_users(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(hosts, "_environment_of", lambda _: {})
    with bench_slot():
        assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setattr(
        hosts, "_environment_of", lambda number: {"OMP_NUM_THREADS": "1"} if number == os.getppid() else {}
    )
    with bench_slot():
        assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_host_has_a_name_that_tells_nobody_whose_it_is(monkeypatch):
    assert own_name() == "one"
    monkeypatch.delenv(hosts.HOST)
    assert own_name() == own_name()
    assert socket.gethostname() not in own_name()
    assert hosts.NAME.fullmatch(own_name())


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".hidden", "x" * 65])
def test_a_name_that_leads_elsewhere_is_not_taken(monkeypatch, name):
    monkeypatch.setenv(hosts.HOST, name)
    assert own_name().startswith("host-")
