"""The check finds planted mistakes on every dtype, in output and gradients, and finds nothing in honest forms.

Each mistake is planted in a copy of the textbook form; the honest implementations have laws of their own in
tests/implementations. The full catalogue with its table of detection power is yet to come.
"""

import math

import pytest
import torch

from harness import oracle
from harness.agreement import check, refer
from harness.case import TORCH_DTYPES
from harness.contract import Attention, Implementation
from harness.inputs import PROBES, draw_normal, generator, needle_targets
from harness.records import Workload


def shown(scores, mask):
    return scores if mask.hidden is None else scores.masked_fill(mask.hidden, -math.inf)


class Textbook(Attention):
    """Right; each subclass below changes one step."""

    def scores(self, query, key):
        return query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])

    def weights(self, scores, mask):
        return shown(scores, mask).softmax(-1)

    def attend(self, query, key, value, mask):
        return self.weights(self.scores(query, key), mask) @ value


class NoScale(Textbook):
    def scores(self, query, key):
        return query @ key.transpose(-2, -1)


class ScaledByWidth(Textbook):
    def scores(self, query, key):
        return query @ key.transpose(-2, -1) / query.shape[-1]


class SoftmaxOverQueries(Textbook):
    def weights(self, scores, mask):
        return shown(scores, mask).softmax(-2).nan_to_num(0.0)


class MaskAfterSoftmax(Textbook):
    def weights(self, scores, mask):
        weights = scores.softmax(-1)
        return weights if mask.hidden is None else weights.masked_fill(mask.hidden, 0.0)


class MaskOffByOne(Textbook):
    def weights(self, scores, mask):
        late = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(1)
        return scores.masked_fill(~late, -math.inf).softmax(-1)


class MaskIgnored(Textbook):
    def weights(self, scores, mask):
        return scores.softmax(-1)


class LastKeyDropped(Textbook):
    def weights(self, scores, mask):
        hidden = torch.zeros(scores.shape[-1], dtype=torch.bool)
        hidden[-1] = True
        return shown(scores, mask).masked_fill(hidden, -math.inf).softmax(-1).nan_to_num(0.0)


class MiddleTileDropped(Textbook):
    def weights(self, scores, mask):
        hidden = torch.zeros(scores.shape[-1], dtype=torch.bool)
        hidden[scores.shape[-1] // 2 : scores.shape[-1] // 2 + 4] = True
        return shown(scores, mask).masked_fill(hidden, -1e4).softmax(-1)


class HeadsSwapped(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value.flip(1), mask)


class FirstRowOnly(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return torch.cat([out[:1]] * out.shape[0])


class NoGradientOfKey(Textbook):
    def scores(self, query, key):
        return super().scores(query, key.detach())


class WrongGradientOfQuery(Textbook):
    def scores(self, query, key):
        scores = super().scores(query, key)
        return scores + 0.1 * (query - query.detach()).sum(-1, keepdim=True) * torch.arange(key.shape[2]).to(query)


class NotFinite(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return out.index_fill(2, torch.tensor([0]), math.nan)


class SumsInBfloat16(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query.bfloat16(), key.bfloat16(), value.bfloat16(), mask).to(query.dtype)


ALWAYS_WRONG = [NoScale, ScaledByWidth, SoftmaxOverQueries, LastKeyDropped, MiddleTileDropped, HeadsSwapped, NotFinite]
WRONG_UNDER_A_MASK = [MaskAfterSoftmax, MaskOffByOne, MaskIgnored]


def verdict(module, **axes):
    defaults = {"seq_len": 70, "num_heads": 2, "head_dim": 16, "batch_size": 2, "mask": "causal"}
    workload = Workload(**{**defaults, "direction": "forward_backward", **axes})
    references = {probe: refer(workload, probe, 0) for probe in PROBES}
    return check(workload, Implementation(build=module, source="a test"), references)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("module", ALWAYS_WRONG + WRONG_UNDER_A_MASK, ids=lambda module: module.__name__)
def test_every_planted_mistake_is_found(module, dtype):
    found = verdict(module, dtype=dtype)
    assert not found.agrees
    assert found.diagnosis


@pytest.mark.parametrize("module", ALWAYS_WRONG, ids=lambda module: module.__name__)
def test_mistakes_are_found_at_long_lengths_by_sampled_rows(module):
    assert not verdict(module, seq_len=4096, batch_size=1, direction="inference", mask="none").agrees


@pytest.mark.parametrize("scope", ["attention", "module"])
@pytest.mark.parametrize(
    ("module", "said"), [(NoGradientOfKey, "gradient of key"), (WrongGradientOfQuery, "gradient of query")]
)
def test_a_wrong_gradient_is_found_where_the_output_is_right(module, said, scope):
    found = verdict(module, scope=scope)
    assert said in found.diagnosis or scope == "module"
    wrong = {tensor.tensor for _, tensor in found.tensors() if not tensor.agrees}
    assert wrong
    assert "output" not in wrong
    assert verdict(module, scope=scope, direction="inference").agrees  # which has no gradients to be wrong


def test_a_row_of_the_batch_written_for_all_is_found():
    assert not verdict(FirstRowOnly).agrees


def test_low_precision_inside_float32_is_found():
    assert not verdict(SumsInBfloat16).agrees


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
@pytest.mark.parametrize("scope", ["attention", "module"])
def test_the_textbook_form_is_right(dtype, mask, scope):
    found = verdict(Textbook, dtype=dtype, mask=mask, scope=scope)
    assert found.agrees, found.diagnosis
    assert found.error_ratio is not None
    assert 0 < found.error_ratio < 1


def test_the_diagnosis_names_tensor_place_and_both_values():
    found = verdict(NotFinite)
    assert "output is wrong" in found.diagnosis or "gradient" in found.diagnosis
    assert "not finite" in found.diagnosis
    wrong = next(t for _, t in verdict(NoScale).tensors() if t.tensor == "output" and not t.agrees)
    assert wrong.actual is not None
    assert abs(wrong.actual - wrong.expected) == pytest.approx(wrong.error)


class ChangesItsInput(Textbook):
    def attend(self, query, key, value, mask):
        with torch.no_grad():
            query.mul_(2)
        return super().attend(query / 2, key, value, mask)


class WrongShape(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask)[:, :, :-1]


class WrongDtype(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask).double()


@pytest.mark.parametrize(
    ("module", "said"), [(ChangesItsInput, "changed its input"), (WrongShape, "has shape"), (WrongDtype, "has dtype")]
)
def test_a_broken_promise_is_an_error_in_words(module, said):
    with pytest.raises(ValueError, match=said):
        verdict(module, direction="inference")


def test_a_vacuous_comparison_is_refused(monkeypatch):
    def constant(workload, seed):
        return draw_normal(workload, seed).map(torch.ones_like)

    monkeypatch.setitem(PROBES, "constant", constant)
    with pytest.raises(ValueError, match="constant or not finite"):
        refer(Workload(seq_len=4, direction="inference"), "constant", 0)


@pytest.mark.parametrize("mask", ["none", "causal", "padding", "causal_bottom_right"])
def test_the_oracle_is_attention_as_a_sentence_says_it(mask):
    """One more time, a number at a time: the oracle itself must not be taken on trust."""
    workload = Workload(batch_size=2, seq_len=3, kv_len=4, num_heads=4, num_kv_heads=2, head_dim=2, mask=mask)
    drawn = draw_normal(workload, 0)
    query, key, value = (drawn.tensors[name] for name in ("query", "key", "value"))
    answer = oracle.answer(workload, drawn, torch.arange(3))
    seen = workload.mask_rule.dense(2, 3, 4)
    for b in range(2):
        for h in range(4):
            for i in range(3):
                keys = [j for j in range(4) if seen[b, i, j]]
                score = {
                    j: sum(float(query[b, h, i, c] * key[b, h // 2, j, c]) for c in range(2)) / 2**0.5 for j in keys
                }
                total = sum(math.exp(s) for s in score.values())
                for c in range(2):
                    mean = sum(math.exp(score[j]) / total * float(value[b, h // 2, j, c]) for j in keys)
                    assert float(answer[b, h, i, c]) == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("form", oracle.YARDSTICKS, ids=lambda form: form.__name__)
def test_the_yardsticks_have_right_gradients(form):
    workload = Workload(seq_len=3, kv_len=4, num_heads=2, head_dim=2, mask="causal")
    tensors = [tensor.requires_grad_() for tensor in draw_normal(workload, 0).tensors.values()]
    seen = oracle.seen_rows(workload, torch.arange(3))
    assert torch.autograd.gradcheck(lambda *qkv: form(*qkv, seen), tensors)


def test_the_same_numbers_are_drawn_for_every_dtype_and_others_for_another_seed():
    first, again = draw_normal(Workload(dtype="float32"), 0), draw_normal(Workload(dtype="bfloat16"), 0)
    assert torch.equal(first.tensors["query"], again.tensors["query"])
    assert not torch.equal(first.tensors["query"], draw_normal(Workload(seed=1), 0).tensors["query"])
    assert set(TORCH_DTYPES) == {"float64", "float32", "bfloat16", "float16"}


def test_needles_point_at_real_keys_of_many_kinds():
    workload = Workload(seq_len=300, kv_len=200)
    targets = needle_targets(workload, generator(0))
    assert targets.shape == (300,)
    assert int(targets.min()) >= 0
    assert int(targets.max()) == 199
    assert {0, 63, 64, 127, 128} <= set(targets.tolist())
