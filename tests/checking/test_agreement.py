"""The check finds errors in output and gradients, accepts honest forms, and refuses to compare nothing.

The catalogue of known mistakes is tested in test_mistakes.py; implementations have laws of their own.
"""

import math
import re

import pytest
import torch

from attnbench.case import draw_normal, generator
from attnbench.checking import oracle
from attnbench.checking.agreement import check
from attnbench.checking.probes import PROBES, needle_targets
from attnbench.checking.reference import SCREENED, References, call_candidate, errors, output_error, reference_for_probe
from attnbench.contract import Implementation
from attnbench.contract.functions import from_function
from attnbench.contract.loading import implementation
from attnbench.storage.records import CheckVerdict
from attnbench.workloads.workload import Workload
from tests.checking.textbook import Textbook
from tests.checks import references
from tests.pairwise import pairwise


class WrongGradientOfQuery(Textbook):
    def attend(self, query, key, value, mask):
        nothing = (query - query.detach()).sum(-1, keepdim=True)
        return super().attend(query, key, value, mask) + 0.1 * nothing


def verdict(module, **axes):
    defaults = {"seq_len": 70, "num_heads": 2, "head_dim": 16, "batch_size": 2, "mask": "causal"}
    workload = Workload(**{**defaults, "direction": "forward_backward", **axes})
    return check(references(workload), Implementation(build=module, source="a test"))


def test_a_brief_check_finds_a_wrong_answer_too():
    workload = Workload(seq_len=70, num_heads=2, head_dim=16, direction="forward_backward", mask="causal")
    references = References(workload, 0, is_brief=True)
    found = check(references, Implementation(build=Textbook, source="a test"))
    assert found.agrees
    assert [each.probe for each in found.probes] == ["normal"]
    assert not found.rules
    wrong = check(references, Implementation(build=WrongGradientOfQuery, source="a test"))
    assert {each.tensor for _, each in wrong.tensors() if not each.agrees} == {"gradient of query"}


@pytest.mark.parametrize(("head_dim", "seed"), [(2, 16), (2, 17), (8, 22)])
def test_honest_roundings_of_one_key_are_no_mistake(head_dim, seed):
    one = {"batch_size": 1, "seq_len": 1, "num_heads": 1, "head_dim": head_dim, "seed": seed}
    workload = Workload(**one, dtype="bfloat16", scope="module", direction="forward_backward")
    found = check(references(workload), implementation("chunked"))
    assert found.agrees, found.diagnosis


LONG = {"seq_len": 1030, "batch_size": 1, "num_heads": 4, "head_dim": 16, "direction": "inference", "mask": "causal"}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("scope", ["attention", "module"])
def test_one_wrong_row_of_a_long_output_is_found_whichever_it_is(dtype, scope):
    reference = reference_for_probe(Workload(**LONG, dtype=dtype, scope=scope), SCREENED, 0)
    output = call_candidate(Implementation(build=Textbook, source="a test"), reference).output
    compared, same = output_error(output, reference)
    assert compared.agrees
    assert same is reference
    others = sorted(set(range(1030)) - set(reference.rows.tolist()))
    for row in (others[0], others[len(others) // 2], others[-1]):
        spoiled = output.index_copy(-2, torch.tensor([row]), -output.select(-2, row).unsqueeze(-2))
        compared, wider = output_error(spoiled, reference)
        assert not compared.agrees
        assert compared.worst[-2] == row
        assert row in wider.rows
        assert 0 < compared.allowed <= wider.tolerance("output")


def test_the_check_says_which_row_of_a_long_output_is_wrong():
    references = References(Workload(**LONG), 0)
    row = next(row for row in range(1029, 0, -1) if not any(row in each.rows for each in references.by_probe.values()))

    class OneRowWrong(Textbook):
        def attend(self, *given):
            out = super().attend(*given)
            return out.index_fill(2, torch.tensor([row]), 3.0) if out.shape[2] > 1000 else out

    found = check(references, Implementation(build=OneRowWrong, source="a test"))
    assert re.search(rf"output is wrong on needles inputs: at \[0, \d, {row}, ", found.diagnosis), found.diagnosis


def test_probes_on_which_correct_code_overflows_are_left_out_and_without_any_nothing_is_right(monkeypatch):
    """Whether it overflows is known only from the yardsticks, which are evaluated if an answer is not right at once."""
    references = References(Workload(seq_len=9, num_heads=1, head_dim=8, scale=1e38), 0)
    assert [each.probe for each in check(references, implementation("sdpa")).probes] == ["large", "huge"]
    references.by_probe = {"normal": references.by_probe["normal"]}
    with pytest.raises(ValueError, match="correct code overflows float32 here"):
        check(references, implementation("sdpa"))


def test_a_small_error_is_judged_without_yardsticks_and_a_larger_one_as_with_them():
    """The least limits are never above the tolerance, so what is right without yardsticks is right with them."""
    reference = reference_for_probe(
        Workload(seq_len=40, num_heads=2, head_dim=8, direction="forward_backward"), "normal", 0
    )
    observed = call_candidate(implementation("sdpa"), reference).compared
    with torch.no_grad():
        assert reference_for_probe(reference.workload, "normal", 1).tolerance("gradient of key") > 0
    quick = {name: reference.judge(name, tensor) for name, tensor in observed.items() if name in reference.expected}
    assert "tolerances" not in vars(reference)
    for name, found in quick.items():
        whole = reference.tolerances[name].judge(observed[name])
        assert found.agrees
        assert whole.agrees
        assert found.error == whole.error
        assert found.allowed <= whole.allowed
        assert bool((reference.least[name].limit.peak <= reference.tolerances[name].limit.peak).all())
        assert bool((reference.least[name].limit.square <= reference.tolerances[name].limit.square).all())
        spoiled = observed[name] + 1.2 * reference.tolerance(name)
        assert reference.judge(name, spoiled) == reference.tolerances[name].judge(spoiled)


@pytest.mark.parametrize("scope", ["attention", "module"])
def test_an_honest_answer_at_every_row_is_that_of_the_oracle(scope, monkeypatch):
    axes = {"seq_len": 90, "kv_len": 70, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "mask": "causal+alibi"}
    workload, steps = Workload(**axes, scope=scope, embed_dim=24), []
    drawn, rows = draw_normal(workload, 0), torch.arange(90)
    right = oracle.answer(workload, drawn, rows)
    monkeypatch.setattr(oracle, "PART_PAIRS", 70 * 40)
    whole = oracle.answer(workload, drawn, rows, oracle.textbook, lambda: steps.append(1))
    torch.testing.assert_close(whole, right, rtol=0, atol=1e-13)
    assert len(steps) == 4 * 3


def test_the_rows_that_the_oracle_answers_are_others_for_another_seed():
    workload = Workload(seq_len=2000, direction="inference")
    one, again, other = (oracle.checked_rows(workload, generator(0, 4, seed)).tolist() for seed in (1, 1, 2))
    assert one == again
    assert len(set(one) & set(other)) < len(one) / 2


class NanToNum(Textbook):
    """NaN of queries that see nothing becomes 0, by the usual idiom."""

    def attend(self, query, key, value, mask):
        return self.scores(query, key, mask).softmax(-1).nan_to_num(0) @ value


class SmoothedKeys(NanToNum):
    """Subtracts the mean key, which changes no weight."""

    def attend(self, query, key, value, mask):
        return super().attend(query, key - key.mean(dim=2, keepdim=True), value, mask)


class CentredValues(NanToNum):
    """Subtracts the mean value, and adds it to the result."""

    def attend(self, query, key, value, mask):
        mean = value.mean(dim=2, keepdim=True)
        out = super().attend(query, key, value - mean, mask) + mean
        return out if mask.empty is None else out.masked_fill(mask.empty, 0.0)


@pytest.mark.one_in(3)
@pairwise(
    dtype=["float64", "float32", "bfloat16", "float16"],
    mask=["causal", "padding_to_nothing", "sliding_window(3)"],
    scope=["attention", "module"],
    module=[Textbook, NanToNum, SmoothedKeys, CentredValues],
)
def test_usual_idioms_are_right(module, dtype, mask, scope):
    for seq_len in (3, 41):
        found = verdict(module, dtype=dtype, mask=mask, scope=scope, seq_len=seq_len)
        assert found.agrees, found.diagnosis
        assert 0 < found.error_ratio < 1


class WrongShape(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask)[:, :, :-1]


class WrongDtype(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask).double()


@pytest.mark.parametrize(("module", "said"), [(WrongShape, "has shape"), (WrongDtype, "has dtype")])
def test_a_broken_promise_is_an_error_in_words(module, said):
    with pytest.raises(ValueError, match=said):
        verdict(module, direction="inference")


def test_a_vacuous_check_is_refused(monkeypatch):
    def constant(workload, seed):
        return draw_normal(workload, seed).map(torch.ones_like)

    for probe in PROBES:
        monkeypatch.setitem(PROBES, probe, constant)
    with pytest.raises(ValueError, match="constant"):
        References(Workload(seq_len=4, direction="inference"), 0)


def test_a_reference_that_is_not_finite_is_refused(monkeypatch):
    def broken(workload, seed):
        return draw_normal(workload, seed).map(lambda tensor: tensor * math.nan)

    monkeypatch.setitem(PROBES, "normal", broken)
    with pytest.raises(ValueError, match="not finite"):
        References(Workload(seq_len=4, direction="inference"), 0)


def test_needles_point_at_keys_of_many_kinds():
    targets = needle_targets(Workload(seq_len=300, kv_len=200), generator(0))
    assert {0, 63, 64, 127, 128, 199} <= set(targets.tolist())


def test_an_answer_that_is_one_call_late_is_said_to_be():
    """It answers the previous call's inputs, as from a pipeline."""
    earlier = {}

    class Late(Textbook):
        def attend(self, query, key, value, mask):
            given = tuple(tensor.detach().clone() for tensor in (query, key, value))
            before = earlier.get(query.shape, given)
            earlier[query.shape] = given
            return super().attend(*before, mask)

    found = verdict(Late, direction="inference", mask="none", scope="attention")
    assert "earlier call" in found.diagnosis
    assert found.mistakes == ("stale_output_buffer",)


def test_many_small_gradients_of_a_learned_bias_are_not_lost_in_bfloat16():
    sizes = {"seq_len": 256, "num_heads": 1, "head_dim": 16, "dtype": "bfloat16"}
    workload = Workload(mask="relative_buckets_past", direction="forward_backward", **sizes)
    agreement = check(References(workload, 3), implementation("sdpa"))
    found = [each for probe in agreement.probes for each in probe.tensors if "bias" in each.tensor]
    assert found
    assert max(each.error / each.allowed for each in found) < 0.2  # 0.48 where the bias is looked up in bfloat16


def test_cancelling_gradients_of_a_value_leave_their_roundings():
    sizes = {"batch_size": 2, "seq_len": 1, "num_heads": 3, "num_kv_heads": 1, "head_dim": 1, "dtype": "float16"}
    workload = Workload(direction="forward_backward", seed=368, mask="ragged", **sizes)
    agreement = check(References(workload, 368), implementation("sdpa"))
    assert agreement.agrees, agreement.diagnosis


class Added(torch.autograd.Function):
    """Repeats heads; the backward pass adds those of a group one by one or in pairs, in a given dtype."""

    @staticmethod
    def forward(ctx, tensor, times, dtype, is_paired):
        ctx.times, ctx.dtype, ctx.is_paired = times, dtype, is_paired
        return tensor.repeat_interleave(times, dim=1)

    @staticmethod
    def backward(ctx, grad):
        parts = list(grad.unflatten(1, (-1, ctx.times)).to(ctx.dtype).unbind(2))
        while len(parts) > 1:
            first, second = (parts[::2], parts[1::2]) if ctx.is_paired else (parts[:1], parts[1:2])
            parts = [one + other for one, other in zip(first, second, strict=True)] + parts[len(first) + len(second) :]
        return parts[0].to(grad.dtype), None, None, None


MOST_SHARE = 0.5
"""The largest share of a limit that honest code may use."""


@pytest.mark.parametrize("seed", [132, 602835975])
def test_stock_attention_is_right_where_large_scores_cancel(seed):
    """SDPA computes scores again in its backward pass: at 257 tokens and width 128 it had 1.4 times its limit."""
    sizes = {"batch_size": 1, "seq_len": 257, "num_heads": 2, "head_dim": 128}
    workload = Workload(scope="module", direction="forward_backward", **sizes)
    reference = reference_for_probe(workload, "shifted", seed)
    limits, answer = reference.tolerances["gradient of x"], call_candidate(implementation("sdpa"), reference).compared
    assert limits.judge(answer["gradient of x"]).ratio < MOST_SHARE
    assert not limits.judge(1.01 * answer["gradient of x"]).agrees


def merged(query, key, value, *, scale=None):
    """Merge 64 partial outputs and their weights in half precision, as split-KV decoding does."""
    parts = []
    for some, of_them in zip(key.chunk(64, 2), value.chunk(64, 2), strict=True):
        scores = query.float() @ some.float().mT * (scale or query.shape[-1] ** -0.5)
        output = (scores.softmax(-1) @ of_them.float()).to(query.dtype)
        parts.append((output, scores.logsumexp(-1, keepdim=True).to(query.dtype)))
    logs = torch.cat([each for _, each in parts], -1)
    weights = (logs - logs.amax(-1, keepdim=True)).exp().unbind(-1)
    total = sum(weight[..., None] * output for weight, (output, _) in zip(weights, parts, strict=True))
    return total / sum(weights)[..., None]


def test_an_honest_merge_in_half_precision_is_imprecise():
    sizes = {"batch_size": 1, "seq_len": 32, "kv_len": 2048, "num_heads": 1, "head_dim": 16}
    workload = Workload(dtype="bfloat16", direction="inference", seed=1, **sizes)
    reference = reference_for_probe(workload, "needles", 1)
    (found,) = errors(call_candidate(from_function(merged, "a test"), reference).compared, reference)
    assert found.grade is CheckVerdict.imprecise


@pytest.mark.parametrize(
    ("dtype", "is_paired", "is_right"),
    [(torch.float32, False, True), (torch.bfloat16, True, True), (torch.bfloat16, False, False)],
)
def test_gradients_of_a_group_add_in_any_order_but_not_serially_in_bfloat16(dtype, is_paired, is_right):
    class Grouped(Textbook):
        def attend(self, query, key, value, mask):
            key, value = (Added.apply(each, query.shape[1], dtype, is_paired) for each in (key, value))
            return super().attend(query, key, value, mask)

    sizes = {"batch_size": 1, "seq_len": 16, "num_heads": 128, "num_kv_heads": 1, "head_dim": 16, "dtype": "bfloat16"}
    workload = Workload(mask="causal", direction="forward_backward", scope="attention", **sizes)
    reference = reference_for_probe(workload, "equal", 2)
    found = errors(call_candidate(Implementation(build=Grouped, source="a test"), reference).compared, reference)
    assert {each.tensor for each in found if not each.agrees} == (set() if is_right else {"gradient of value"})
    assert all(each.grade is not CheckVerdict.wrong for each in found)
