"""Right answers are computed on the workload's device, in parts, with bounded memory and countable time."""

import itertools
from collections.abc import Iterator

import msgspec
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from attnbench.case import Inputs, draw_normal, draw_weights
from attnbench.checking import oracle
from attnbench.checking.probes import PROBES
from attnbench.checking.reference import References, call_candidate, errors, reference_for_probe
from attnbench.contract import Implementation
from attnbench.devices.cpu import Cpu
from attnbench.workloads.workload import Workload
from tests import elsewhere
from tests.checking.textbook import Textbook
from tests.elsewhere import Counted, Elsewhere

FORMS = {"oracle": oracle.attend, "textbook": oracle.textbook, "recomputed": oracle.recomputed}
FORMS["detached"] = oracle.OF_MOVED[0]
SIZES = {"batch_size": 2, "num_heads": 64, "num_kv_heads": 8, "head_dim": 128, "seq_len": 16384}
TRAINED = {"device": elsewhere.NAME, "direction": "forward_backward"}
LONG = Workload(**SIZES, **TRAINED, dtype="bfloat16", mask="causal")
FLOPS_PER_S, SLOW_FLOPS_PER_S, MOST_S, MOST_BYTES = 60e12, 10e9, 60.0, 8 * 2**30


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize(
    ("mask", "sinks"),
    [("none", "none"), ("causal+alibi", "none"), ("additive+softcap(2)", "none"), ("relative_buckets", "learned")],
)
def test_an_answer_in_parts_is_the_whole_one_forward_and_backward(form, mask, sinks, monkeypatch):
    point = Workload(batch_size=2, seq_len=6, kv_len=7, num_heads=6, num_kv_heads=2, head_dim=4, mask=mask, sinks=sinks)
    rows, steps = torch.tensor([0, 2, 5]), []

    def found() -> list[torch.Tensor]:
        inputs = draw_normal(point, 0).map(lambda tensor: tensor.requires_grad_())
        output = oracle.answer(point, inputs, rows, form, lambda: steps.append(1))
        return [output, *torch.autograd.grad(output, list(inputs.tensors.values()), torch.ones_like(output))]

    whole = found()
    assert len(steps) == 1
    monkeypatch.setattr(oracle, "PART_PAIRS", 1)
    torch.testing.assert_close(found(), whole, rtol=0, atol=1e-13)
    assert len(steps) == 1 + 2 * 2 * 6 * 3  # each forward, and again on the way back


@pytest.mark.parametrize("has_float64", [True, False])
@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("scope", ["attention", "module"])
def test_gradients_are_compared_where_the_yardsticks_compute(precision, scope, has_float64):
    kind = type("Other", (Elsewhere,), {"has_float64": has_float64})
    sizes = {"seq_len": 6, "num_heads": 2, "head_dim": 4}
    point = Workload(**sizes, **TRAINED, scope=scope, float32_matmul_precision=precision)
    with elsewhere.installed(kind), Counted():
        made = reference_for_probe(point, "normal", 0)
        assert {tensor.device.type for tensor in made.inputs.tensors.values()} == {"meta"}
    assert {tensor.device.type for tensor in made.expected.values()} == {"cpu"}
    assert any(name.startswith("gradient of ") for name in made.expected)


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("has_float64", [True, False])
def test_right_answers_are_computed_on_the_device_where_it_has_float64(has_float64, precision, monkeypatch):
    """All once ran on the CPU, which takes hours at long lengths; only the time showed it."""
    ask, asked = oracle.answer, []

    def noted(workload, inputs, rows, form=oracle.attend, *rest):
        asked.append((form, inputs.tensors["query"].device.type))
        return ask(workload, inputs, rows, form, *rest)

    monkeypatch.setattr(oracle, "answer", noted)
    kind = type("Other", (Elsewhere,), {"has_float64": has_float64})
    sizes = {"seq_len": 6, "num_heads": 2, "head_dim": 4, "direction": "forward_backward"}
    point = Workload(device=elsewhere.NAME, float32_matmul_precision=precision, **sizes)
    with elsewhere.installed(kind), Counted():
        made = reference_for_probe(point, "normal", 0)
        assert {form for form, _ in asked} == {oracle.attend}  # the others take longer, and are rarely needed
        assert made.tolerances
    exact = "meta" if has_float64 else "cpu"
    by_yardsticks = "meta" if has_float64 or precision == "high" else "cpu"  # TF32 exists only on the device
    assert set(asked) == {
        *((form, exact) for form in (oracle.attend, *oracle.SCATTERED)),
        *((form, by_yardsticks) for form in (*oracle.YARDSTICKS, *oracle.OF_MOVED)),
    }


def test_a_reference_that_was_released_gives_the_same_again():
    kind = type("Other", (Cpu,), {"is_host": False})
    point = Workload(
        device=elsewhere.NAME, seq_len=6, num_heads=2, head_dim=4, direction="forward_backward", dtype="bfloat16"
    )
    with elsewhere.installed(kind):
        made = reference_for_probe(point, "normal", 0)
        inputs, grads = made.inputs, made.grad_output
        made.release()
        assert made.inputs is not inputs
        assert all(torch.equal(made.inputs.tensors[name], tensor) for name, tensor in inputs.tensors.items())
        assert torch.equal(made.grad_output, grads)
        here = reference_for_probe(msgspec.structs.replace(point, device="cpu"), "normal", 0)
        inputs = here.inputs
        here.release()
        assert here.inputs is inputs


LARGE = 2**24
"""Tensors with at least this many elements have no numbers on the host, either."""


def drawn_long(draw):
    """Draw a probe at the long workload without numbers."""

    def drawn(workload: Workload, seed: int) -> Inputs:
        if workload.seq_len != LONG.seq_len:
            return draw(workload, seed)
        shapes = {"query": (2, 64, 16384, 128), "key": (2, 8, 16384, 128), "value": (2, 8, 16384, 128)}
        tensors = {name: torch.ones(1, dtype=torch.float64).expand(shape) for name, shape in shapes.items()}
        return Inputs(tensors=tensors, weights=draw_weights(workload))

    return drawn


@pytest.fixture(scope="module")
def counted() -> Iterator[tuple[Counted, int, list[float], References]]:
    """Count bytes, FLOPs, and FLOPs before each step of all probes of a long workload; return the references, too."""
    steps: list[float] = []
    with elsewhere.installed(Elsewhere), pytest.MonkeyPatch.context() as patch:
        for name, draw in PROBES.items():
            patch.setitem(PROBES, name, drawn_long(draw))
        with Counted(LARGE) as seen, FlopCounterMode(display=False) as all_:
            found = References(LONG, 0, on_step=lambda: steps.append(float(all_.get_total_flops())))
        steps.append(float(all_.get_total_flops()))
        yield seen, all_.get_total_flops(), steps, found


@pytest.mark.long
def test_a_long_workload_is_checked_by_all_probes_in_a_minute_and_eight_gibibytes(counted, record_property):
    """Inputs and gradients of every probe once stayed on the device during the work on the last one."""
    seen, flops, _, found = counted
    record_property("flops", flops)
    record_property("peak_bytes", seen.peak_bytes)
    assert set(found.by_probe) == set(PROBES)
    assert (
        flops > (len(PROBES) - 1) * 2 * 2 * 64 * 500 * 16384 * 256 * 15
    )  # five forms, forward and, except one, backward
    assert flops / FLOPS_PER_S < MOST_S
    assert seen.peak_bytes < MOST_BYTES
    assert seen.held_bytes < MOST_BYTES / 8  # kept while an implementation needs the memory


@pytest.mark.long
def test_a_heartbeat_comes_often_whatever_the_length(counted):
    _, flops, steps, _ = counted
    longest = max(after - before for before, after in itertools.pairwise(steps))
    assert longest < flops / 100
    assert longest / SLOW_FLOPS_PER_S < MOST_S  # a slow processor, too, stays within the timeout of a step


class LeaksIntoAnotherRow(Textbook):
    """The query's gradient is right but for one row, which no compared row is."""

    row = 0

    def attend(self, query, key, value, mask):
        if query.requires_grad:
            query.register_hook(lambda grad: grad.index_fill(2, torch.tensor([self.row]), 1.0))
        return super().attend(query * 1.0, key, value, mask)


def test_a_query_has_no_gradient_where_its_output_has_none():
    point = Workload(seq_len=2048, num_heads=2, head_dim=4, direction="forward_backward")
    reference = reference_for_probe(point, "normal", 0)
    assert len(reference.rows) < point.seq_len
    assert reference.expected["gradient of query"].shape[2] == len(reference.rows)
    assert reference.drawn.tensors["query"].shape[2] == point.seq_len
    LeaksIntoAnotherRow.row = next(row for row in range(2048) if row not in reference.rows)
    for module, wrong in ((Textbook, set()), (LeaksIntoAnotherRow, {"gradient of query"})):
        found = errors(call_candidate(Implementation(build=module, source="a test"), reference).compared, reference)
        assert {each.tensor for each in found if not each.agrees} == wrong
