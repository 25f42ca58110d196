"""The quirks of the tutorials, as a learner would write them: the diagnosis names each."""

import re
from pathlib import Path

import pytest

from attnbench.checking.agreement import check
from attnbench.checking.mistakes import catalogue
from attnbench.contract.loading import implementation
from attnbench.storage.records import Agreement
from attnbench.workloads.workload import Workload
from tests.checks import references

LEARNERS = Path(__file__).with_name("learners.py")
DOCUMENT = Path(__file__).parents[2] / "docs" / "tutorials.md"
SIZES = {"batch_size": 2, "seq_len": 9, "head_dim": 8}
ONE_HEAD = Workload(**SIZES, num_heads=1)
HEADS = Workload(**SIZES, num_heads=3)
PADDED = Workload(**SIZES, num_heads=2, mask="padding(2,9)")
CAUSAL = Workload(**SIZES, num_heads=2, mask="causal")
QUIRKS = [
    ("single_head_dim0", ONE_HEAD, "softmax_over_queries"),
    ("single_head_dim0", HEADS, "softmax_over_queries"),
    ("multi_head_dim0", HEADS, "softmax_over_heads"),
    ("mask_lost", PADDED, "padding_ignored"),
    ("dropout_always", CAUSAL, "dropout_in_evaluation"),
]

SHOWN = re.findall(r"It looks as if .*?\.(?= |$)", " ".join(DOCUMENT.read_text(encoding="utf-8").split()))
"""What the tutorials say that the check says."""


def said(text: str) -> str:
    """The sentence that names the cause, without the share of dropped weights, which varies."""
    cause = text[text.index("It looks as if ") :]
    return re.sub(r"[\d.]+%", "%", re.split(r"\.(?=\s|$)", cause, maxsplit=1)[0])


def judged(name: str, workload: Workload) -> Agreement:
    return check(references(workload), implementation(f"{LEARNERS}:{name}"))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("direction", ["inference", "forward_backward"])
@pytest.mark.parametrize(("name", "workload", "mistake"), QUIRKS)
def test_the_diagnosis_names_the_quirk(name: str, workload: Workload, mistake: str, direction: str) -> None:
    asked = Workload(**workload.axes() | {"direction": direction})
    found = judged(name, asked)
    assert not found.agrees
    assert found.mistakes == (mistake,)
    known = [planted.words for planted in catalogue(asked) if planted.name == mistake]
    assert (known or ["dropout is active in evaluation"])[0].split(":")[0] in found.diagnosis
    assert said(found.diagnosis) in map(said, SHOWN)
    assert found.step == ("masked scores" if mistake == "padding_ignored" else "weights")


@pytest.mark.parametrize("name", ["Declared", "Applied"])
def test_a_dropout_layer_changes_nothing_in_evaluation_whether_applied_or_not(name: str) -> None:
    found = judged(name, Workload(**SIZES, num_heads=2, mask="causal", scope="module"))
    assert found.agrees, found.diagnosis


def test_one_head_with_its_softmax_over_the_heads_gives_every_key_the_weight_1() -> None:
    found = judged("multi_head_dim0", ONE_HEAD)
    assert "softmax_over_heads" in found.mistakes
