"""The detection study plants mistakes, counts what is missed, and can be resumed."""

import tarfile
from concurrent.futures import ThreadPoolExecutor

import pytest
import typer

from attnbench.checking.agreement import check
from attnbench.contract.loading import implementation
from attnbench.workloads.workload import Workload
from studies import frame
from studies.detection import __main__ as detection
from studies.detection import blind, power
from tests.checks import references

NAMES = ("tile_dropped", "no_scale", "mask_inverted", "eps_in_the_sum")
RIGHT = [
    {"implementation": "sdpa", "seed": 1, "workload": "w", "inputs": inputs, "rule": rule, "is_right": True, **ratio}
    for inputs, rule, ratio in (("all", "ours", {"error_ratio": 0.25}), ("normal", "allclose 1e-2/1e-2", {}))
]


SEES_NOTHING = Workload(
    batch_size=2, num_heads=2, head_dim=16, seq_len=35, mask="causal+padding_to_nothing", direction="backward"
)
with tarfile.open(blind.ARCHIVE) as ARCHIVE:
    NAMED = [name for name in sorted(ARCHIVE.getnames()) if "/h" in name and name.endswith(".py")]
    TEXTS = {name: ARCHIVE.extractfile(name).read().decode() for name in NAMED}
FORMS = {name: text for name, text in TEXTS.items() if "mask=None" in text and "Convention: none\n" in text}


@pytest.mark.one_in(4)
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", FORMS)
def test_an_odd_but_right_function_is_right(name, tmp_path):
    file = tmp_path / "form.py"
    file.write_text(FORMS[name], encoding="utf-8")
    agreed = check(references(SEES_NOTHING), implementation(f"{file}:attention"))
    assert all(tensor.agrees for _, tensor in agreed.tensors()), agreed.diagnosis
    assert not {rule.rule for rule in agreed.broken_rules} - {"hidden keys"}


@pytest.fixture(scope="module")
def planted():
    return power.rows(17, "float32", NAMES[:3])


@pytest.mark.one_in(4)
@pytest.mark.parametrize("mistake", NAMES)
def test_a_mistake_is_planted_and_caught(mistake):
    found = list(power.cells(17, "float32", [mistake]))
    assert not [each for each in found if isinstance(each, power.Absent)]
    whole = [each for each in found if each.inputs == power.EVERYTHING]
    assert whole
    assert all(each.is_caught for each in whole)


def test_a_mistake_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(typer.BadParameter, match="there is no such mistake"):
        detection.detect(to=tmp_path, seeds=1, lengths="17", only="no_scal")


def test_a_missed_mistake_and_a_rejected_honest_result_are_counted_and_named(planted, tmp_path):
    absent = [{"mistake": NAMES[3], "dtype": "float32", "length": 17}]
    assert detection.write([*planted, *absent], RIGHT, tmp_path) == (0, 0)
    page = (tmp_path / "detection.md").read_text(encoding="utf-8")
    assert "Missed by our check: none." in page
    assert f"`{NAMES[3]}` (float32 at 17)" in page
    missed = [row | {"is_caught": row["is_caught"] and row["mistake"] != NAMES[0]} for row in planted]
    rejected = [row | {"is_right": row["rule"] != "ours"} for row in RIGHT]
    assert detection.write([*missed, *absent], rejected, tmp_path)[1] == 1
    page = (tmp_path / "detection.md").read_text(encoding="utf-8")
    assert f"Missed by our check: {NAMES[0]}." in page
    assert "Honest results that it rejected: 1 of 1" in page


def test_stored_repetitions_are_not_made_again_with_or_without_a_pool(tmp_path):
    numbers = []

    def make(number):
        numbers.append(number)
        return [{"number": number}]

    pieces = [frame.Piece(name="A piece", make=make, size=4), frame.Piece(name="other", make=make)]
    frame.complete(pieces[:1], tmp_path, most=2)
    with ThreadPoolExecutor(2) as pool:
        frame.complete(pieces, tmp_path, pool=pool)
    assert sorted(numbers) == [0, 0, 1, 2, 3]
    assert [row["number"] for row in frame.rows(tmp_path, "A piece")] == [0, 1, 2, 3]
