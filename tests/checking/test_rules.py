"""Each rule holds for an honest form, and catches one that breaks it."""

import math
from functools import partial

import pytest
import torch

from attnbench.checking import rules
from attnbench.checking.reference import References
from attnbench.contract import Attention, Implementation
from attnbench.contract.functions import from_function
from attnbench.contract.loading import implementation
from attnbench.processes.remote import Remote
from attnbench.storage.records import CONVENTIONS
from attnbench.workloads.workload import Workload
from tests.backward import Backward
from tests.checking.textbook import Textbook
from tests.pairwise import pairwise
from tests.processes.test_remote import apart

BUFFER = {}


class OneBuffer(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return BUFFER.setdefault(out.shape, torch.empty_like(out)).copy_(out)


class Remembers(Textbook):
    def attend(self, query, key, value, mask):
        if not hasattr(self, "kept"):
            self.kept = super().attend(query, key, value, mask)
        return self.kept.clone()


class NeedsContiguous(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value.view(-1).view(value.shape), mask)


class ReadsFromTheStart(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value.as_strided(value.shape, value.stride(), 0), mask)


class NeedsGradients(Textbook):
    def attend(self, query, key, value, mask):
        assert torch.is_grad_enabled()
        return super().attend(query, key, value, mask)


class HidesNaN(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask).nan_to_num()


class HidesByALittle(Textbook):
    fill = -30.0


class HidesByAnAddend(Textbook):
    def scores(self, query, key, mask):
        return query @ key.mT / math.sqrt(query.shape[-1]) - 20.0 * mask.hidden.to(query)


class Random(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return out + 1e-9 * torch.rand_like(out)


class RoundsByAddress(Textbook):
    """As vectorised sums do: at the first address unlike at all others. Queries are kept, so that none is reused."""

    def attend(self, query, key, value, mask):
        ADDRESSES.setdefault(query.data_ptr(), query)
        return query * (1.0 if query.data_ptr() == next(iter(ADDRESSES)) else 1.0 + 2.0**-22)


class InTheQuerysOrder(Textbook):
    """Treats views of one buffer as (B, T, 3, H, K), whatever they are."""

    def attend(self, query, key, value, mask):
        memories = {each.untyped_storage().data_ptr() for each in (query, key, value)}
        if len(memories) == 1 and query.stride(-1) == 1:
            _, heads, length, width = query.shape
            strides = (3 * length * heads * width, width, 3 * heads * width, 1)
            query, key, value = (
                each.as_strided(each.shape, strides, place * heads * width)
                for place, each in enumerate((query, key, value))
            )
        return super().attend(query, key, value, mask)


class ReadsTheWholeCache(Textbook):
    def attend(self, query, key, value, mask):
        rows = key.stride(1) // key.shape[3]
        if rows > key.shape[2] and key.stride(2) == key.shape[3]:
            key, value = (
                each.as_strided((*each.shape[:2], rows, each.shape[3]), each.stride()) for each in (key, value)
            )
        return super().attend(query, key, value, mask)


class OneQueryForAll(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return out[:, :, :1].expand_as(out) if query.stride(2) == 0 else out


def adds_to_the_twin(made, saved):
    query, key, value = made
    return query, key + value if saved[1].data_ptr() == saved[2].data_ptr() else key, value


def with_the_querys_strides(made, saved):
    own = torch.empty_strided(saved[0].shape, saved[0].stride(), dtype=saved[0].dtype)
    for row, gradient in enumerate(made[0]):
        own[row] = gradient
    return own, *made[1:]


OVERWRITES = {"made": lambda made, saved: (saved[4].data.mul_(0.5), made)[1]}
CUTS_OFF = {"made": lambda made, _: [each.where(each.abs() > 1e-5, 0.0) for each in made]}
ONE_FOR_ALL = {"grad": lambda grad: torch.full_like(grad, float(grad.flatten()[0])) if grad.stride(-2) == 0 else grad}

NONE_FOR_ALL = {"grad": lambda grad: grad * (grad != grad.flatten()[0]).any()}


def by(**changes):
    class OwnBackward(Attention):
        def attend(self, query, key, value, mask):
            return Backward.apply(query, key, value, mask.hidden, changes)

    return OwnBackward


class NeedsTheQuerysGradient(Textbook):
    def attend(self, query, key, value, mask):
        with torch.set_grad_enabled(torch.is_grad_enabled() and query.requires_grad):
            weights = super().attend(query, key, torch.eye(key.shape[2]).expand(*key.shape[:2], -1, -1), mask)
        return weights @ value


class ThroughFloat16(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query.half().to(query), key.half().to(key), value, mask)


SPACE, WORKSPACE, ADDRESSES = {}, {}, {}
ALLOWED = {"hidden NaN", "repeatable"}
"""Honest code breaks these: its intermediate results may lie elsewhere in memory at each call, and round otherwise."""


class SplitsOfTheLongest(Textbook):
    """Without gradients, parts of 16 keys are merged from a workspace, with those that a longer call has left there."""

    def attend(self, query, key, value, mask):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        if torch.is_grad_enabled():
            return scores.softmax(-1) @ value
        parts = list(zip(scores.split(16, dim=-1), value.split(16, dim=-2), strict=True))
        kept = WORKSPACE.setdefault(scores.shape[:-1], [])
        kept[: len(parts)] = [(part.logsumexp(-1, keepdim=True), part.softmax(-1) @ own) for part, own in parts]
        sums, answers = (torch.stack(each) for each in zip(*kept, strict=True))
        return (sums.softmax(0) * answers).sum(0)


class SpaceOfTheLongest(Textbook):
    def attend(self, query, key, value, mask):
        scores = query @ key.mT / math.sqrt(query.shape[-1])
        length = scores.shape[-1]
        space = SPACE.get(scores.shape[:-1])
        if space is None or space.shape[-1] < length:
            space = SPACE[scores.shape[:-1]] = torch.empty_like(scores)
        space[..., :length] = scores
        return space.softmax(-1)[..., :length] @ value


def masked(query, key, value, mask, scale=None):
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return (scores if mask is None else scores.masked_fill(~mask, -math.inf)).softmax(-1) @ value


def first_heads_mask(query, key, value, *, mask):
    return masked(query, key, value, mask[:, :1])


def mask_in_memory_order(query, key, value, *, mask):
    if not mask.is_contiguous() and 0 not in mask.stride():
        mask = mask.as_strided((mask.numel(),), (1,), mask.storage_offset()).view(mask.shape)
    return masked(query, key, value, mask)


def mask_as_wide_as_it_is(query, key, value, *, mask):
    if mask.stride(-2) > mask.shape[-1] and mask.stride(-1) == 1:
        mask = mask.as_strided(mask.shape, (*mask.stride()[:2], mask.shape[-1], 1))
    return masked(query, key, value, mask)


def first_row_of_an_expanded_mask(query, key, value, *, mask):
    return masked(query, key, value, mask[:, :, :1] if mask.shape[1] > 1 and 0 in mask.stride() else mask)


def no_scale_of_0(query, key, value, *, mask, scale=None):
    return masked(query, key, value, mask, scale or None)


class RowOfBias(torch.autograd.Function):
    """Adds a bias, and returns the mean over all queries as its gradient."""

    @staticmethod
    def forward(ctx, scores, bias):
        ctx.sizes = bias.shape
        return scores + bias

    @staticmethod
    def backward(ctx, grad):
        is_row = ctx.sizes[2] == 1 < grad.shape[2]
        return grad, (grad.mean(2, keepdim=True) if is_row else grad).sum_to_size(ctx.sizes)


def mean_for_a_row(query, key, value, *, bias):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores if bias is None else RowOfBias.apply(scores, bias)).softmax(-1) @ value


def any_mask(query, key, value, *, mask, scale=None):
    return masked(query, key, value, mask, scale)


def sums_in_float16(query, key, value):
    scores = (query @ key.mT).float() / math.sqrt(query.shape[-1])
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers.half() @ value / powers.sum(-1, keepdim=True)).to(query.dtype)


SIZES_OF_RULES = {
    "batch_size": 2,
    "seq_len": 20,
    "num_heads": 2,
    "head_dim": 8,
    "mask": "causal",
    "direction": "inference",
}


def tried(made, known=None, **axes):
    if not isinstance(made, Implementation | Remote):
        made = Implementation(build=made, source="a test") if isinstance(made, type) else from_function(made, "a test")
    known = {} if known is None else known
    results = rules.examine(made, References(Workload(**(SIZES_OF_RULES | axes)), 0, is_brief=True), known)
    return {result.rule: result for result in results}


def broken(made, **axes):
    return {name for name, result in tried(made, **axes).items() if not result.holds}


@pytest.mark.one_in(2)
@pairwise(
    dtype=["float64", "float32", "bfloat16", "float16"],
    mask=["none", "causal", "padding", "padding(20,0)", "sliding_window(3)"],
    scope=["attention", "module"],
    direction=["inference", "forward"],
)
def test_an_honest_form_breaks_only_what_pytorch_breaks_too(dtype, mask, scope, direction):
    module = Textbook if mask != "padding(20,0)" else implementation("fused")
    allowed = ALLOWED | ({"large products"} if dtype == "float16" else set())  # where float16 has products of its own
    assert broken(module, dtype=dtype, mask=mask, scope=scope, direction=direction) <= allowed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["sdpa", "sdpa_mask", "torch_mha", "chunked"])
@pytest.mark.parametrize("mask", ["causal", "boolean(40)"])
def test_pytorchs_own_kernels_break_only_what_is_noted(name, mask):
    made = implementation(name)
    for direction in ("inference", "forward"):
        axes = {"mask": mask, "scope": "module" if name == "torch_mha" else "attention", "direction": direction}
        results = tried(made, **axes | {"bias": "all"} if name == "torch_mha" else axes)
        assert not [each for each in results.values() if not each.holds and not each.is_noted]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("made", "axes", "rule"),
    [
        (OneBuffer, {}, "outputs apart"),
        (Remembers, {}, "outputs apart"),
        (ReadsFromTheStart, {}, "layouts"),
        (HidesByAnAddend, {}, "hidden keys"),
        (InTheQuerysOrder, {}, "layouts"),
        (ReadsTheWholeCache, {"mask": "none"}, "layouts"),
        (OneQueryForAll, {}, "layouts"),
        (by(made=with_the_querys_strides), {}, "layouts"),
        (by(**OVERWRITES), {}, "gradients apart"),
        (by(**CUTS_OFF), {}, "sizes"),
        (by(**ONE_FOR_ALL), {}, "gradients apart"),
        (by(**NONE_FOR_ALL), {}, "gradients apart"),
        (by(made=adds_to_the_twin), {}, "layouts"),
        (NeedsTheQuerysGradient, {}, "gradients apart"),
        (NeedsGradients, {}, "without gradients"),
        (ThroughFloat16, {"mask": "none", "dtype": "bfloat16"}, "sizes"),
        (SpaceOfTheLongest, {"mask": "none", "direction": "inference", "kv_len": 30}, "fewer keys"),
        (SplitsOfTheLongest, {"mask": "none"}, "fewer keys"),
        (mask_in_memory_order, {"mask": "boolean(40)"}, "masks in memory"),
        (mask_as_wide_as_it_is, {"mask": "sliding_window(4)"}, "masks in memory"),
        (first_row_of_an_expanded_mask, {"mask": "sliding_window(4)"}, "masks in memory"),
        (no_scale_of_0, {"scale": 0.4}, "other scales"),
    ],
)
def test_a_rule_finds_what_shows_in_one_way_of_calling_alone(made, axes, rule):
    SPACE.clear()
    BUFFER.clear()
    WORKSPACE.clear()
    found = tried(made, **{"direction": "forward"} | axes)
    assert found["right when short"].holds
    assert not found[rule].holds
    assert not found[rule].is_noted


@pytest.mark.parametrize("mask", ["none", "sliding_window(4)", "boolean(40)"])
def test_an_honest_function_of_a_mask_and_a_scale_breaks_no_rule(mask):
    assert broken(any_mask, mask=mask, scale=0.4, direction="forward") <= ALLOWED


@pytest.mark.parametrize(("made", "rule"), [(HidesByALittle, "hidden NaN"), (Random, "repeatable")])
def test_some_broken_rules_are_only_noted(made, rule):
    found = tried(made)[rule]
    assert (found.holds, found.is_noted) == (False, True)


@pytest.mark.parametrize("is_remote", [False, True])
def test_code_that_rounds_otherwise_at_another_address_is_repeatable(is_remote):
    ADDRESSES.clear()
    made = Implementation(build=RoundsByAddress, source="a test")
    point = Workload(seq_len=20, num_heads=2, head_dim=8, mask="causal", direction="inference")
    found = tried(apart(made, point) if is_remote else made)["repeatable"]
    assert len(ADDRESSES) > 1
    assert found.holds, found.found


def test_reading_the_mask_of_another_head_is_a_convention():
    """An honest function that finds unused keys in the mask of one head (flash-attention#2374) was called wrong."""
    found = tried(first_heads_mask, direction="forward", mask="sliding_window(4)")["masks of heads"]
    assert (found.holds, found.convention) == (False, "heads")
    assert "masks of heads" not in tried(first_heads_mask, direction="forward", mask="causal")
    assert "masks of heads" not in tried(first_heads_mask, direction="forward", mask="padding", batch_size=3)
    assert tried(any_mask, direction="forward", mask="sliding_window(4)", scale=0.4)["masks of heads"].holds


def test_code_that_mixes_up_masks_of_batch_rows_is_not_said_to_mix_up_those_of_heads():
    def of_other_rows(query, key, value, *, mask):
        return masked(query, key, value, mask if mask.shape[1] > 1 else mask.flip(0))

    found = tried(of_other_rows, direction="forward", mask="boolean(40)", batch_size=2)
    assert not found["right when short"].holds
    assert "masks of heads" not in found


@pytest.mark.parametrize(("name", "is_right"), [("mean_for_a_row", False), ("sdpa", True)])
def test_the_gradient_of_a_row_of_bias_is_a_sum_over_queries(name, is_right):
    found = implementation(name) if is_right else mean_for_a_row
    assert ("masks in memory" in broken(found, mask="relative_buckets(8,20)", direction="forward")) is not is_right


def mask_alone(query, key, value, *, mask=None, is_causal=False):
    """Ignore is_causal next to a mask, as much public code does."""
    if mask is None and is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ value


def maximum_before_scale(query, key, value, *, scale=None):
    """Wrong for a negative scale, and with overflowing products in float16."""
    products, scale = query @ key.mT, query.shape[-1] ** -0.5 if scale is None else scale
    powers = (products.float() * scale - products.amax(-1, keepdim=True).float() * scale).exp()
    return ((powers / powers.sum(-1, keepdim=True)) @ value.float()).to(query.dtype)


def rounds_bias(query, key, value, *, bias=None):
    scores = query @ key.mT * query.shape[-1] ** -0.5
    return (scores if bias is None else scores + bias.to(query.dtype)).softmax(-1) @ value


def maximum_of_tiles(query, key, value, *, bias=None):
    """NaN where the scores of the first tile are all -inf (flashinfer#4401)."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    tiles = (scores if bias is None else scores + bias).to(query.dtype).split(64, dim=-1)
    top, total = torch.full_like(query[..., :1], -torch.inf), 0.0
    for tile in tiles:
        higher = torch.maximum(top, tile.amax(-1, keepdim=True))
        total, top = total * (top - higher).exp() + (tile - higher).exp().sum(-1, keepdim=True), higher
    return ((torch.cat(tiles, dim=-1) - top).exp() / total) @ value


def clamps_values(query, key, value):
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value.clamp(-500, 500)


@pytest.mark.parametrize(
    ("made", "axes", "rule", "convention"),
    [
        (sums_in_float16, {"dtype": "float16"}, rules.LARGE_VALUES, "range"),
        (maximum_before_scale, {"dtype": "float16"}, "large products", "products"),
        (maximum_before_scale, {"scale": 0.4}, "other scales", "sign"),
        (rounds_bias, {"dtype": "bfloat16", "mask": "additive"}, "bias in float32", "bias"),
        (maximum_of_tiles, {"mask": "additive"}, "minus infinity in a bias", "minus_infinity"),
        (HidesNaN, {}, "visible NaN", "lost_nan"),
        (mask_alone, {"mask": "causal+padding"}, "is_causal with a mask", "causal"),
    ],
)
def test_some_violations_are_conventions(made, axes, rule, convention):
    found = tried(made, **{"mask": "none"} | axes)[rule]
    assert (found.holds, found.is_noted, found.convention) == (False, True, convention)
    honest = tried(implementation("sdpa"), **{"mask": "none"} | axes)
    assert honest[rule].holds if rule in honest else rule == "is_causal with a mask"


def test_a_negative_scale_has_the_same_effect_in_pytorchs_causal_kernel():
    """The convention's sentence says so of SDPA; it said the opposite."""
    found = tried(implementation("sdpa"), mask="causal", scale=0.4)["other scales"]
    assert (found.is_noted, found.convention) == (True, "sign")
    query, key, value = torch.randn(3, 1, 2, 20, 8).unbind()
    with_scale = partial(torch.nn.functional.scaled_dot_product_attention, query, key, value, scale=-0.4)
    assert not with_scale(is_causal=True).isfinite().all()
    assert with_scale().isfinite().all()
    assert "SDPA on the CPU does so with is_causal" in CONVENTIONS["sign"]


class Keeps(Textbook):
    """Keeps copies of the latest call's key and value, without gradients, and knows them by identity alone."""

    def of(self, tensor):
        return id(tensor)

    def attend(self, query, key, value, mask):
        if torch.is_grad_enabled():
            return super().attend(query, key, value, mask)
        marks = self.of(key), self.of(value)
        if getattr(self, "marks", ()) != marks:
            self.marks, self.held, self.copies = marks, (key, value), (key.clone(), value.clone())
        return super().attend(query, *self.copies, mask)


class KeepsByVersion(Keeps):
    def of(self, tensor):
        return id(tensor), tensor._version


class KeepsKeys(Textbook):
    """Keeps a copy of the latest call's key alone."""

    def attend(self, query, key, value, mask):
        if torch.is_grad_enabled():
            return super().attend(query, key, value, mask)
        if getattr(self, "held", None) is not key:
            self.held, self.copy = key, key.clone()
        return super().attend(query, self.copy, value, mask)


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize(("module", "is_honest"), [(Keeps, False), (KeepsKeys, False), (KeepsByVersion, True)])
def test_a_cache_by_identity_and_version_is_honest_and_one_by_identity_alone_is_not(module, is_honest, is_remote):
    made = Implementation(build=module, source="a test")
    found = broken(apart(made, Workload(**SIZES_OF_RULES)) if is_remote else made)
    assert ("outputs apart" in found) is not is_honest


def test_finite_wrong_sums_in_float16_are_no_convention():
    assert not tried(clamps_values, dtype="float16", mask="none")[rules.LARGE_VALUES].is_noted


class OneRow(Textbook):
    def attend(self, query, key, value, mask):
        if query.shape[0] > 1 or key.shape[2] > 40:
            raise RuntimeError("one row alone")
        return super().attend(query, key, value, mask)


def test_rules_are_tried_with_one_batch_row_or_a_note_says_that_none_was():
    assert "layouts" in tried(OneRow, batch_size=1, mask="none")
    (note,) = tried(OneRow, batch_size=2).values()
    assert (note.rule, note.is_noted, note.holds) == (rules.NO_RULE, True, False)
    assert "one row alone" in note.found


def test_a_rule_is_tried_once_for_workloads_of_a_kind():
    known = {}
    first = tried(Textbook, known)
    assert set(first) >= {"layouts", "hidden NaN"}
    before = dict(known)
    assert tried(Textbook, known) == first
    assert known == before
    tried(Textbook, known, dtype="bfloat16")
    again = {key[0] for key in known if key not in before}
    assert "layouts" in again
    assert again < set(rules.RULES)


def test_layouts_are_tried_again_where_gradients_are_compared():
    known = {}
    tried(Textbook, known, direction="forward", mask="padding(20,0)")  # a query sees no key: outputs alone
    before = dict(known)
    tried(Textbook, known, direction="forward", mask="padding")
    assert "layouts" in {key[0] for key in known if key not in before}


def test_what_a_hidden_nan_reaches_is_noted_and_decides_nothing():
    found = tried(Textbook)
    assert not found["hidden NaN"].holds
    assert found["hidden NaN"].is_noted
    assert "NaN in the value" in found["hidden NaN"].found
    assert "key" not in found["hidden NaN"].found.replace("hidden", "")
    assert {name for name in found if found[name].is_noted} == {"hidden NaN", "visible NaN", "repeatable"}


def test_to_refuse_a_layout_is_noted_and_decides_nothing():
    found = tried(NeedsContiguous)
    assert "view" in found["layouts"].found
    assert found["layouts"].is_noted


class KeysStridesForAll(Textbook):
    """Reads the key as if it had the strides of a contiguous one."""

    def attend(self, query, key, value, mask):
        if key.stride(-1) != 1 and key.untyped_storage().nbytes() == key.numel() * key.itemsize:
            key = key.as_strided(key.shape, torch.empty(key.shape).stride())
        return super().attend(query, key, value, mask)


def test_the_operand_whose_layout_matters_is_named():
    assert "the key alone, transposed, gives" in tried(KeysStridesForAll)["layouts"].found
