"""The survival study: it detects failures, and its short form has none."""

import shutil
import subprocess

import pytest

from attnbench.storage.journal import JOURNAL
from studies.torture import damages, surroundings
from studies.torture.__main__ import torture, tried
from studies.torture.trial import Trial, ended, note, wrong_end
from tests import journals

GOOD = Trial(subject="kills", what="SIGKILL to the group after 1.0 s")
BAD = Trial(subject="kills", what="SIGKILL to the runner after 2.0 s", died="exit code 7: no more", lost="a | b")
SKIPPED = Trial(subject="disks", what="a full disk", skipped="no root")


@pytest.mark.parametrize(("trial", "code"), [(GOOD, 0), (BAD, 1), (SKIPPED, 0)])
def test_whatever_goes_wrong_ends_with_exit_code_one(tmp_path, monkeypatch, trial, code):
    monkeypatch.setattr("studies.torture.__main__.tried", lambda *_, **__: iter([trial]))
    with pytest.raises(SystemExit) as ends:
        torture(tmp_path)
    assert int(ends.value.code) == code
    assert (tmp_path / "torture.csv").exists()


def test_an_end_that_was_not_due_is_seen():
    assert wrong_end(None, "", (0,)) == "it hung"
    assert "a traceback" in wrong_end(0, "Traceback (most recent call last)\nKeyError: 1", (0,))
    assert wrong_end(-11, "x\n\n", (0, 2)) == "exit code -11: x"
    assert wrong_end(2, "anything", (0, 2)) == ""
    assert note(" \n") == "nothing was printed"


def test_what_hangs_is_killed():
    process = subprocess.Popen(
        ["sh", "-c", "echo here; exec sleep 60"],  # it starts at once, on a busy machine too
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert ended(process, limit_s=3.0) == (None, "here\n")


@pytest.mark.long
def test_a_number_that_was_changed_unnoticed_would_be_called_lost(tmp_path, monkeypatch):
    run = tmp_path / "run"
    journals.write(run, journals.workloads(seq_len=(16,)), ("sdpa", "fused"), num_visits=2)
    found = list(damages.damaged(run, tmp_path, 12))
    assert found
    assert all(trial.is_good for trial in found), [trial for trial in found if not trial.is_good]
    # With equal digests for all lines a digit may change, and the study must report that.
    monkeypatch.setattr("attnbench.storage.journal._digest", lambda _: b"0" * 16)
    shutil.rmtree(run)
    journals.write(run, journals.workloads(seq_len=(16,)), ("sdpa", "fused"), num_visits=2)
    found = list(damages.damaged(run, tmp_path / "again", 20))
    assert any(trial.lost for trial in found)


def test_a_run_that_lacks_cells_is_seen(tmp_path):
    journals.write(tmp_path / "run", journals.workloads(seq_len=(16,)), ("sdpa", "fused"), num_visits=1)
    assert surroundings._missing(tmp_path / "run") == ""
    lines = (tmp_path / "run" / JOURNAL).read_bytes().splitlines(keepends=True)
    (tmp_path / "run" / JOURNAL).write_bytes(b"".join(lines[:3]))
    assert "of 2 cells" in surroundings._missing(tmp_path / "run")


@pytest.mark.long
@pytest.mark.parametrize("subject", ["kills", "signals", "journals", "commands"])
def test_nothing_dies_is_lost_or_unclear(subject):
    found = list(tried(subject, short=True))
    assert len(found) >= 6
    assert [trial for trial in found if not trial.is_good] == []
