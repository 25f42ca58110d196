"""Mistakes that show only on one kind of input, in one mode, in one layout or in memory; honest forms pass."""

import pytest
import torch

from attnbench.case import bind
from attnbench.checking import agreement
from attnbench.checking.mistakes import catalogue
from attnbench.checking.reference import References, call_candidate, errors, reference_for_probe
from attnbench.contract import Implementation
from attnbench.workloads.workload import Workload
from studies.detection.planted import implementation as planted
from tests.checking.textbook import Textbook

SIZES = {"batch_size": 2, "seq_len": 40, "num_heads": 2, "head_dim": 16, "direction": "forward_backward"}


class WrongWithoutGradients(Textbook):
    def attend(self, *given):
        out = super().attend(*given)
        return out if torch.is_grad_enabled() else out * 1.1


class SumsInHalf(Textbook):
    """Sums the keys' contributions in the dtype of the inputs."""

    def attend(self, query, key, value, mask):
        weights = (query.float() @ key.float().mT / query.shape[-1] ** 0.5).softmax(-1)
        output = 0
        for number in range(key.shape[2]):
            output = output + (weights[..., number : number + 1] * value[..., number : number + 1, :]).to(query.dtype)
        return output


class Clamped(Textbook):
    def scores(self, query, key, mask):
        scores = super().scores(query, key, mask).clamp(-2e4, 2e4)
        return scores if mask.hidden is None else scores.masked_fill(mask.hidden, -torch.inf)


class UsesTheStridesOfTheQuery(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key.as_strided(key.shape, query.stride()), value, mask)


class Zeros(Textbook):
    def attend(self, *given):
        return super().attend(*given).detach() * 0.0


class ReadsUnwrittenMemory(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask) + 0 * torch.empty(*query.shape[:3], value.shape[3])


def verdict(module, **axes):
    references = References(Workload(**SIZES | axes), 0)
    return agreement.compare(references, Implementation(build=module, source="a test"))


def wrong_probes(found):
    return {each.probe for each in found.probes if not all(tensor.agrees for tensor in each.tensors)}


def broken_rules(found):
    return {each.rule for each in found.rules if not each.holds and not each.is_noted}


LONG = {"batch_size": 1, "seq_len": 8, "kv_len": 2048}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "axes",
    [
        *({"mask": "causal"}, {"mask": "additive"}, {"layout": "mixed"}, {"dtype": "bfloat16"}),
        *({"dtype": "bfloat16", **LONG}, {"dtype": "float16", **LONG}),
    ],
)
def test_an_honest_form_is_right_on_every_probe_and_rule(axes):
    assert verdict(Textbook, **axes).agrees


def of(module):
    return lambda _: Implementation(build=module, source="a test")


def known(name, words):
    return lambda point: planted(next(each for each in catalogue(point) if each.name == name and words in each.words))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("made", "axes", "probe"),
    [
        (known("finite_fill", "-20000"), {"mask": "causal"}, "huge"),
        (known("finite_fill", "-40000"), {"mask": "causal"}, "huge"),
        (known("finite_fill", "-20000"), {"mask": "padding", "dtype": "bfloat16"}, "huge"),
        (known("no_maximum", "1e-6"), {}, "shifted"),
        (known("no_maximum", "to 80"), {}, "shifted"),
        (known("floor_of_the_maximum", ": -100"), {}, "shifted"),
        (known("floor_of_the_maximum", ": -100"), {"dtype": "float16"}, "shifted"),
        (of(Clamped), {"mask": "causal"}, "huge"),
        (of(Clamped), {"mask": "causal", "scope": "module", "dtype": "float64"}, "huge"),
        (known("bfloat16_bias", ""), {"mask": "additive"}, "normal"),
        (of(SumsInHalf), {"dtype": "bfloat16", **LONG}, "offset"),
        (of(SumsInHalf), {"dtype": "float16", **LONG}, "offset"),
    ],
)
def test_a_kind_of_input_finds_a_mistake(made, axes, probe):
    point = Workload(**SIZES | axes)
    found = agreement.compare(References(point, 0), made(point))
    assert probe in wrong_probes(found)


def test_the_strides_of_the_query_are_wrong_for_the_key_in_a_mixed_layout():
    assert wrong_probes(verdict(UsesTheStridesOfTheQuery, layout="mixed"))


def test_zeros_are_no_answer_to_an_earlier_call():
    found = verdict(Zeros, direction="inference", scope="module", dtype="bfloat16", mask="sliding_window(9)")
    assert not broken_rules(found) & {agreement.OUTPUTS_APART, "without gradients"}
    assert wrong_probes(found)


def test_memory_that_was_never_written_is_found():
    found = verdict(ReadsUnwrittenMemory)
    assert wrong_probes(found) or broken_rules(found)


@pytest.mark.parametrize("axes", [{}, {"sinks": "learned"}, {"mask": "softcap(5)"}])
def test_the_gradient_of_the_key_bias_is_compared_even_where_it_is_0(axes):
    reference = reference_for_probe(Workload(**SIZES | {"scope": "module"} | axes), "normal", 0)
    assert "gradient of key_bias weights" in reference.expected


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shifted_scores_are_far_from_0_and_weigh_several_keys(dtype):
    workload = Workload(**SIZES | {"dtype": dtype})
    inputs = reference_for_probe(workload, "shifted", 0).drawn.tensors
    scores = inputs["query"] @ inputs["key"].transpose(-2, -1) * workload.score_scale
    means = scores.mean(-1)
    assert means.abs().min() > 88 + 10  # float32's exponential overflows beyond 88, and there is a spread
    assert (means < 0).any()
    assert (means > 0).any()
    assert scores.softmax(-1).amax(-1).median() < 0.5


def test_biases_use_the_digits_of_float32():
    bias = bind(Workload(**SIZES | {"mask": "additive"})).added(torch.float32)
    assert not torch.equal(bias, bias.bfloat16().float())
    assert torch.equal(bias.double(), bind(Workload(**SIZES | {"mask": "additive"})).added(torch.float64))


class RoundsExponentials(Textbook):
    """Rounds exponentials for the product with the values but not for their sum, as FlashAttention does."""

    def attend(self, query, key, value, mask):
        scores = self.scores(query, key, mask).float()
        powers = (scores - scores.detach().amax(-1, keepdim=True).clamp(min=-1e30)).exp()
        total = powers.sum(-1, keepdim=True)
        return ((powers.to(value) @ value).float() / total.where(total > 0, 1.0)).to(value)


def test_roundings_of_large_terms_that_cancel_are_honest_in_half_precision():
    few = {"batch_size": 1, "num_heads": 1, "seq_len": 32, "kv_len": 2048}
    reference = reference_for_probe(Workload(**SIZES | few | {"dtype": "bfloat16"}), "large", 0)
    honest = Implementation(build=RoundsExponentials, source="a test")
    assert all(each.agrees for each in errors(call_candidate(honest, reference).compared, reference))
    assert set(reference.expected) == {"output", "gradient of value"}
