"""Adapters: a right module passes in every layout, a wrong one is found, and errors are clear."""

import re
from dataclasses import replace
from functools import partial
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnbench.case import bind, build, draw_weights, reason_against
from attnbench.checking.agreement import check
from attnbench.checking.reference import reference_for_probe
from attnbench.contract.adapters import Layout, adapt, packed, split, stacked, transposed
from attnbench.workloads.workload import BIASES, Workload
from examples import adapters as theirs
from tests.checks import references

ORDERS = ["".join(order) for order in permutations("qkv")]
TWO_ORDERS = ["qkv", "kvq"]
POINT = Workload(
    batch_size=2, seq_len=9, num_heads=3, head_dim=4, mask="causal", scope="module", direction="forward_backward"
)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """(B,T,H,K), (B,S,G,K), (B,S,G,K) -> (B,T,H*K)."""
    heads = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return theirs.attend(*heads, mask, enable_gqa=True).transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """One layer; `order` is the order in which `forward` splits it, `together` groups each head's rows."""

    def __init__(self, sizes, order="qkv", *, together=False):
        super().__init__()
        self.order, self.together, self.num_heads = order, together, sizes.num_heads
        self.qkv = nn.Linear(sizes.embed_dim, 3 * sizes.embed_dim, bias=sizes.qkv_bias)
        self.proj = nn.Linear(sizes.embed_dim, sizes.embed_dim, bias=sizes.out_bias)

    def forward(self, x, mask=None):
        rows = self.qkv(x)
        if self.together:
            parts = rows.unflatten(-1, (self.num_heads, -1)).chunk(3, dim=-1)
        else:
            parts = [part.unflatten(-1, (self.num_heads, -1)) for part in rows.chunk(3, dim=-1)]
        named = dict(zip(self.order, parts, strict=True))
        return self.proj(attend(named["q"], named["k"], named["v"], mask))


class Split(nn.Module):
    """Three layers, grouped heads, cross-attention, and an output that is part of a tuple."""

    def __init__(self, sizes, *, bias=True):
        super().__init__()
        self.width = sizes.head_dim
        groups = sizes.num_kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.embed_dim, sizes.num_heads * sizes.head_dim, bias=bias)
        self.k_proj = nn.Linear(sizes.embed_dim, groups, bias=bias)
        self.v_proj = nn.Linear(sizes.embed_dim, groups, bias=bias)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head_dim, sizes.embed_dim, bias=bias)

    def forward(self, x, context, mask=None):
        query, key, value = (
            layer(tokens).unflatten(-1, (-1, self.width))
            for layer, tokens in ((self.q_proj, x), (self.k_proj, context), (self.v_proj, context))
        )
        return self.o_proj(attend(query, key, value, mask)), "weights"


class Rotating(Split):
    """Split, with the frequencies of its rotary embedding in a buffer, which it uses in float32 or as it is."""

    def __init__(self, sizes, *, is_wide=True):
        super().__init__(sizes, bias=False)
        pairs = sizes.head_dim // 2
        frequencies = 10000.0 ** -(torch.arange(pairs) / pairs)
        self.is_wide = is_wide
        self.register_buffer("frequencies", frequencies, persistent=False)
        angles = torch.arange(300.0)[:, None] * frequencies
        self.register_buffer("table", torch.cat([angles.cos(), angles.sin()], dim=-1), persistent=False)

    def turned(self, heads):
        angles = torch.arange(heads.shape[1]).float()[:, None] * self.frequencies.float()
        table = torch.cat([angles.cos(), angles.sin()], dim=-1).to(heads) if self.is_wide else self.table
        cos, sin = table[: heads.shape[1], None].chunk(2, dim=-1)
        one, other = heads.chunk(2, dim=-1)
        return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)

    def forward(self, x, mask=None):
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.width)) for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key, value = (heads.transpose(1, 2) for heads in (self.turned(query), self.turned(key), value))
        scores = query.float() @ key.transpose(-2, -1).float() * self.width**-0.5
        weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1).to(query.dtype)
        return self.o_proj((weights @ value).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_wide", [True, False])
def test_a_wide_buffer_keeps_its_digits_if_the_module_takes_it(is_wide):
    """Transformers' LlamaAttention with its rotary embedding inside was WRONG in bfloat16."""
    made = adapt(
        lambda sizes: Rotating(sizes, is_wide=is_wide),
        split("q_proj", "k_proj", "v_proj", out="o_proj"),
        call=lambda module, x, context, mask: module(x, mask.visible),
        rotary="halves(10000)",
    )
    workload = Workload(
        batch_size=1,
        seq_len=257,
        num_heads=2,
        head_dim=64,
        scope="module",
        mask="causal",
        bias="none",
        rotary="halves(10000)",
        dtype="bfloat16",
        direction="inference",
    )
    reference = reference_for_probe(workload, "normal", 0)
    case = build(workload, made, reference.inputs)
    assert reference.tolerances["output"].judge(case.output()).agrees
    assert case.module.module.frequencies.dtype is (torch.float32 if is_wide else torch.bfloat16)
    assert case.module.module.q_proj.weight.dtype is torch.bfloat16


class Conv1D(nn.Module):
    """x @ weight, with weight (D, rows)."""

    def __init__(self, width, rows):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width, rows)), nn.Parameter(torch.empty(rows))

    def forward(self, x):
        return x @ self.weight + self.bias


class Transposed(Packed):
    """One transposed layer, as in GPT-2."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.qkv = Conv1D(sizes.embed_dim, 3 * sizes.embed_dim)
        self.proj = Conv1D(sizes.embed_dim, sizes.embed_dim)


def alone(module, x, context, mask):
    return module(x, mask=mask.visible)


def across(module, x, context, mask):
    return module(x, context, mask=mask.visible)


def with_gain(weights):
    return packed("qkv", out="proj").pack(weights) | {"gain": torch.ones(weights.query.shape[-1])}


HEADS = adapt(
    lambda s: theirs.Heads(s.embed_dim, s.num_heads),
    split(*(f"heads.{{head}}.{each}" for each in ("query", "key", "value")), out=None),
    masks=("none",),
)
SPLIT = split("q_proj", "k_proj", "v_proj", out="o_proj")
RIGHT = {
    **{
        f"packed {each}": adapt(lambda s, o=each: Packed(s, o), packed("qkv", each, out="proj"), call=alone)
        for each in ORDERS
    },
    **{
        f"per head {each}": adapt(
            lambda s, o=each: Packed(s, o, together=True), packed("qkv", each, out="proj", per_head=True), call=alone
        )
        for each in TWO_ORDERS
    },
    "split": adapt(Split, SPLIT, call=across),
    "transposed": adapt(Transposed, transposed(packed("qkv", out="proj")), call=alone),
    "a constant in pack": adapt(lambda s: theirs.Gained(s.embed_dim, s.num_heads), Layout(pack=with_gain), call=alone),
    "a list of heads": HEADS,
}


def judge(found, point):
    assert reason_against(found, point) is None
    return check(references(point), found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", RIGHT)
def test_a_right_module_agrees_with_its_gradients(name):
    point = POINT.with_axes(RIGHT[name].built_in())
    agreement = judge(RIGHT[name], point)
    assert agreement.agrees, agreement.diagnosis
    compared = {t.tensor for _, t in agreement.tensors()}
    assert "gradient of query weights" in compared
    assert ("gradient of out_bias weights" in compared) == ("out" in point.biased)


def test_a_context_of_another_length_is_tried_if_call_passes_it_on():
    same_length = adapt(Packed, packed("qkv", out="proj"), call=lambda m, x, context, mask: m(x, mask.context))
    assert same_length.built_in()["kv_len"] == 0
    point = POINT.with_axes({"kv_len": 12})
    assert "pass on the context in call" in str(reason_against(same_length, point))

    def inside(module, x, context, mask):
        calls = [lambda: across(module, x, context, mask)]
        return calls[0]()

    def any_number(*tensors):
        return across(*tensors)

    for call in (across, inside, any_number, partial(across)):
        cross = adapt(Split, SPLIT, call=call)
        assert "kv_len" not in cross.built_in()
        assert judge(cross, point).agrees
    assert adapt(Split, SPLIT, call=across, sizes={"kv_len": 0}).built_in()["kv_len"] == 0


ARRANGED = {
    "bts": lambda whole: whole[:, 0],
    "tsb": lambda whole: whole[:, 0].permute(1, 2, 0),
    "nts": lambda whole: whole.flatten(0, 1),
    "ts": lambda whole: whole[0, 0],
    "bs": lambda whole: whole[:, 0, 0],
}
"""A mask (B, H, T, S) with these axes."""


@pytest.mark.parametrize("axes", ARRANGED)
@pytest.mark.parametrize("name", ["none", "causal", "padding", "causal+padding"])
def test_a_mask_has_the_axes_that_a_package_wants(name, axes):
    mask = bind(POINT.with_axes({"mask": name, "kv_len": 12}))
    needed = {"causal": {"t"}, "padding": {"b"}, "causal+padding": {"b", "t"}, "none": set()}[name]
    if not needed <= set(axes.replace("n", "b")):
        with pytest.raises(NotImplementedError, match=f"differs along .*the code takes {axes}"):
            mask.visible_as(axes)
    elif name == "none":
        assert mask.visible_as(axes) is mask.hidden_as(axes) is mask.added_as(axes, torch.float32) is None
    else:
        whole = torch.from_numpy(mask.rule.dense(2, 9, 12).copy())[:, None].expand(2, 3, 9, 12)
        expected = ARRANGED[axes](whole)
        assert mask.visible_as(axes).equal(expected)
        assert mask.hidden_as(axes).equal(~expected)
        assert mask.added_as(axes, torch.float32).equal(torch.zeros(()).where(expected, -torch.inf))


def test_a_module_that_is_not_implemented_in_some_sizes_is_unsupported_there():
    def make(sizes):
        if sizes.num_heads == 1:
            raise NotImplementedError
        return Packed(sizes)

    adapted = adapt(make, packed("qkv", out="proj"), call=alone)
    assert judge(adapted, POINT).agrees
    point = Workload(**(POINT.axes() | {"num_heads": 1, "num_kv_heads": 1}))
    assert reason_against(adapted, point) == "make raises NotImplementedError"


@pytest.mark.parametrize("order", TWO_ORDERS)
def test_groups_and_contexts_are_read(order):
    point = Workload(
        seq_len=5, kv_len=8, num_heads=4, num_kv_heads=2, head_dim=4, scope="module", direction="forward_backward"
    )
    assert judge(RIGHT["split"], point).agrees

    class ByGroup(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.qkv, self.proj = nn.Linear(16, 2 * (2 + 1 + 1) * 4), nn.Linear(16, 16)

        def forward(self, x):
            parts = self.qkv(x).unflatten(-1, (2, -1)).split([8 if letter == "q" else 4 for letter in order], dim=-1)
            named = dict(zip(order, parts, strict=True))
            query = named["q"].unflatten(-1, (2, -1)).flatten(2, 3)  # (B,T,G,2*K) -> (B,T,H,K)
            return self.proj(attend(query, named["k"], named["v"], None))

    grouped = adapt(ByGroup, packed("qkv", order, out="proj", per_head=True))
    assert judge(grouped, Workload(**(point.axes() | {"kv_len": 5}))).agrees


@pytest.mark.parametrize("bias", BIASES)
def test_biases_are_asked_for_and_found_out(bias):
    point = Workload(**(POINT.axes() | {"bias": bias}))
    assert judge(RIGHT["packed qkv"], point).agrees
    reason = reason_against(RIGHT["split"], point)
    assert (reason is None) == (bias == "all")
    assert bias == "all" or "--set bias=all" in str(reason)
    without = reason_against(adapt(lambda s: Split(s, bias=False), SPLIT, call=across), point)
    assert without is None if bias == "none" else "--set bias=none" in str(without)
    unmasked = point.with_axes({"mask": "none"})
    assert (reason_against(HEADS, unmasked) is None) == (bias in {"none", "out"})


def test_biases_of_some_projections_alone_are_read_from_the_module():
    class KeyWithout(Split):
        def __init__(self, sizes):
            super().__init__(sizes)
            self.k_proj = nn.Linear(sizes.embed_dim, sizes.embed_dim, bias=False)

    rest = Layout(pack=lambda weights: {n: t for n, t in SPLIT.pack(weights).items() if n != "k_proj.bias"})
    without = adapt(KeyWithout, rest, call=across)
    assert without.built_in()["bias"] == "qv+out"
    assert judge(without, POINT.with_axes(without.built_in())).agrees
    assert "--set bias=qv+out" in str(reason_against(without, POINT))
    none = Layout(pack=lambda weights: SPLIT.pack(weights.biased(())))
    assert adapt(lambda s: Split(s, bias=False), none, call=across).built_in()["bias"] == "none"


def test_a_single_key_head_is_read_from_the_module():
    class OneKeyHead(Split):
        def __init__(self, sizes):
            super().__init__(sizes)
            self.k_proj, self.v_proj = (nn.Linear(sizes.embed_dim, sizes.head_dim) for _ in range(2))

    single = adapt(OneKeyHead, SPLIT, call=across)
    assert single.built_in()["num_kv_heads"] == 1
    assert judge(single, POINT.with_axes(single.built_in())).agrees
    assert "--set num_kv_heads=1" in str(reason_against(single, POINT))
    assert "num_kv_heads" not in adapt(Split, SPLIT, call=across).built_in()
    halved = adapt(lambda s: Split(replace(s, num_kv_heads=s.num_heads // 2)), SPLIT, call=across)
    assert "num_kv_heads" not in halved.built_in()  # with two heads it has one, but not with more


def test_what_an_adapter_cannot_is_reported_with_its_reason():
    unmasked = adapt(Packed, packed("qkv", out="proj"))
    assert "takes no mask causal: add call=lambda module" in str(reason_against(unmasked, POINT))
    assert "choose scope=module" in str(reason_against(unmasked, Workload()))
    for name, axis, value in (("split", "value_dim", 6), ("packed qkv", "num_kv_heads", 1)):
        assert axis in str(reason_against(RIGHT[name], Workload(**(POINT.axes() | {axis: value}))))
    for axes in ({"embed_dim": 20}, {"num_kv_heads": 1}):  # its parameters follow
        assert judge(RIGHT["split"], Workload(**(POINT.axes() | axes))).agrees
    own = adapt(Packed, packed("qkv", out="proj"), unsupported=lambda workload: "not on Sundays")
    assert reason_against(own, Workload(scope="module")) == "not on Sundays"


def made_of(**others):
    return lambda: adapt(Packed, packed("qkv", out="proj"), **others)


MISUSES = {
    "an axis of a mask twice": (lambda: bind(POINT).visible_as("tt"), "'tt' is not allowed: axes of a mask are b, h"),
    "one layer twice": (lambda: split("qkv", "qkv", "v", out="proj"), "give different names of layers"),
    "a layer for its name": (lambda: split(nn.Linear(1, 1), "k", "v", out=None), "give different names of layers"),
    "a name for out that is none": (lambda: packed("qkv", out=True), "out=None if the module has no output"),
    **{
        f"the order {order!r}": (partial(packed, "qkv", order, out="proj"), "name q, k and v once each")
        for order in ("qkk", "qk", "qkvv", "abc", "")
    },
    "a part missing": (
        lambda: stacked({"to_q": "q", "to_kv": "k"}, out=None),
        "is not allowed: its letters",
    ),
    "no layout": (lambda: adapt(Packed, "qkv"), "adapt is given 'qkv' for a layout"),
    "a module": (lambda: adapt(nn.Linear(1, 1), SPLIT), "given a Linear for make: give a function"),
    "dropout as a number": (made_of(dropout=0.1), "adapt is given a float for dropout: give a function"),
    "masks as a text": (made_of(call=alone, masks="causal"), "masks='causal': give a list of names"),
    "masks that are no texts": (made_of(call=alone, masks=[None]), "masks=[None]: give a list of names"),
    "sizes as a number": (made_of(sizes=5), "has the wrong type"),
    "a size as a text": (made_of(sizes={"seq_len": "64"}), "has the wrong type"),
    "a negative scale": (made_of(scale=-1.0), "scale"),
    "a mask that is none": (made_of(call=alone, masks=["casual"]), "did you mean causal?"),
    "numbers that a mask has not": (made_of(call=alone, masks=["causal(3)"]), "causal"),
    "a rotation that is none": (made_of(rotary="half"), "rotary is none, halves(BASE)"),
    "a function with a module's facts": (
        lambda: adapt(lambda q, k, v: q, extra={"gain": 1.0}),
        "extra is about modules",
    ),
    "an unknown fact": (
        lambda: adapt(lambda q, k, v: q, mask="causal"),
        "no argument of adapt mask (did you mean masks",
    ),
    "masks without a call": (
        made_of(masks=("none", "causal")),
        "and no call, so that the module never gets a mask: add",
    ),
}


@pytest.mark.parametrize(("make", "said"), MISUSES.values(), ids=MISUSES)
def test_a_wrong_argument_is_refused_with_what_is_allowed(make, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        make()
    assert "\n" not in str(raised.value)


def test_a_declared_mask_may_be_written_in_any_order():
    found = made_of(call=alone, masks=("padding+causal", "sliding_window( 9)"))()
    points = [Workload(**(POINT.axes() | {"mask": mask})) for mask in ("causal+padding", "sliding_window(9)", "causal")]
    assert [found.unsupported(point) is None for point in points] == [True, True, False]


LATER = {
    "make that raises": (
        lambda: adapt(lambda sizes: Packed(sizes.dim), SPLIT),
        "make fails at Sizes(embed_dim=12, num_heads=3",
    ),
    "pack that raises": (
        lambda: adapt(Packed, Layout(pack=lambda weights: {"qkv.weight": weights.wq}), call=alone),
        "fails to pack a state dict: AttributeError: 'Weights' object has no attribute 'wq'",
    ),
    "make that makes nothing": (lambda: adapt(lambda sizes: None, SPLIT), "make returned None: it must return"),
    "a module of one size": (
        lambda: adapt(lambda sizes: nn.MultiheadAttention(8, 2), packed("in_proj_{}", out="out_proj"), call=alone),
        "out_proj.weight is (8, 8) in the module, and (12, 12) in the layout",
    ),
    "a parameter that the layout has not": (
        lambda: adapt(Packed, packed("qkv", out=None), call=alone),
        "proj.weight is (12, 12) in the module, and not named in the layout",
    ),
    "a layer that the module has not": (
        lambda: adapt(Packed, packed("in_proj", out="proj"), call=alone),
        "in_proj.weight is no parameter in the module, and (36, 12) in the layout",
    ),
    "transposed": (
        lambda: adapt(Packed, transposed(packed("qkv", out="proj")), call=alone),
        "the layout does not fit the module: qkv.weight is",
    ),
    "detached weights": (
        lambda: adapt(Packed, Layout(pack=lambda weights: packed("qkv", out="proj").pack(weights.map(torch.detach)))),
        "the weights of query, key, value: pack by",
    ),
    "an output that is None": (made_of(call=lambda m, x, context, mask: None), "the output is a builtins.NoneType"),
    "an output by head": (
        made_of(call=lambda m, x, context, mask: m(x).unflatten(-1, (3, -1))),
        "the output has shape (2, 9, 3, 4), not (2, 9, 12)",
    ),
    "the mask itself": (
        made_of(call=lambda m, x, context, mask: m(x, mask)),
        "call is given a BoundMask: pass on mask.visible, a boolean tensor, or None if every key",
    ),
}


@pytest.mark.parametrize(("make", "said"), LATER.values(), ids=LATER)
def test_a_misuse_that_shows_later_is_reported_with_its_place(make, said):
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        judge(make(), Workload(**(POINT.axes() | {"mask": "none"})))
    assert "\n" not in str(raised.value)


def test_a_pack_may_give_none_for_a_bias_and_may_need_one():
    right = packed("qkv", out="proj")
    either = Layout(pack=lambda weights: right.pack(weights) | {"proj.bias": weights.out_bias})
    needed = Layout(pack=lambda weights: right.pack(weights) | {"proj.bias": weights.out_bias.clone()})
    without_out = POINT.with_axes({"bias": "qkv"})
    assert judge(adapt(Packed, either, call=alone), without_out).agrees
    made = adapt(Packed, needed, call=alone)
    assert judge(made, POINT).agrees
    with pytest.raises(AttributeError, match="'NoneType' object has no attribute 'clone'"):
        judge(made, without_out)


def test_an_adapter_takes_masks_that_change_scores_only_where_it_lists_them():
    def adapted(masks):
        return adapt(Split, SPLIT, call=across, masks=masks)

    point = Workload(scope="module", mask="causal+alibi")
    assert "if it supports causal+alibi, list it in masks" in str(adapted(None).unsupported(point))
    assert "takes no mask causal+alibi, but none, causal" in str(adapted(["none", "causal"]).unsupported(point))
    assert adapted(["causal+alibi"]).unsupported(point) is None
    assert adapt(Split, SPLIT, call=across, changes_scores=True).unsupported(point) is None
    assert adapted(None).unsupported(Workload(scope="module", mask="causal+boolean(30)")) is None


BY_HEAD = split("heads.{head}.a", "heads.{head}.b", "heads.{head}.c", out=None)
LAYOUTS = st.sampled_from(
    [
        split("q", "k", "v", out="o"),
        BY_HEAD,
        stacked({"to_kv": "vk", "to_q": "q"}, out="out"),
        *(packed("in_proj_{}", order, out="out") for order in ORDERS),
        *(transposed(packed("qkv", order, out="out", per_head=True)) for order in ORDERS),
    ]
)


@settings(deadline=None)
@given(LAYOUTS, st.tuples(*[st.integers(1, 3)] * 3), st.integers(1, 5), st.sampled_from(BIASES))
def test_a_layout_moves_every_number_once(layout, heads, width, bias):
    groups, repeats, head_dim = heads
    num_heads = groups if layout is BY_HEAD else groups * repeats
    sizes = {"num_heads": num_heads, "num_kv_heads": groups, "head_dim": head_dim, "embed_dim": width}
    point = Workload(scope="module", bias=bias, **sizes)
    weights = draw_weights(point).map(lambda tensor: tensor.requires_grad_())
    state = layout.pack(weights)
    kept = replace(weights, out=None, out_bias=None) if layout is BY_HEAD else weights
    given_numbers = torch.cat([tensor.flatten() for tensor in kept.tensors().values()])
    packed_numbers = torch.cat([tensor.flatten() for tensor in state.values()])
    assert torch.equal(given_numbers.sort().values, packed_numbers.sort().values)
    torch.autograd.backward([tensor.sum() for tensor in state.values()])
    assert all((tensor.grad == 1).all() for tensor in kept.tensors().values())


@pytest.mark.parametrize("bias", BIASES)
def test_weights_are_the_same_whatever_the_biases(bias):
    weights = draw_weights(POINT.with_axes({"bias": bias})).tensors()
    everything = draw_weights(POINT.with_axes({"bias": "all"})).tensors()
    assert all(torch.equal(tensor, everything[name]) for name, tensor in weights.items())
