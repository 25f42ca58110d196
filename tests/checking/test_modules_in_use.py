"""Ways in which modules and kernels are used: in chunks, in training, under several masks, for one gradient."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

from attnbench.checking import rules
from attnbench.checking.agreement import check
from attnbench.checking.reference import References
from attnbench.contract.adapters import adapt, packed, split
from attnbench.contract.functions import from_function
from attnbench.plugins import discover_implementations
from attnbench.storage.records import CheckVerdict
from attnbench.workloads.workload import Workload
from tests.checks import references

SIZES = {"batch_size": 2, "seq_len": 35, "num_heads": 2, "head_dim": 8, "direction": "forward"}
MODULE = {"scope": "module", "bias": "all"}


def tried(made, rule, **axes):
    references = References(Workload(**(SIZES | axes)), 0, is_brief=True)
    return {each.rule: each for each in rules.examine(made, references, {})}.get(rule)


class Packed(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def attend(self, query, key, value, mask):
        return sdpa(query, key, value, attn_mask=mask)

    def forward(self, x, mask=None):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))


def adapted(kind, **facts):
    return adapt(lambda sizes: kind(sizes.embed_dim, sizes.num_heads), packed("qkv", out="out"), **facts)


def with_mask(kind, **facts):
    return adapted(kind, call=lambda module, x, context, mask: module(x, mask.visible), **facts)


class Cached(Packed):
    past = None

    def attend(self, query, key, value, mask):
        if self.past is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(self.past, (key, value), strict=True))
        self.past = key, value
        return sdpa(query, key, value, attn_mask=self.seen(query.shape[2], key.shape[2]))

    def seen(self, query_len, key_len):
        return torch.ones(query_len, key_len, dtype=torch.bool).tril(key_len - query_len)


class AlignedAtTheStart(Cached):
    def seen(self, query_len, key_len):
        return torch.ones(query_len, key_len, dtype=torch.bool).tril()


class AlignedAtTheStartUnlessAlone(Cached):
    def seen(self, query_len, key_len):
        return None if query_len == 1 else torch.ones(query_len, key_len, dtype=torch.bool).tril()


class SeesTheWholeChunk(Cached):
    def seen(self, query_len, key_len):
        return super().seen(query_len, key_len) if query_len == key_len else None


class NeverReadsItsCache(Cached):
    def attend(self, query, key, value, mask):
        return sdpa(query, key, value, is_causal=True)


class CountsQueriesFromZero(Cached):
    """Has ALiBi, in which the queries of each chunk count from 0."""

    def seen(self, query_len, key_len):
        away = (torch.arange(key_len) - torch.arange(query_len)[:, None]).abs()
        slopes = 2.0 ** (-8 * torch.arange(1, self.heads + 1) / self.heads)
        return (-slopes[:, None, None] * away).masked_fill(~super().seen(query_len, key_len), -math.inf)


class KeptForAll(Cached):
    """Keeps the keys of every sequence in one place, and starts anew with a longer chunk only."""

    def attend(self, query, key, value, mask):
        KeptForAll.past = None if query.shape[2] > 30 else KeptForAll.past
        if KeptForAll.past is not None:
            key, value = (torch.cat(pair, 2) for pair in zip(KeptForAll.past, (key, value), strict=True))
        KeptForAll.past = key, value
        return sdpa(query, key, value, attn_mask=self.seen(query.shape[2], key.shape[2]))


def emptied(module, x, context, mask):
    module.past = None
    return module(x)


IN_CHUNKS = {"mask": "causal", "direction": "inference"} | MODULE


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (AlignedAtTheStart, "aligned at the first key of the cache"),
        (AlignedAtTheStartUnlessAlone, "unless it is one token"),
        (SeesTheWholeChunk, "later keys included"),
        (NeverReadsItsCache, "as if nothing came before"),
        (KeptForAll, "output is wrong"),
        (CountsQueriesFromZero, "the bias counts the queries of each later chunk from 0"),
    ],
)
def test_a_module_with_a_cache_is_fed_in_chunks(kind, words):
    mask = "causal+alibi" if kind is CountsQueriesFromZero else "causal"
    found = tried(adapted(kind, masks=(mask,), has_cache=True), "fed in chunks", **IN_CHUNKS | {"mask": mask})
    assert (found.holds, found.is_noted) == (False, False)
    assert words in found.found


def test_a_right_cache_passes_and_one_that_is_emptied_by_its_call_is_noted():
    assert tried(adapted(Cached, masks=("causal",), has_cache=True), "fed in chunks", **IN_CHUNKS).holds
    found = tried(adapted(Cached, masks=("causal",), has_cache=True, call=emptied), "fed in chunks", **IN_CHUNKS)
    assert (found.holds, found.is_noted) == (False, True)
    assert "empties the cache" in found.found
    assert tried(adapted(Packed), "fed in chunks", **MODULE) is None


class DetachesWhatItKeeps(Cached):
    def attend(self, query, key, value, mask):
        return super().attend(query, key.detach(), value.detach(), mask)


@pytest.mark.parametrize(("kind", "grade"), [(Cached, CheckVerdict.right), (DetachesWhatItKeeps, CheckVerdict.wrong)])
def test_gradients_of_a_module_with_a_cache_are_checked_on_request(kind, grade):
    made = adapted(kind, masks=("causal",), has_cache=True)
    assert made.built_in()["direction"] == "inference"
    asked = Workload(**(SIZES | MODULE | {"direction": "forward_backward", "mask": "causal"}))
    assert made.unsupported(asked) is None
    judged = check(references(asked, is_brief=True), made)
    assert judged.grade is grade, judged.diagnosis


class Across(nn.Module):
    """Cross-attention."""

    def __init__(self, sizes):
        super().__init__()
        self.heads = sizes.num_heads
        self.q, self.k, self.v, self.out = (nn.Linear(sizes.embed_dim, sizes.embed_dim) for _ in range(4))

    def forward(self, x, context, mask):
        projected = self.q(x), self.k(context), self.v(context)
        heads = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in projected)
        return self.out(sdpa(*heads, attn_mask=mask).transpose(1, 2).flatten(2))


class AcrossByShape(Across):
    """It takes a context as long as the tokens for the tokens."""

    def forward(self, x, context, mask):
        return super().forward(x, x if x.shape == context.shape else context, mask)


def test_a_context_as_long_as_the_tokens_is_not_taken_for_them():
    def across(kind):
        return adapt(
            kind, split("q", "k", "v", out="out"), call=lambda m, x, context, mask: m(x, context, mask.visible)
        )

    for direction in ("inference", "forward"):
        axes = MODULE | {"direction": direction}
        found = tried(across(AcrossByShape), "another context", **axes)
        assert (found.holds, found.is_noted) == (False, False)
        assert "it attends to its own tokens" in found.found
        assert tried(across(Across), "another context", **axes).holds
        assert tried(with_mask(Packed), "another context", **axes) is None


class ForgetsInTraining(Packed):
    def attend(self, query, key, value, mask):
        return sdpa(query, key, value, attn_mask=None if self.training else mask)


class Rounds(ForgetsInTraining):
    """Its sums come in another order each time, as those of several threads may."""

    def attend(self, query, key, value, mask):
        output = super().attend(query, key, value, mask)
        return output * (1 + torch.rand_like(output) * torch.finfo(output.dtype).eps)


class Drops(Packed):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.layer, self.attention_dropout = nn.Dropout(0.3), 0.2

    def attend(self, query, key, value, mask):
        share = self.attention_dropout if self.training else 0.0
        return self.layer(sdpa(query, key, value, attn_mask=mask, dropout_p=share))


class Noisy(Packed):
    def attend(self, query, key, value, mask):
        output = sdpa(query, key, value, attn_mask=mask)
        return output + torch.rand_like(output) if self.training else output


@pytest.mark.parametrize(
    ("kind", "holds", "is_noted"),
    [(ForgetsInTraining, False, False), (Rounds, False, False), (Drops, True, False), (Noisy, False, True)],
)
def test_training_mode_without_dropout_changes_nothing(kind, holds, is_noted):
    found = tried(with_mask(kind), "training mode", **MODULE, mask="padding")
    assert (found.holds, found.is_noted) == (holds, is_noted)


def test_declared_dropout_is_active_in_training_mode_alone():
    """A module that drops in training alone was told that nothing is dropped."""
    made = with_mask(Drops, dropout=lambda module, share: setattr(module, "attention_dropout", share))
    module = made.build(References(Workload(**SIZES, **MODULE), 0, is_brief=True).by_probe["normal"].inputs.weights)
    module.eval()
    module.dropout = 0.5
    assert (module.module.training, module.module.layer.p, module.module.attention_dropout) == (True, 0.0, 0.5)
    module.dropout = 0.0
    assert (module.module.training, module.module.layer.p) == (False, 0.3)


class KeepsItsMaskByShape(Packed):
    kept = None

    def attend(self, query, key, value, mask):
        if self.kept is None or self.kept[0] != query.shape:
            self.kept = query.shape, mask
        return sdpa(query, key, value, attn_mask=self.kept[1])


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_a_mask_that_is_kept_by_its_shape_is_found(mask):
    found = tried(with_mask(KeepsItsMaskByShape), "another mask", **MODULE, mask=mask)
    assert not found.holds
    assert f"it answers under the mask {mask} of the call before" in found.found
    assert tried(with_mask(Packed), "another mask", **MODULE, mask=mask).holds


KEPT = {}


def keeps_its_mask(query, key, value, *, mask=None):
    """It keeps the numbers to add for the same tensor, whatever was written into it."""
    if KEPT.get("mask") is not mask:
        KEPT.update(mask=mask, added=None if mask is None else torch.zeros(mask.shape).masked_fill(~mask, -math.inf))
    return sdpa(query, key, value, attn_mask=KEPT["added"])


def test_a_mask_that_is_written_anew_in_place_is_read_again():
    found = tried(from_function(keeps_its_mask, "mine"), "another mask", mask="padding")
    assert not found.holds
    assert "it answers under the mask padding of the call before" in found.found
    assert "_version" in found.found
    assert tried(from_function(by_mask, "mine"), "another mask", mask="padding").holds


def by_mask(query, key, value, *, mask=None):
    return sdpa(query, key, value, attn_mask=mask)


class KeepsJoinedWeights(Packed):
    """Without gradients it keeps a copy of its weights, as code does that joins them for inference."""

    joined = None

    def forward(self, x, mask=None):
        if torch.is_grad_enabled():
            return super().forward(x, mask)
        self.joined = self.joined or [copy.deepcopy(self)]  # in a list, so that it is no submodule
        return Packed.forward(self.joined[0], x, mask)


class KeepsNextToTensor(Packed):
    """Keeps its answer next to the tensor and its version, as services do, whose weights never change."""

    kept = None

    def forward(self, x, mask=None):
        place = (x, x._version)
        if torch.is_grad_enabled() or self.kept is None or self.kept[0][0] is not x or self.kept[0][1] != place[1]:
            self.kept = place, super().forward(x, mask)
        return self.kept[1].clone()


@pytest.mark.parametrize("direction", ["inference", "forward"])
def test_a_module_follows_a_change_of_its_weights(direction):
    axes = MODULE | {"direction": direction}
    found = tried(with_mask(KeepsJoinedWeights), "other weights", **axes)
    assert not found.holds
    assert "it answers with the weights of the call before" in found.found
    assert tried(with_mask(Packed), "other weights", **axes).holds
    assert tried(with_mask(KeepsNextToTensor), "other weights", **axes).holds
    assert tried(from_function(by_mask, "mine"), "other weights") is None


class Statistics(torch.autograd.Function):
    """Attention that keeps its logsumexp for some needs alone."""

    @staticmethod
    def forward(ctx, query, key, value, bias, needed):
        scores = query @ key.mT * query.shape[-1] ** -0.5 + bias
        logs = scores.logsumexp(-1, keepdim=True)
        output = (scores - logs).exp() @ value
        kept = logs if any(ctx.needs_input_grad[:needed]) else torch.zeros_like(logs)
        ctx.save_for_backward(query, key, value, bias, kept, output)
        return output

    @staticmethod
    def backward(ctx, grad):
        query, key, value, bias, logs, output = ctx.saved_tensors
        scale = query.shape[-1] ** -0.5
        weights = (query @ key.mT * scale + bias - logs).exp()
        of_scores = weights * (grad @ value.mT - (grad * output).sum(-1, keepdim=True))
        of_bias = of_scores.sum_to_size(bias.shape)
        return of_scores @ key * scale, of_scores.mT @ query * scale, weights.mT @ grad, of_bias, None


def for_three(query, key, value, *, bias):
    return Statistics.apply(query, key, value, torch.zeros(1) if bias is None else bias, 3)


def for_four(query, key, value, *, bias):
    return Statistics.apply(query, key, value, torch.zeros(1) if bias is None else bias, 4)


def test_each_operand_alone_may_need_a_gradient():
    axes = {"mask": "relative_buckets(8,20)"}
    found = tried(from_function(for_three, "mine"), "gradients apart", **axes)
    assert not found.holds
    assert "relative_bias alone needs" in found.found
    assert tried(from_function(for_four, "mine"), "gradients apart", **axes).holds


def textbook(query, key, value):
    return (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) @ value


@pytest.mark.parametrize(
    ("made", "words"), [(for_four, "silently wrong"), (sdpa, "cannot be differentiated twice"), (textbook, "")]
)
def test_second_derivatives_are_right_or_noted(made, words):
    axes = {"mask": "additive"} if made is for_four else {}
    found = tried(from_function(made, "mine"), "second derivatives", **axes)
    assert (found.holds, found.is_noted) == (not words, True)
    assert words in found.found


def test_a_workload_that_built_in_axes_do_not_allow_is_unsupported():
    """It was a ValueError, which --invariance took for a finding."""
    point = Workload(batch_size=3, seq_len=1, kv_len=32, num_heads=2, head_dim=8, mask="padding(32,22,16)")
    assert "kv_len" in adapted(Packed).unsupported(point)


def test_a_function_of_autograd_is_no_implementation(tmp_path):
    (tmp_path / "mine.py").write_text(
        "class Fused(torch.autograd.Function):\n    @staticmethod\n    def forward(ctx, query, key, value): ...\n"
        "def fused(query, key, value): ...\n"
    )
    assert discover_implementations(tmp_path / "mine.py") == ["fused"]
