"""Published kinds of wrong code, each rewritten here, and the names that the check gives them."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnbench.checking.agreement import check, compare
from attnbench.checking.diagnosis import describe, explain
from attnbench.contract.adapters import adapt, packed, split
from attnbench.contract.functions import from_function
from attnbench.processes.planning import rejected
from attnbench.storage.records import EMPTY_ROWS, HIDDEN_NAN, REJECTABLE, CheckVerdict, Status
from attnbench.workloads.workload import Workload
from tests.backward import Backward
from tests.checks import cell_of, checked, references

FORWARD = {"direction": "inference"}
SIZES = {"batch_size": 2, "seq_len": 37, "num_heads": 2, "head_dim": 16, "direction": "forward_backward"}
ROWS = torch.arange(4096)[:, None]
KEPT = {}


def workload(**axes):
    return Workload(**(SIZES | axes))


def judged(function, point):
    return check(references(point), from_function(function, "mine.py:mine"))


def softmax(scores, mask):
    return scores.softmax(-1) if mask is None else scores.masked_fill(~mask, -math.inf).softmax(-1).nan_to_num(0.0)


def scores_of(query, key):
    return query @ key.mT / query.shape[-1] ** 0.5


def late(change, first=20):
    """Attention whose rows from `first` on are changed."""

    def function(query, key, value, *, is_causal=False):
        right = sdpa(query, key, value, is_causal=is_causal)
        return torch.where(ROWS[: query.shape[2]] < first, right, change(right, query, key, value))

    return function


def late_query_gradient(query, key, value):
    late = torch.where(ROWS[: query.shape[2]] < 20, 1.0, 0.75)
    return sdpa(late * query + ((1 - late) * query).detach(), key, value)


def without_maximum(query, key, value):
    powers = scores_of(query, key).exp()
    return powers @ value / (powers.sum(-1, keepdim=True) + 1e-6)


def clamped(query, key, value):
    powers = scores_of(query, key).clamp(-40, 40).exp()
    return powers @ value / powers.sum(-1, keepdim=True)


def mask_by_repeat(query, key, value, *, mask=None):
    batch, heads, length = query.shape[:3]
    whole = mask[:, 0].expand(batch, length, key.shape[2]).repeat(heads, 1, 1)
    return softmax(scores_of(query, key), whole.view(batch, heads, length, -1)) @ value


def wider_window(query, key, value, *, mask=None):
    ahead = torch.arange(key.shape[2]) - ROWS[: query.shape[2]]
    return sdpa(query, key, value, attn_mask=(ahead >= -14) & (ahead <= 3))


def causal_instead(query, key, value, *, mask=None):
    return sdpa(query, key, value, is_causal=True)


def warm(query, key, value, *, is_causal=False):
    return sdpa(1.3 * query, key, value, is_causal=is_causal)


def turned(tensor):
    half = tensor.shape[-1] // 2
    angle = ROWS[: tensor.shape[2]] * 20_000.0 ** (-torch.arange(half) / half)
    one, other = tensor[..., ::2], tensor[..., 1::2]
    pairs = (one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos())
    return torch.stack(pairs, -1).flatten(-2).to(tensor.dtype)


def rotary(query, key, value, factor=None):
    return sdpa(turned(query), turned(key), value, scale=factor)


def tokens_first(query, key, value):
    return sdpa(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)).transpose(1, 2)


def merged_parts(query, key, value):
    parts = zip(key.tensor_split(2, 2), value.tensor_split(2, 2), strict=True)
    return sum(sdpa(query, *part) for part in parts) / 2


def in_float32(query, key, value):
    return (scores_of(query, key).softmax(-1, dtype=torch.float32).to(query.dtype)) @ value


def with_backward(**changes):
    def own_backward(query, key, value, *, is_causal=False):
        length = query.shape[2]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1) if is_causal else None
        return Backward.apply(query, key, value, hidden, changes)

    return own_backward


def group_mean(query, key, value, *, num_kv_heads=None):
    times = query.shape[1] // key.shape[1]
    key, value = (each / times + (each * (1 - 1 / times)).detach() for each in (key, value))
    key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    return sdpa(query, key, value)


def last_of_group(query, key, value, *, num_kv_heads=None):
    """The gradient of the key comes from the last query head of each group alone."""
    times = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(times, 1) for each in (key, value))
    is_last = torch.arange(query.shape[1])[:, None, None] % times == times - 1
    return sdpa(query, torch.where(is_last, key, key.detach()), value)


def unmasked(_, logs):
    return logs.exp()


def without_sum(weights, logs):
    return weights / weights.amax(-1, keepdim=True)


def first_queries(of_scores):
    return of_scores * (ROWS[: of_scores.shape[2]] < 32)


def softcapped(query, key, value, *, softcap=None):
    scores = scores_of(query, key)
    return (scores + (softcap * (scores / softcap).tanh() - scores).detach()).softmax(-1) @ value


GROUPED = {"num_heads": 4, "num_kv_heads": 2}
BACKWARD = [
    (with_backward(sums=lambda x: 0 * x), {}, "no_delta", "the backward pass lacks delta"),
    (with_backward(weights=unmasked), {"mask": "causal"}, "backward_without_mask", "ignores the mask"),
    (with_backward(weights=without_sum), {}, "recomputed_without_denominator", "without dividing them by their sum"),
    (with_backward(of_keys=first_queries), {}, "backward_tiles_dropped", "queries from 32 on, in the gradient of key"),
    (with_backward(weights=lambda x, _: x.square()), {}, "", "The output is right, the backward pass is not"),
    (group_mean, GROUPED, "key_gradient_factor", "0.5 times"),
    (last_of_group, GROUPED, "group_not_summed", "only the last query head of a group counts"),
    (softcapped, {"mask": "softcap(2)"}, "softcap_without_derivative", "derivative of the softcap"),
]


@pytest.mark.parametrize(("function", "axes", "name", "words"), BACKWARD)
def test_a_mistake_of_the_backward_pass_alone_has_its_name(function, axes, name, words):
    found = judged(function, workload(**axes))
    assert name in (found.mistakes or ("",)), found.diagnosis
    assert words in found.diagnosis


class Gated(nn.Module):
    """Multiplies each number of the heads' outputs by one of a buffer that is drawn in the constructor."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer("gate", torch.rand(dim))

    def forward(self, x):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(self.gate * sdpa(query, key, value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_factors_of_features_are_named(dtype):
    made = adapt(lambda sizes: Gated(sizes.embed_dim, sizes.num_heads), packed("qkv", out="proj"))
    found = check(references(workload(scope="module", dtype=dtype)), made)
    assert found.mistakes == ("features_scaled",)
    assert "buffer" in found.diagnosis


def other_block(query, key, value):
    number = query.shape[0] * query.shape[1]
    key, value = (each.flatten(end_dim=1)[torch.arange(number) % 16].view_as(each) for each in (key, value))
    return sdpa(query, key, value)


def by_padding(change):
    def function(query, key, value, *, mask=None):
        return softmax(scores_of(query, key), mask if mask is None else change(mask)) @ value

    return function


def with_sinks(times, order=None):
    """Attention whose sinks count `times` times, and are those of heads in another order."""

    def function(query, key, value, *, mask=None, sinks=None):
        scores = scores_of(query, key) if mask is None else scores_of(query, key).masked_fill(~mask, -math.inf)
        if sinks is None:
            return scores.softmax(-1) @ value
        sinks = sinks if order is None else sinks.roll(order)
        column = (sinks + math.log(times))[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value

    return function


def power_of_two(query, key, value, *, bias=None, scale=None):
    """ALiBi with slopes that are right for a power of 2 alone, whatever the bias."""
    number, ahead = query.shape[1], torch.arange(key.shape[2]) - ROWS[: query.shape[2]]
    slopes = 2.0 ** (-8 * torch.arange(1, number + 1) / number)
    return (scores_of(query, key) - slopes[:, None, None] * ahead.abs()).softmax(-1) @ value


def turned_in_halves(query, key, value):
    half = query.shape[-1] // 2
    angle = ROWS[: query.shape[2]] * 1e4 ** (-torch.arange(half) / half)

    def turn(tensor):
        one, other = tensor[..., :half], tensor[..., half:]
        pairs = (one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos())
        return torch.cat(pairs, -1).to(tensor.dtype)

    return sdpa(turn(query), turn(key), value)


def half_twice(query, key, value):
    later = torch.arange(key.shape[2]) >= (key.shape[2] + 1) // 2
    return (scores_of(query, key) + math.log(2) * later).softmax(-1) @ value


def beyond_the_diagonal(mask):
    """Every tile of 16 keys before that of the query is shown in full."""
    return mask | (torch.arange(mask.shape[-1]) // 16 < ROWS[: mask.shape[-2]] // 16)


def by_first_row(mask):
    """Tiles of 16 keys are left out if batch row 0 sees none of theirs."""
    tiles = [tile & tile[:1].any() for tile in mask.split(16, dim=-1)]
    return torch.cat(tiles, dim=-1)


def in_pairs(query, key, value):
    first = torch.arange(query.shape[1]) // 2 * 2 * key.shape[1] // query.shape[1]
    return sdpa(query, key[:, first], value[:, first])


def sum_in_few_digits(query, key, value):
    powers = (scores_of(query, key) - scores_of(query, key).amax(-1, keepdim=True)).exp()
    return powers / ((2 * powers.sum(-1, keepdim=True)).round() / 2) @ value


def eight_columns(query, key, value):
    output = softmax(scores_of(query[..., :8], key[..., :8]), None) @ value
    return output * (torch.arange(value.shape[-1]) < 8)


BLOCKS = {"batch_size": 3, "num_heads": 11}
WINDOWED = {"mask": "sliding_window(3)"}
OTHERS = [
    (other_block, BLOCKS, "block_index_cut", "wrong only from head 5 of batch row 1 on (block 16 of 33)"),
    (by_padding(lambda mask: mask[:1]), {"mask": "padding"}, "first_rows_mask_for_all", "wrong only in batch row 1"),
    (by_padding(beyond_the_diagonal), WINDOWED, "mask_skipped_in_tiles", "only to tiles on the diagonal, of 16 keys"),
    (with_sinks(2), {"sinks": "learned"}, "sinks_counted_again", "2 times"),
    (with_sinks(1, 1), {"sinks": "learned", "num_heads": 3}, "sink_head_order", "one place late"),
    (power_of_two, {"mask": "alibi", "num_heads": 3}, "alibi_slopes", "as if 3 were a power of 2"),
    (turned_in_halves, {"rotary": "interleaved(10000)"}, "rotary_other", "halves"),
    (half_twice, {}, "part_weighed_twice", "part 2 of 2"),
    (by_padding(by_first_row), {"mask": "ragged", "kv_len": 70, "batch_size": 3}, "tiles_skipped_by_first_row", "row"),
    (in_pairs, {"num_heads": 6, "num_kv_heads": 2}, "key_head_of_the_first", "wrong only in head 3"),
    (sum_in_few_digits, {}, None, "divides by a wrong sum"),
    (eight_columns, {}, "columns_cut", "later columns of the output are 0: the first 8 of 16"),
]


@pytest.mark.parametrize(("function", "axes", "name", "words"), OTHERS)
def test_a_kind_from_public_reports_has_its_name_and_its_place(function, axes, name, words):
    found = judged(function, workload(**FORWARD | axes))
    assert name is None or name in found.mistakes, found.diagnosis
    assert words in found.diagnosis


class Port(nn.Module):
    """Self- or cross-attention of a model, with one mistake in its text."""

    def __init__(self, sizes, mistake=""):
        super().__init__()
        self.heads, self.mistake, width = sizes.num_heads, mistake, sizes.embed_dim
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, context):
        context = context.detach() if self.mistake == "detached" else context
        heads = [
            layer(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, tokens in ((self.q, x), (self.k, context), (self.v, context))
        ]
        weights = scores_of(*heads[:2])
        weights = OverQueries.apply(weights) if self.mistake == "queries" else weights.softmax(-1)
        weights = nn.Dropout(0.1)(weights) if self.mistake == "dropout" else weights
        output = weights @ heads[2]  # (B,H,T,K)
        if self.mistake == "merged":
            output = output.flatten(0, 1).unflatten(0, (self.heads, -1)).transpose(0, 1)
        output = self.out(output.transpose(1, 2).flatten(2))
        return output + self.out.bias if self.mistake == "bias" else output


class OverQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores):
        ctx.save_for_backward(weights := scores.softmax(-1))
        return weights

    @staticmethod
    def backward(ctx, grad):
        (weights,) = ctx.saved_tensors
        return weights * (grad - (grad * weights).sum(-2, keepdim=True))


OF_PORTS = {
    "detached": ("context_detached", "No gradient reaches the tokens through keys and values"),
    "queries": ("softmax_gradient_over_queries", "sums over the queries instead of the keys"),
    "merged": ("heads_merged_before_batch", "are read as (head, batch row)"),
    "bias": ("output_bias_count", "it is added twice"),
    "dropout": ("dropout_in_evaluation", "Is dropout, or something else random, active in evaluation?"),
}


@pytest.mark.parametrize("mistake", OF_PORTS)
def test_a_mistake_of_a_port_has_its_name(mistake):
    made = adapt(
        lambda sizes: Port(sizes, mistake),
        split("q", "k", "v", out="out"),
        call=lambda m, x, context, mask: m(x, context),
    )
    found = check(references(workload(scope="module", bias="all", seq_len=20)), made)
    name, words = OF_PORTS[mistake]
    assert name in found.mistakes, found.diagnosis
    assert words.casefold() in found.diagnosis.casefold()


def by_whole_root(query, key, value):
    return (query @ key.mT / math.isqrt(query.shape[-1])).softmax(-1) @ value


def first_row_alone(query, key, value, *, mask=None):
    """All batch rows but the first get 0."""
    right = sdpa(query, key, value, attn_mask=mask)
    return torch.cat([right[-1:], torch.zeros_like(right[1:])])


def test_a_scale_by_the_whole_root_is_named_and_the_right_mask_is_never_called_a_wrong_one():
    assert "scaled_by_whole_root" in judged(by_whole_root, workload(head_dim=8, **FORWARD)).mistakes
    found = judged(first_row_alone, workload(mask="causal", **FORWARD))
    assert not found.agrees
    assert "where the mask is" not in found.diagnosis


class WithoutSinks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks):
        scores = scores_of(query, key)
        ctx.save_for_backward(query, key, value, scores)
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value

    @staticmethod
    def backward(ctx, grad):
        query, key, value, scores = ctx.saved_tensors
        weights = scores.softmax(-1)
        of_weights = grad @ value.mT
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
        return of_scores @ key, of_scores.mT @ query, weights.mT @ grad, None


def test_a_backward_pass_without_the_sinks_is_named():
    def function(query, key, value, *, sinks=None):
        return WithoutSinks.apply(query, key, value, sinks)

    found = judged(function, workload(sinks="learned"))
    assert "backward_without_sinks" in found.mistakes, found.diagnosis


def head_off(query, key, value):
    """Head 1 of three is a little off, in a way that nothing explains."""
    output = sdpa(query, key, value)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    return output + 0.1 * noise * (torch.arange(3)[:, None, None] == 1)


def test_the_place_is_said_before_anything_else():
    found = judged(head_off, workload(num_heads=3, **FORWARD))
    assert found.diagnosis.startswith("The output is wrong only in head 1. No known mistake explains it.")


SPACE = {}


def adds_up(query, key, value):
    """Adds to a workspace that is cleared only when it is made, or holds values next to which others vanish."""
    space = SPACE.setdefault(query.shape, torch.zeros_like(query))
    if not space.abs().max() < 1e3:
        space.zero_()
    space.add_(sdpa(query, key, value).detach())
    return space.clone()


def scatters(query, key, value):
    right = sdpa(query, key, value)
    lost = torch.rand(right.shape, generator=SCATTER) < 0.002
    return right + lost


SCATTER = torch.Generator().manual_seed(5)


@pytest.mark.parametrize(("function", "words"), [(adds_up, "something is kept between calls"), (scatters, "a race")])
def test_what_is_kept_and_a_race_are_told_apart(function, words):
    SPACE.clear()
    assert words in judged(function, workload(**FORWARD)).diagnosis


def causal_at_the_end(query, key, value, *, is_causal=False):
    length, number = query.shape[2], key.shape[2]
    seen = torch.ones(length, number, dtype=torch.bool).tril(number - length)
    return sdpa(query, key, value, attn_mask=seen if is_causal else None)


@pytest.mark.parametrize("length", [1, 20])
def test_a_mask_that_is_aligned_at_the_other_end_is_named(length):
    axes = {"mask": "causal", "seq_len": length, "kv_len": 37, "direction": "inference"}
    assert "aligned at the end" in judged(causal_at_the_end, workload(**axes)).diagnosis


CAUSAL = {"mask": "causal"}
WINDOW = {"mask": "window(7,7)"}
KINDS = [
    (late(lambda right, *_: 0 * right, 32), {}, "output_zero", "from row 32 on"),
    (late(lambda right, *_: math.nan * right, 32), FORWARD, "output_unwritten", "never written from row 32 on"),
    (late(lambda right, *_: 1.25 * right), CAUSAL, "output_factor", "1.25 times what it should be from row 20 on"),
    # The last row sees every key.
    (late(lambda _, *inputs: sdpa(*inputs)), CAUSAL | FORWARD, "mask_ignored", "in rows 20 to 35"),
    (late_query_gradient, {}, "query_gradient_factor", "0.75 times what it should be from row 20 on"),
    (without_maximum, {}, "no_maximum", "added to the sum"),
    (clamped, {}, "no_maximum", "clamped"),
    (mask_by_repeat, {"mask": "padding"}, "mask_per_head", ""),
    (wider_window, WINDOW, "mask_of_its_own", "key i-14 to key i+3"),
    (causal_instead, WINDOW, "mask_of_other_kind", "the mask is causal,"),
    (
        lambda query, key, value: softmax(scores_of(query[..., :8], key[..., :8]), None) @ value,
        {},
        "width_cut",
        "8 of 16",
    ),
    (lambda query, key, value: scores_of(query, key) @ value, {}, "no_softmax", ""),
    (rotary, {}, "rotary_inside", "base 20000"),
    (
        lambda query, key, value: rotary(query, key, value, 1.0),
        {"rotary": "interleaved(20000)"} | FORWARD,
        "no_scale",
        "not scaled",
    ),
    (tokens_first, {}, "heads_for_positions", "(B, T, H, K)"),
    (merged_parts, {}, "partial_softmaxes_merged", "averaged"),
    (warm, CAUSAL | FORWARD, "scores_scaled", "1.3 times"),
]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("function", "axes", "name", "words"), KINDS)
def test_a_published_kind_of_mistake_has_its_name(function, axes, name, words):
    KEPT.clear()
    found = judged(function, workload(**axes))
    assert name in found.mistakes, found.diagnosis
    assert words in found.diagnosis
    assert "pruned" not in found.diagnosis


WIDER = """
import torch

def wider(query, key, value, *, mask=None):
    ahead = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None]
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, (ahead >= -14) & (ahead <= 3))
"""


def test_workers_diagnose_a_function_without_the_projections_of_a_module(tmp_path):
    (tmp_path / "wider.py").write_text(WIDER)
    point = workload(scope="module", dtype="bfloat16", **WINDOW | FORWARD)
    found = checked(cell_of(f"{tmp_path / 'wider.py'}:wider", point)).agreement
    assert found.mistakes == ("mask_of_its_own",)
    assert "key i-14 to key i+3" in found.diagnosis


QUANTISED = """
from torch.nn import functional as F
from attnbench.contract.adapters import adapt


def rounded(each, scale):
    return (each / scale).round() * scale


def scale_of(each):
    return each.abs().amax(dim=(-2, -1), keepdim=True) / 127


def own_scales(query, key, value):
    return F.scaled_dot_product_attention(query, rounded(key, scale_of(key)), rounded(value, scale_of(value)))


def first_scale(query, key, value):
    scale = scale_of(value)
    value = (value / scale).round() * scale[:1, :1]
    return F.scaled_dot_product_attention(query, rounded(key, scale_of(key)), value)


near, far = adapt(own_scales, approximate=0.05), adapt(first_scale, approximate=0.05)
unbound = adapt(first_scale, approximate=True)
"""


def test_an_approximation_is_judged_by_the_bound_that_it_declares(tmp_path):
    (tmp_path / "quantised.py").write_text(QUANTISED)
    near, far, unbound = (
        checked(cell_of(f"{tmp_path / 'quantised.py'}:{name}", workload())) for name in ("near", "far", "unbound")
    )
    assert (near.status, unbound.status) == (Status.approximate, Status.approximate)
    assert far.status is Status.disagrees
    assert "of the largest value in the output of head" in far.message
    assert "it declares up to 5.0 %" in far.message


def softmax_in_float32(query, key, value, *, mask=None):
    scores = scores_of(query, key).float()
    weights = (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1)
    return weights.to(value.dtype) @ value


def test_an_error_of_little_more_than_the_tolerance_is_not_called_a_wrong_backward_pass():
    point = workload(dtype="bfloat16")
    answers = references(point)
    of_key = (each.tolerances.get("gradient of key") for each in answers.by_probe.values())
    least = min(float(each.of_elements[0, 0, 0, 0]) for each in of_key if each is not None)

    def more_in_one_place(made, _):  # of gradients in float64, so that the error is 1.5 tolerances on any processor
        made[1][0, 0, 0, 0] += 1.5 * least
        return made

    def function(query, key, value):
        wide = (each.double() for each in (query, key, value))
        return Backward.apply(*wide, None, {"made": more_in_one_place}).to(query.dtype)

    found = check(answers, from_function(function, "mine.py:mine"))
    assert found.grade is CheckVerdict.wrong
    assert "by at most 1.5 times the tolerance" in found.diagnosis
    assert "such as a sum in half precision" in found.diagnosis


def test_float32_inside_is_a_convention_and_breaks_no_rule_of_another_dtype():
    found = judged(in_float32, workload(dtype="float64"))
    assert (found.grade, found.conventions, found.mistakes) == (CheckVerdict.right, ("float32",), ())
    softmax_alone = judged(softmax_in_float32, workload(dtype="float64"))  # its errors are some percent of all steps'
    assert (softmax_alone.grade, softmax_alone.conventions) == (CheckVerdict.right, ("float32",))
    implementation, known = from_function(in_float32, "mine.py:in_float32"), {}
    for dtype in ("float64", "float32"):
        assert not compare(references(workload(dtype=dtype)), implementation, known).broken_rules


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_errors_as_large_as_those_of_half_precision_are_asked_about(dtype):
    def narrow(query, key, value):
        inputs = (each.to(getattr(torch, dtype)) for each in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(*inputs).to(query.dtype)

    found = judged(narrow, workload(dtype="float32"))
    assert found.diagnosis.startswith("No known mistake explains it.")
    assert f"Its errors are within those of {dtype}: is something computed in it?" in found.diagnosis


def filled_with_nan(query, key, value, *, mask=None):
    scores = scores_of(query, key)
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1) @ value


def filled_with_a_number(query, key, value, *, mask=None):
    scores = scores_of(query, key)
    return (scores if mask is None else scores.masked_fill(~mask, -1e30)).softmax(-1) @ value


def number_added(query, key, value, *, mask=None):
    scores = scores_of(query, key)
    return (scores if mask is None else scores + ~mask * torch.finfo(scores.dtype).min).softmax(-1) @ value


def nothing_hidden(query, key, value, *, mask=None):
    """Rows that see no key keep their scores, as in cuDNN's kernel."""
    scores = scores_of(query, key)
    if mask is not None:
        scores = scores.masked_fill(~mask & mask.any(-1, keepdim=True), -math.inf)
    return scores.softmax(-1) @ value


def zeroed_afterwards(query, key, value, *, mask=None):
    scores = scores_of(query, key) + torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    return torch.where(mask.any(-1, keepdim=True), scores.softmax(-1) @ value, 0.0)


CONVENTIONS = [(filled_with_nan, "nan"), (filled_with_a_number, "mean"), (number_added, "mean")]
EMPTY = [{"mask": "padding_to_nothing"}, {"mask": "causal_bottom_right", "kv_len": 24}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axes", EMPTY, ids=lambda axes: axes["mask"])
@pytest.mark.parametrize(
    ("function", "kind"), [*CONVENTIONS, (nothing_hidden, "all"), (zeroed_afterwards, "nan_gradient")]
)
def test_what_empty_rows_get_is_a_convention(function, kind, axes):
    found = judged(function, workload(**axes))
    assert found.agrees, found.diagnosis
    assert found.conventions == (kind,)


def zeros_for_empty_rows(query, key, value, *, mask=None):
    return softmax(scores_of(query, key), mask) @ value


def by_strides(contiguous, other):
    def function(query, key, value, *, mask=None):
        return (contiguous if query.is_contiguous() else other)(query, key, value, mask=mask)

    return function


def nan_everywhere(query, key, value, *, mask=None):
    """Rows that see no key make the whole batch row NaN."""
    return zeros_for_empty_rows(query, key, value, mask=mask).where(mask.any(-1).all(-1)[..., None, None], math.nan)


def a_little_more(query, key, value, *, mask=None):
    return 1.01 * zeros_for_empty_rows(query, key, value, mask=mask)


@pytest.mark.parametrize("axes", EMPTY, ids=lambda axes: axes["mask"])
@pytest.mark.parametrize(
    ("contiguous", "other", "kind"),
    [
        (nothing_hidden, zeros_for_empty_rows, "all"),
        (filled_with_nan, zeros_for_empty_rows, "nan"),
        (zeros_for_empty_rows, filled_with_nan, ""),
        (zeros_for_empty_rows, zeroed_afterwards, ""),
    ],
)
def test_a_convention_may_depend_on_strides(contiguous, other, kind, axes):
    """As in SDPA on CUDA, which takes cuDNN or another kernel by the strides."""
    found = judged(by_strides(contiguous, other), workload(**axes))
    assert found.agrees, found.diagnosis
    assert found.conventions == (kind,) * bool(kind)


@pytest.mark.parametrize("other", [nan_everywhere, a_little_more])
@pytest.mark.parametrize("contiguous", [nothing_hidden, zeros_for_empty_rows])
def test_rows_that_see_a_key_do_not_depend_on_strides(contiguous, other):
    found = judged(by_strides(contiguous, other), workload(**EMPTY[1]))
    assert found.grade is CheckVerdict.wrong
    assert found.broken_rules[0].rule == "layouts"


@pytest.mark.parametrize("function", [filled_with_nan, number_added, by_strides(zeros_for_empty_rows, nothing_hidden)])
def test_a_convention_is_a_finding_where_zeros_are_asked_for(function):
    implementation = from_function(function, "mine.py:mine")
    strict = compare(references(workload(**EMPTY[0])), implementation, rejects=(EMPTY_ROWS,))
    assert not strict.agrees
    assert strict.conventions == ()
    found = explain(references(workload(**EMPTY[0])), implementation, strict)
    assert "sees no key" in found.diagnosis or "layouts" in found.diagnosis


def overflowing(query, key, value, *, mask=None):
    """Multiplies in half precision, and scales afterwards."""
    scores = (query @ key.mT).float() / math.sqrt(query.shape[-1])
    return (softmax(scores, mask) @ value.float()).to(query.dtype)


def test_any_convention_may_be_rejected() -> None:
    judge, implementation = references(workload(dtype="float16")), from_function(overflowing, "mine.py:mine")
    lenient = compare(judge, implementation)
    assert lenient.agrees
    assert lenient.conventions == ("products",)
    strict = compare(judge, implementation, rejects=rejected("products"))
    assert [rule.rule for rule in strict.broken_rules] == ["large products"]
    assert strict.conventions == ()


def test_rejected_behaviours_are_named_by_the_user() -> None:
    assert rejected(["bias,sign", "empty_rows"]) == ("bias", "sign", EMPTY_ROWS)
    assert set(rejected("all")) == {*REJECTABLE.values()}
    with pytest.raises(ValueError, match=r"no behaviour lost_nans \(did you mean lost_nan\?\)"):
        rejected(["lost_nans"])


def test_a_hidden_nan_is_a_note_or_a_finding() -> None:
    """0 times NaN is NaN, so that a weight of 0 does not hide it."""
    judge, implementation = references(workload(mask="causal")), from_function(zeros_for_empty_rows, "mine.py:mine")
    assert compare(judge, implementation).agrees
    strict = compare(judge, implementation, rejects=(HIDDEN_NAN,))
    assert [rule.rule for rule in strict.broken_rules] == [HIDDEN_NAN]
    assert "NaN" in explain(judge, implementation, strict).diagnosis


@pytest.mark.one_in(2)
@pytest.mark.parametrize("axes", EMPTY, ids=lambda axes: axes["mask"])
@pytest.mark.parametrize(("function", "kind"), CONVENTIONS)
def test_a_convention_hides_no_other_mistake(function, kind, axes):
    def unscaled(query, key, value, *, mask=None):
        return function(query * query.shape[-1] ** 0.5, key, value, mask=mask)

    found = judged(unscaled, workload(**axes))
    assert not found.agrees
    assert "no_scale" in found.mistakes, found.diagnosis


def test_a_mistake_in_scores_is_no_convention_where_nothing_is_hidden():
    def unscaled(query, key, value, *, mask=None):
        return nothing_hidden(query * query.shape[-1] ** 0.5, key, value, mask=mask)

    assert judged(unscaled, workload(**EMPTY[0])).grade is CheckVerdict.wrong


def not_finite_where_it_is_zero(query, key, value):
    def made(gradients, saved):
        of_query, *others = gradients
        return of_query if of_query.any() else of_query * math.nan, *others

    return Backward.apply(query, key, value, None, {"made": made})


def test_a_gradient_that_is_not_finite_where_it_is_zero_is_named():
    found = judged(not_finite_where_it_is_zero, workload(dtype="bfloat16"))
    assert found.grade is CheckVerdict.wrong
    assert "gradient of query is not finite where it is 0" in found.diagnosis
    assert "[]" not in found.diagnosis


def test_other_numbers_in_empty_rows_are_wrong():
    def ones(query, key, value, *, mask=None):
        return filled_with_a_number(query, key, value, mask=mask).where(mask.any(-1, keepdim=True), 1.0)

    assert not judged(ones, workload(**EMPTY[0])).agrees


def test_two_numbers_that_differ_are_printed_so_that_they_differ():
    wrong = judged(in_float32, workload(dtype="float64"))
    actual, expected = describe(wrong).partition(" it is ")[2].split(" (error")[0].split(", the oracle says ")
    assert actual != expected


def test_an_output_that_is_kept_with_its_graph_is_a_wrong_answer_and_no_error():
    def remembered(query, key, value):
        if query.shape not in KEPT:
            KEPT[query.shape] = sdpa(query, key, value)
        return KEPT[query.shape].view_as(query)

    KEPT.clear()
    assert judged(remembered, workload()).mistakes == ("stale_output_buffer",)
