"""Every mistake of the catalogue is caught at workloads where it makes a difference, and named correctly."""

from collections import Counter, defaultdict

import msgspec
import pytest
import torch

from attnbench.checking.agreement import check
from attnbench.checking.mistakes import catalogue
from attnbench.checking.reference import answers, largest, reference_for_probe
from attnbench.workloads.workload import Workload
from studies.detection.planted import implementation
from tests.checks import references

LENGTH = 11


def workload(**axes):
    sizes = {"seq_len": LENGTH, "num_heads": 2, "head_dim": 8, "direction": "inference"}
    return Workload(**(sizes | axes))


WORKLOADS = (
    workload(),
    workload(mask="causal"),
    workload(mask="padding", batch_size=2),
    workload(mask="sliding_window(3)"),
    workload(mask="causal", kv_len=15),
    workload(mask="causal_bottom_right", kv_len=15),
    workload(batch_size=2),
    workload(mask="padding(11,0)", batch_size=2),
    workload(num_heads=4, num_kv_heads=2, direction="forward_backward"),
    workload(direction="forward_backward", mask="causal"),
    workload(scope="module", num_heads=3),
    workload(scope="module", num_heads=3, direction="forward_backward"),
    workload(mask="causal+padding", batch_size=2),
    workload(mask="additive", num_heads=3),
    workload(mask="alibi", num_heads=3, kv_len=8),
    workload(mask="alibi_bottom_right", num_heads=8, kv_len=8),
    workload(mask="causal+softcap(2)+additive", direction="forward_backward"),
    workload(sinks="learned", num_heads=3, mask="causal", direction="forward_backward"),
    workload(scale=0.1, mask="causal", direction="forward_backward"),
    workload(mask="relative_buckets(8,20)", num_heads=4, scale=1.0, direction="forward_backward"),
    workload(mask="window(2,3)"),
    workload(mask="causal+chunks(3)"),
    workload(mask="causal_bottom_right+chunks_bottom_right(3)", kv_len=15),
    workload(mask="ragged", batch_size=3, kv_len=40),
)
MADE = [(point, planted) for point in WORKLOADS for planted in catalogue(point)]
NAMES = {planted.name for _, planted in MADE}
PER_NAME = 2
"""Workloads at which each name is tried, each with another form. The second belongs to the long tests."""


def chosen():
    """Choose a few forms of each name, each at another workload; the study tries all of them."""
    times = Counter()
    for point in WORKLOADS:
        forms = defaultdict(list)
        for planted in catalogue(point):
            forms[planted.name].append(planted)
        for name, planted in forms.items():
            if times[name] < PER_NAME:
                form = planted[times[name] * (len(planted) - 1) // (PER_NAME - 1)]
                yield pytest.param(point, form, id=f"{name}-{point.id}", marks=[pytest.mark.long] * times[name])
                times[name] += 1


CASES = list(chosen())


def makes_a_difference(point, planted):
    for reference in references(point).by_probe.values():
        answer = planted.answer(point, reference.rows)
        made = answers(point, reference.drawn, reference.grad_rows.double(), answer)
        for name, expected in reference.expected.items():
            if not largest(made[name], expected) <= 1e-3 * reference.tolerance(name):
                return True
    return False


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("point", "planted"), CASES)
def test_it_is_caught_and_named(point, planted):
    found = check(references(point), implementation(planted))
    if found.agrees:
        assert not makes_a_difference(point, planted)
        return
    if all(tensor.agrees for probe in found.probes for tensor in probe.tensors):
        assert found.broken_rules  # it shows only in another calling mode, and is named by that
        return
    assert planted.name in found.mistakes, found.diagnosis
    assert set(found.mistakes) <= NAMES
    if len(found.mistakes) == 1:
        assert found.step == planted.step
    if len(found.mistakes) > 1:
        assert "cannot be distinguished from" in found.diagnosis or "something else random" in found.diagnosis


def test_no_sentence_is_twice_in_the_catalogue_of_a_workload():
    for point in WORKLOADS:
        words = Counter(planted.words for planted in catalogue(point))
        assert not [each for each, times in words.items() if times > 1]


@pytest.mark.parametrize("point", WORKLOADS[::5], ids=lambda point: point.id)
def test_a_mistake_answers_in_the_dtype_of_its_inputs(point):
    half = msgspec.structs.replace(point, dtype="bfloat16")
    reference = reference_for_probe(half, "normal", 0)
    inputs = reference.drawn.map(torch.Tensor.bfloat16)
    for planted in catalogue(half):
        assert planted.answer(half, reference.rows)(inputs).dtype == torch.bfloat16, planted.words
