"""The table of models: a row for each point, what each implementation takes there, or what a call would take."""

import csv
import re

import pytest

from attnbench.processes.execution import Predicted
from attnbench.processes.messages import Failed
from attnbench.processes.worker.attempts import OutOfReachError, require_within
from attnbench.storage.records import Arm, Status
from attnbench.workloads import models
from attnbench.workloads.counts import compulsory_bytes
from attnbench.workloads.models import Mix
from attnbench.workloads.workload import Workload
from studies.models import IMPLEMENTATIONS, LARGEST_BYTES, Ended, foreseen, page, planned, rows, write
from tests import journals

NEAR, FAR = Workload(mask="none", seq_len=512), Workload(mask="none", seq_len=2048)
UNTRIED = Workload(mask="none", seq_len=2**15)
ROWS = (
    Mix(label="tiny prefill B=1 T=512", counts={NEAR.id: 3}),
    Mix(label="tiny training B=1 T=2048", counts={NEAR.id: 3, FAR.id: 1}),
    Mix(label="huge prefill B=1 T=32768", counts={UNTRIED.id: 2}),
)
FORESEEN = "predicted 4.00 s and 1.50 GiB for one call, over the limit of 200 ms; it takes 9 ms at seq_len 1024"
EVERY = {each.id: each for each in (NEAR, FAR, UNTRIED)}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return journals.write(folder, (NEAR, FAR), ("sdpa", "naive_loop", "liar"), levels={}, mixes=ROWS)


@pytest.fixture(scope="module")
def found(results):
    others = {
        (UNTRIED.id, Arm(implementation="sdpa")): Failed(status=Status.timeout, message=FORESEEN),
        (UNTRIED.id, Arm(implementation="naive_loop")): Failed(status=Status.out_of_memory, message="its inputs"),
        (UNTRIED.id, Arm(implementation="liar")): Failed(status=Status.unsupported, message="no liar takes it"),
    }
    return rows(results, EVERY, others)


def test_each_row_is_a_point_of_a_model_in_a_phase(found):
    assert [(row.model, row.phase, row.point, row.layers) for row in found] == [
        ("tiny", "prefill", "B=1 T=512", 3),
        ("tiny", "training", "B=1 T=2048", 4),
        ("huge", "prefill", "B=1 T=32768", 2),
    ]


def test_what_was_measured_has_the_time_of_all_layers_and_their_mean(found):
    base, slow = found[0].cells["sdpa"], found[0].cells["naive_loop"]
    assert base.endswith(" ms")
    assert re.fullmatch(r"1[78]\d ms \(x4\d\.\d\)", slow)  # three layers of 60 ms
    assert found[0].means_s["sdpa"] == pytest.approx(1.3e-3, rel=0.1)
    assert found[1].means_s["naive_loop"] is None


def test_what_is_too_large_has_the_time_and_memory_that_were_predicted_or_that_follow_from_a_smaller_one(found):
    assert re.fullmatch(r"too large here: about 9\d\d ms, at least 16.0 MiB a call", found[1].cells["naive_loop"])
    assert found[2].cells["sdpa"] == "too large here: 4.00 s, 1.50 GiB a call"
    assert re.fullmatch(r"too large here: about 2\d\d s, at least 256 MiB a call", found[2].cells["naive_loop"])


def test_what_is_wrong_or_unsupported_is_never_called_too_large(found):
    assert [row.cells["liar"] for row in found] == ["wrong", "wrong", "unsupported"]


def test_what_the_messages_of_a_run_predict_is_read():
    with pytest.raises(OutOfReachError) as ended:
        require_within(1.0, 2**60, FAR, lambda step, _: (1e-5 * step.seq_len**2, 16.0 * step.seq_len**2))
    record = Ended.foreseen(Failed(status=Status.timeout, message=str(ended.value)))
    assert (record.seconds, record.memory) == (pytest.approx(41.9), "64.0 MiB")
    with pytest.raises(OutOfReachError) as ended:
        require_within(1e3, 2**20, FAR, lambda step, _: (1e-9, 16.0 * step.seq_len**2))
    record = Ended.foreseen(Failed(status=Status.out_of_memory, message=str(ended.value)))
    assert (record.seconds, record.memory) == (None, "64.0 MiB")


def test_the_page_counts_what_has_a_time(results, found):
    text = page(results, found)
    assert "3 of 9 have a time" in text
    assert "| tiny " in text


def test_a_table_for_programs_has_a_line_for_each_row(found, tmp_path):
    write(found, tmp_path / "models.csv")
    with (tmp_path / "models.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["model"] for line in lines] == ["tiny", "tiny", "huge"]
    assert float(lines[0]["sdpa: mean of a layer, s"]) == pytest.approx(1.3e-3, rel=0.1)
    assert lines[2]["sdpa: mean of a layer, s"] == ""


def test_every_preset_in_every_phase_is_planned_and_each_workload_once():
    plan, every = planned(models.names(), 0.2)
    planned_rows = {tuple(mix.label.split(" ", 2)[:2]) for mix in plan.mixes}
    assert planned_rows == {(name, phase) for name in models.names() for phase in models.preset(name).phases}
    assert len(plan.workloads) == len(set(plan.workloads))
    assert {each for mix in plan.mixes for each in mix.counts} <= set(every)
    assert all(compulsory_bytes(each) <= LARGEST_BYTES for each in plan.workloads)
    assert len(plan.workloads) < len(every)
    assert plan.implementations == IMPLEMENTATIONS


def test_what_is_predicted_is_kept_and_a_line_that_was_cut_off_is_predicted_again(results, tmp_path, monkeypatch):
    asked = []

    def predict(plan, watch, limit_s):
        for workload in plan.workloads:
            for arm in plan.cells(workload):
                asked.append(arm.implementation)
                yield Predicted(workload, arm, Failed(status=Status.timeout, message=FORESEEN))

    monkeypatch.setattr("studies.models.execution.predict", predict)
    file = tmp_path / "predictions.jsonl"
    first = foreseen(results.plan, EVERY, file)
    assert {(key, arm.implementation) for key, arm in first} == {(UNTRIED.id, name) for name in asked}
    assert foreseen(results.plan, EVERY, file) == first
    assert len(asked) == len(first)
    file.write_bytes(file.read_bytes()[:-9])
    assert foreseen(results.plan, EVERY, file) == first
    assert len(asked) > len(first)
