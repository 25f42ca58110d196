"""The driver: without Ray it names the package to install; with it, the finished work of hosts that die is kept."""

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from attnbench.analysis.results import read
from attnbench.cli import app
from attnbench.cluster import driver, shares
from attnbench.commands import ExitCode
from attnbench.storage.events import JournalRestored
from attnbench.storage.journal import JOURNAL, events, write
from attnbench.storage.records import Status
from tests import journals
from tests.cluster import killing

ROOT = Path(__file__).parents[2]
TINY = ("--set", "seq_len=8", "--set", "head_dim=8", "--set", "num_heads=2", "--set", "mask=none")


def test_without_ray_the_option_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for words in (["run", "fused", *TINY, "--results", str(tmp_path)], ["doctor"]):
        ended = CliRunner().invoke(app, [*words, "--cluster", "auto"])
        assert ended.exit_code != 0
        said = str(ended.exception) + ended.output
        assert "pip install -e '.[cluster]'" in said


def test_ray_is_not_imported_unless_a_cluster_is_named():
    code = (
        "import sys; import attnbench.cluster.driver, attnbench.cluster.host, attnbench.commands.run, "
        "attnbench.commands.running; sys.exit('ray' in sys.modules)"
    )
    where = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "harness"), str(ROOT)))}
    assert subprocess.run([sys.executable, "-c", code], env=where, check=False).returncode == 0


@pytest.mark.parametrize("address", ["somewhere", "http://x:1", "ray://x", "a b:1", "127.0.0.1:9"])
def test_an_address_where_no_cluster_answers_is_refused(address):
    pytest.importorskip("ray", reason="ray is not installed")
    with pytest.raises(ValueError, match=r"no Ray cluster answers at .*: give auto"), driver.connected(address):
        pass


PATIENCE = "from attnbench.cluster import driver; driver.WAIT_S = 3.0; from attnbench.cli import main; main()"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_where_no_host_is_left_cells_are_lost_and_those_that_join_measure_them(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install attnbench[cluster]")
    with killing.Machines() as cluster:
        words = [*killing.SHORT, "--cluster", cluster.address, "--results", str(tmp_path)]
        driving = subprocess.Popen(
            [sys.executable, "-c", PATIENCE, "run", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        run = killing.begun(tmp_path)
        for name in list(cluster.nodes):
            cluster.remove(name)
        said, _ = driving.communicate(timeout=killing.LIMIT_S)
        assert driving.returncode == ExitCode.finding, said.decode()
        results = read(run)
        assert {record.status for record in results.records} >= {Status.lost}
        assert any("no host was left" in record.message for record in results.records)
        cluster.nodes["three"] = cluster.add("three")
        again = killing.started(tmp_path, "--resume", run.name, "--cluster", cluster.address)
        assert again.wait(killing.LIMIT_S) in killing.ENDS, (tmp_path / "log").read_text()
        results = read(run)
        assert {record.status for record in results.records} == {Status.ok}
        assert "three" in results.hosts


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_whoever_dies_nothing_finished_is_lost_and_verdicts_are_the_same(tmp_path):
    pytest.importorskip("ray", reason="ray is not installed: pip install attnbench[cluster]")
    alone = killing.local(tmp_path / "local")
    with killing.Machines() as cluster:
        for victim in killing.VICTIMS:
            assert killing.trial(cluster, tmp_path / victim, victim, random.uniform(0.0, 6.0), alone) == []


def test_a_host_of_another_kind_takes_no_part(tmp_path):
    points, slow = journals.workloads(seq_len=(16,)), msgspec.structs.replace(journals.ENVIRONMENT, cpu="slow")
    usual, other = (
        journals.write(tmp_path / name, points, ("sdpa",), num_epochs=1, environment=machine).folder / JOURNAL
        for name, machine in (("run", journals.ENVIRONMENT), ("other", slow))
    )
    assert not shares.store_journal(tmp_path, "0", "a", usual.read_bytes())
    assert not shares.store_journal(tmp_path, "1", "b", usual.read_bytes())
    history = [*events(usual), JournalRestored(time="")]
    write(usual, history)
    assert not shares.store_journal(tmp_path, "1", "b", usual.read_bytes())
    assert "it is slow, 2 cores" in shares.store_journal(tmp_path, "2", "c", other.read_bytes())
    assert "unfinished" in shares.store_journal(tmp_path, "3", "c", b"")
    stored = sorted(str(each.relative_to(tmp_path / "hosts")) for each in (tmp_path / "hosts").glob(f"*/*/{JOURNAL}"))
    assert stored == [f"a/0/{JOURNAL}", f"b/1/{JOURNAL}"]
