"""Each notable finding is reported where it was planted, with its numbers, and not where it was not."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from attnbench.analysis.results import Results
from attnbench.reports import story
from attnbench.reports.notable import findings
from attnbench.storage.records import Operator, Operators
from attnbench.workloads.workload import Workload
from tests import journals

Seconds = Callable[[Workload, str], float]
CAUSAL = journals.workloads(mask=("causal",), seq_len=(128, 512))
FLASH = Operators(
    calls=(
        Operator(name="aten::_scaled_dot_product_flash_attention_for_cpu", kind="attention", num_calls=1, self_s=1),
    ),
    observed="flash",
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Results]:
    """A run in which calls last what is planted."""

    def made(points: tuple[Workload, ...], names: tuple[str, ...], seconds: Seconds) -> Results:
        monkeypatch.setattr(journals, "seconds", seconds)
        return journals.write(tmp_path / "run", points, names)

    return made


def factor(text: str) -> float:
    """The first number of times."""
    found = re.search(r"([\d.]+) times", text)
    assert found is not None, text
    return float(found[1])


def test_equal_times_surprise_nobody(run: Callable[..., Results]) -> None:
    points = journals.workloads(dtype=("float32", "bfloat16"), scope=("attention", "module"), mask=("causal",))
    found = run(points, ("sdpa", "sdpa_flash", "sdpa_mask", "module_list", "fused"), lambda *_: 1e-3)
    assert findings(found) == {}
    assert "Notable" not in story.summary(found)


@pytest.mark.parametrize(("share", "is_reported"), [(2.0, True), (0.5, False)])
def test_half_precision_that_takes_longer(run: Callable[..., Results], share: float, *, is_reported: bool) -> None:
    points = journals.workloads(dtype=("float32", "bfloat16"), seq_len=(128, 512))
    found = findings(run(points, ("sdpa",), lambda workload, _: 1e-3 * (share if workload.dtype != "float32" else 1)))
    assert set(found) == ({"Half precision"} if is_reported else set())
    if is_reported:
        assert found["Half precision"].startswith("bfloat16 takes ")
        assert factor(found["Half precision"]) == pytest.approx(share, rel=0.1)


def test_page_faults_that_come_with_length(run: Callable[..., Results]) -> None:
    points = journals.workloads(seq_len=(512, 2048))
    found = findings(run(points, ("sdpa", "fused"), lambda *_: 20e-3))
    assert found.keys() == {"Page faults"}
    assert re.search(
        r"fused spends 0 % .* at length 512 and \d\d % at 2048 .* largest block is 128 MiB", *found.values()
    )
    assert found["Page faults"].endswith("happens to: fused.")


@pytest.mark.parametrize("became", [True, False])
def test_textbook_code_that_the_compiler_made_a_kernel_of(
    run: Callable[..., Results], monkeypatch: pytest.MonkeyPatch, *, became: bool
) -> None:
    textbook = journals.operators
    monkeypatch.setattr(
        journals,
        "operators",
        lambda workload, name, call_s: FLASH if became and "+" in name else textbook(workload, "fused", call_s),
    )
    names = ("sdpa", "fused", "fused+compile")
    found = findings(run(CAUSAL, names, lambda _, name: 4e-3 if name == "fused" else 1e-3))
    assert ("Compiled" in found) is became
    if became:
        assert "in 2 of 2 workloads what ran of fused+compile is PyTorch's flash kernel" in found["Compiled"]
        assert factor(found["Compiled"]) == pytest.approx(0.25, rel=0.1)


WHERE = Operator(name="aten::where", kind="mask", num_calls=2, self_s=0.1)


@pytest.mark.parametrize("makes_a_mask", [True, False])
def test_a_mask_as_a_tensor_beside_the_same_kernel_without_one(
    run: Callable[..., Results], monkeypatch: pytest.MonkeyPatch, *, makes_a_mask: bool
) -> None:
    """Whatever the implementations are called: what counts is which operators ran."""

    def operators(_: Workload, name: str, call_s: float) -> Operators:
        calls = (*FLASH.calls, WHERE) if makes_a_mask and name == "mine" else FLASH.calls
        return Operators(calls=calls, observed="flash")

    monkeypatch.setattr(journals, "operators", operators)
    found = findings(run(CAUSAL, ("sdpa", "other", "mine"), lambda _, name: 3e-3 if name == "mine" else 2e-3))
    assert set(found) == ({"Explicit mask"} if makes_a_mask else set())
    if makes_a_mask:
        assert found["Explicit mask"].startswith("the causal mask as a tensor (mine) takes ")
        assert "the same kernel without one (sdpa)" in found["Explicit mask"]
        assert factor(found["Explicit mask"]) == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("num_layers", [25, 8])
def test_a_layer_for_each_head_is_reported_length_by_length(
    run: Callable[..., Results], monkeypatch: pytest.MonkeyPatch, num_layers: int
) -> None:
    points = journals.workloads(scope=("attention", "module"), seq_len=(128, 512))
    textbook = journals.operators

    def seconds(workload: Workload, name: str) -> float:
        return 1e-3 * ((3 if workload.seq_len == 128 else 1.2) if name == "mine" else 1)

    def operators(workload: Workload, name: str, call_s: float) -> Operators:
        number = num_layers if name == "mine" else 2
        linear = Operator(name="aten::linear", kind="matmul", num_calls=number, self_s=0.1)
        return Operators(calls=(*textbook(workload, "fused", call_s).calls, linear))

    monkeypatch.setattr(journals, "operators", operators)
    found = findings(run(points, ("sdpa", "mine", "other"), seconds))
    assert ("A layer for each head" in found) is (num_layers > 8)  # as many as there are heads
    if num_layers > 8:
        reported = found["A layer for each head"]
        assert reported.startswith(
            "a linear layer for each head (mine, 25 of them) takes longer than 2 for all heads ("
        )
        assert re.search(r": (3\.0|2\.9|3\.1) times at length 128, 1\.2 times at length 512\.$", reported)


def test_a_name_from_outside_that_beats_the_baseline_is_shown_as_it_is(run: Callable[..., Results]) -> None:
    found = run(CAUSAL, ("sdpa", "<b>*mine*"), lambda _, name: 1e-3 if name == "sdpa" else 0.5e-3)
    assert findings(found).keys() == {"Baseline beaten"}
    assert findings(found)["Baseline beaten"].startswith("sdpa is beaten by <b>*mine* in 2 of 2 workloads (most for")
    assert "&lt;b&gt;*mine*" in story.page(found)
    assert "&lt;b&gt;\\*mine\\*" in story.summary(found)
    assert "<b>*mine*" not in story.page(found) + story.summary(found)
