"""The studies of ranks: what the check says is printed as it is, and what was stopped goes on."""

import pytest

from attnbench.contract import Attention, Implementation, not_over_ranks, over_ranks
from attnbench.plugins import DISTRIBUTING
from attnbench.storage.records import Status
from attnbench.workloads.workload import Workload
from studies.scaling import __main__ as scaling
from studies.scaling import agreement
from studies.scaling.agreement import AGREES, SIZES, Answer
from studies.scaling.point import Point
from studies.scaling.theory import THEORY, bytes_sent
from tests.contract.shares import fail

SMALL = {"seq_len": 8, "num_heads": 2, "head_dim": 8, "mask": "none", "direction": "inference"}


def answer(name="ring", sizes="G = H", status=AGREES, reason="", **axes):
    return Answer(name=name, sizes=sizes, workload=Workload(**(SMALL | axes)), status=status, reason=reason)


def test_every_implementation_is_asked_at_every_number_of_ranks():
    found = list(agreement.cases((1, 2, 4)))
    assert len(found) == len(set(found)) == len(DISTRIBUTING) * 3 * 2 * 2 * len(SIZES)
    assert {name for name, _, _ in found} == set(DISTRIBUTING)
    assert len({f"{name}-{workload.id}" for name, _, workload in found}) == len(found), "each has a file of its own"


class Failing(Attention):
    def attend(self, query, key, value, mask):
        return over_ranks(fail, query, key, value, mask)


def failing(workload):
    made = Implementation(build=Failing, source="", unsupported=not_over_ranks, distributes=True)
    return agreement.ask("failing", made, "G = H", workload)


@pytest.mark.long
def test_what_the_check_says_is_the_answer():
    found = failing(Workload(**SMALL, world_size=2))
    assert found.status == Status.error
    assert "rank 1 of 2: ValueError: no head for this" in found.reason
    refused = failing(Workload(**(SMALL | {"mask": "padding"}), world_size=2))
    assert refused.status == Status.unsupported
    assert "padding" in refused.reason


def test_the_table_counts_and_has_each_reason_once():
    lost = [{"status": Status.crashed, "reason": f"rank {rank} of 2 is gone"} for rank in (0, 1)]
    text = agreement.table(
        [
            answer(sizes="G = H", world_size=2),
            answer("zigzag_ring", sizes="G = H", world_size=2),
            answer(sizes="T = 13", world_size=2, **lost[0]),
            answer(sizes="G = H", world_size=2, mask="causal", **lost[1]),
            answer(sizes="T = 13", world_size=2, mask="causal", status=Status.unsupported, reason="no"),
            answer("ulysses", world_size=2, status=Status.unsupported, reason="no"),
        ]
    )
    assert "1 of 3 agree" in text
    assert text.count("a rank is gone") == 1
    assert text.count("| zigzag_ring") == 1, "who agrees everywhere has no row of each"
    assert "crashed (1)" in text
    assert "unsupported (2)" in text
    (row,) = [
        line for line in text.splitlines() if "ulysses" in line and "agree" not in line and "inference" not in line
    ]
    assert "unsupported" in row


def test_a_stopped_study_of_agreement_goes_on_and_another_failure_is_a_finding(tmp_path, monkeypatch):
    asked = []

    def ask(name, made, sizes, workload):
        asked.append((name, workload))
        if len(asked) == 5:
            raise KeyboardInterrupt
        return answer(name, sizes, world_size=1)

    monkeypatch.setattr(agreement, "ask", ask)
    with pytest.raises(KeyboardInterrupt):
        agreement.agreement(tmp_path, "1", 10.0)
    agreement.agreement(tmp_path, "1", 10.0)
    assert len(asked) == len(list(agreement.cases([1]))) + 1
    assert "agree" in (tmp_path / "agreement.md").read_text(encoding="utf-8")
    assert not (tmp_path / agreement.FOLDER).exists()

    monkeypatch.setattr(
        agreement, "ask", lambda name, made, sizes, workload: answer(name, sizes, Status.disagrees, "no")
    )
    with pytest.raises(agreement.typer.Exit):
        agreement.agreement(tmp_path, "1", 10.0)


def test_efficiency_is_in_proportion_to_one_rank():
    solo = Point(name="ring", workload=Workload(**SMALL), slowest_s=1.0)
    two = Point(name="ring", workload=Workload(**SMALL, world_size=2), slowest_s=0.8)
    assert scaling.scaled("strong", two, solo).efficiency == pytest.approx(1.0 / (2 * 0.8))
    assert scaling.scaled("weak", two, solo).efficiency == pytest.approx(4.0 / (2 * 0.8))


def test_scaling_is_planned_once_for_each_workload():
    planned = scaling.planned([1, 2], 64)
    assert len(planned) == 2 * 2 * len(THEORY) * 2 * 2
    assert len({(name, workload.id) for _, name, workload in planned}) == 2 * 2 * len(THEORY) * 3


@pytest.mark.long
def test_the_study_of_scaling_counts_bytes_as_theory_does_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "MASKS", ("none",))
    monkeypatch.setattr(scaling, "DIRECTIONS", ("inference",))
    real, asked = scaling.measured, []

    def measured(name, made, workload, num_calls):
        asked.append(workload)
        return real(name, made, workload, num_calls)

    monkeypatch.setattr(scaling, "measured", measured)
    scaling.scaling(tmp_path, "1,2", 16, 1)
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert "DIFFERS" not in text
    assert text.count("equal") == len(scaling.planned([1, 2], 16))
    sent = bytes_sent("ring", Workload(seq_len=16, num_kv_heads=4, mask="none", direction="inference", world_size=2))
    assert f"{sent:,}" in text
    assert (tmp_path / "scaling.png").stat().st_size > 0
    assert len(asked) == 3 * len(THEORY)


def test_ranks_begin_with_one(tmp_path):
    with pytest.raises(scaling.typer.BadParameter, match="begin with 1"):
        scaling.scaling(tmp_path, "2,4", 16, 1)
