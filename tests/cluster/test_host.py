"""A host's work: it has the machine to itself, and takes only unchanged files of the plan."""

import itertools
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.cluster import host as hosts
from attnbench.cluster.host import bench_slot, measure, own_name
from attnbench.cluster.shares import split
from attnbench.processes.planning import build_plan
from attnbench.storage.events import Plan
from attnbench.storage.journal import JOURNAL
from tests.processes.test_resume import SMALL, SOURCE

pytestmark = pytest.mark.usefixtures("forked_workers")


@pytest.fixture(autouse=True)
def own_machine(tmp_path, monkeypatch):
    """Provide a slot that no other test uses."""
    monkeypatch.setenv(hosts.HOST, "one")
    monkeypatch.setattr(hosts, "LOCK", tmp_path / "bench-slot")


def share_of(*specs: str) -> Plan:
    chosen = build_plan(sweep="quick", settings=SMALL, is_exact=True, implementations=specs)
    planned = msgspec.structs.replace(chosen, budget_s=0.0, metrics=())
    (share,) = split(planned, 1).values()
    return share


def measured(share: Plan, attnbench: str = version("attnbench"), folder: str = ".") -> tuple[str, bytes]:
    return measure(msgspec.json.encode(share), attnbench, folder)


def test_a_share_is_measured_by_a_host_of_this_version_and_its_journal_handed_back(tmp_path):
    host, journal = measured(share_of("fused"))
    assert host == "one"
    (tmp_path / JOURNAL).write_bytes(journal)
    results = read(tmp_path)
    assert results.elapsed_s is not None
    assert {record.status for record in results.records} == {"ok"}
    with pytest.raises(ValueError, match=r"and the driver 0\.0\.1"):
        measured(share_of("fused"), "0.0.1")


def test_a_file_of_the_plan_is_found_from_anywhere_and_is_not_changed(tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir()
    file = home / "mine.py"
    file.write_text(SOURCE)
    monkeypatch.chdir(home)
    share = share_of("mine.py:mine")
    monkeypatch.chdir(tmp_path)
    _, journal = measured(share, folder=str(home))
    (tmp_path / JOURNAL).write_bytes(journal)
    assert {record.implementation: record.status for record in read(tmp_path).records} == {"mine": "ok", "sdpa": "ok"}
    file.write_text("import os\n")
    with pytest.raises(ValueError, match="has changed since the run began"):
        measured(share, folder=str(home))


def test_two_never_have_the_slot_at_once():
    def hold() -> tuple[float, float]:
        with bench_slot():
            start_s = time.monotonic()
            time.sleep(0.05)
            return start_s, time.monotonic()

    with ThreadPoolExecutor(3) as threads:
        spans = sorted(threads.map(lambda _: hold(), range(3)))
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(spans))


def test_threads_that_ray_has_set_are_not_the_users(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with bench_slot():
        assert "OMP_NUM_THREADS" not in os.environ
    assert os.environ["OMP_NUM_THREADS"] == "1"


def test_a_host_has_a_name_that_reveals_nothing_and_leads_nowhere(monkeypatch):
    assert own_name() == "one"
    for name in ("../up", "a/b", "", ".hidden", "x" * 65):
        monkeypatch.setenv(hosts.HOST, name)
        assert own_name().startswith("host-")
        assert socket.gethostname() not in own_name()
        assert hosts.NAME.fullmatch(own_name())
