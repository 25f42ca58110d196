"""Adapters: a right module passes in every layout, the same in a wrong one is found, and no error is a riddle."""

import re
from itertools import permutations

import pytest
import torch
from torch import Tensor, nn

from attnbench.checking.agreement import ask_oracle, check
from attnbench.checking.case import draw_weights, reason_against
from attnbench.contract import loading, repeat_heads
from attnbench.contract.adapters import Layout, adapt, head_list, packed, per_head, split, stacked, transposed
from attnbench.workloads.workload import BIASES, Workload

ORDERS = ["".join(order) for order in permutations("qkv")]
POINT = Workload(
    batch_size=2, seq_len=9, num_heads=3, head_dim=4, mask="causal", scope="module", direction="forward_backward"
)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """(B,T,H,K), (B,S,G,K), (B,S,G,K) -> (B,T,H*K)."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(2)


class Packed(nn.Module):
    """One layer; `order` says in which order `forward` takes it apart, `together` whether each head's rows are one."""

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
    """Three layers, grouped heads, cross-attention, and an output beside which stands something else."""

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


class Heads(nn.Module):
    """A list of heads without an output projection."""

    def __init__(self, sizes):
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(sizes.embed_dim, sizes.head_dim) for name in "abc"})
            for _ in range(sizes.num_heads)
        )

    def forward(self, x, mask=None):
        return torch.cat([attend(*(head[name](x)[:, :, None] for name in "abc"), mask) for head in self.heads], dim=-1)


class Conv1D(nn.Module):
    """x @ weight, with weight (D, rows)."""

    def __init__(self, width, rows):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(width, rows)), nn.Parameter(torch.empty(rows))

    def forward(self, x):
        return x @ self.weight + self.bias


class Transposed(Packed):
    """As in GPT-2."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.qkv = Conv1D(sizes.embed_dim, 3 * sizes.embed_dim)
        self.proj = Conv1D(sizes.embed_dim, sizes.embed_dim)


def alone(module, x, context, mask):
    return module(x, mask=mask.visible)


def across(module, x, context, mask):
    return module(x, context, mask=mask.visible)


SPLIT = split("q_proj", "k_proj", "v_proj", out="o_proj")
HEADS = head_list("heads.{head}", query="a", key="b", value="c", out=None)
RIGHT = {
    **{
        f"packed {each}": adapt(lambda s, o=each: Packed(s, o), packed("qkv", each, out="proj"), call=alone)
        for each in ORDERS
    },
    **{
        f"per head {each}": adapt(
            lambda s, o=each: Packed(s, o, together=True), per_head("qkv", each, out="proj"), call=alone
        )
        for each in ORDERS
    },
    "split": adapt(Split, SPLIT, call=across),
    "heads": adapt(Heads, HEADS, call=alone),
    "transposed": adapt(Transposed, transposed(packed("qkv", out="proj")), call=alone),
    "torch": adapt(
        lambda s: nn.MultiheadAttention(s.embed_dim, s.num_heads, batch_first=True),
        packed("in_proj_{}", out="out_proj"),
        call=lambda module, x, context, mask: module(x, x, x, attn_mask=mask.hidden[0, 0]),
        masks=["causal"],
    ),
}
WRONG = {
    **{
        f"{order} taken for qkv": adapt(lambda s, o=order: Packed(s, o), packed("qkv", out="proj"), call=alone)
        for order in ORDERS[1:]
    },
    "per head taken for packed": adapt(lambda s: Packed(s, together=True), packed("qkv", out="proj"), call=alone),
    "packed taken for per head": adapt(Packed, per_head("qkv", out="proj"), call=alone),
    "query and key confused": adapt(Split, split("k_proj", "q_proj", "v_proj", out="o_proj"), call=across),
    "key and value confused": adapt(
        Heads, head_list("heads.{head}", query="a", key="c", value="b", out=None), call=alone
    ),
    "a mask that stays behind": adapt(Packed, packed("qkv", out="proj"), call=lambda m, x, context, mask: m(x)),
}


def judge(found, point):
    assert reason_against(found, point) is None
    return check(ask_oracle(point, 0), found)


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_module_agrees_with_its_gradients(name):
    agreement = judge(RIGHT[name], POINT)
    assert agreement.agrees, agreement.diagnosis
    assert {"gradient of query weights", "gradient of out_bias weights"} <= {t.tensor for _, t in agreement.tensors()}


@pytest.mark.parametrize("name", WRONG)
def test_a_planted_mistake_is_found(name):
    assert not judge(WRONG[name], POINT).agrees


@pytest.mark.parametrize("order", ORDERS)
def test_groups_and_contexts_take_part_where_they_are_listed(order):
    point = Workload(
        seq_len=5, kv_len=8, num_heads=4, num_kv_heads=2, head_dim=4, scope="module", direction="forward_backward"
    )
    assert "kv_len must be seq_len" in str(reason_against(RIGHT["split"], point))
    listed = adapt(Split, SPLIT, call=across, axes=["kv_len", "num_kv_heads"])
    assert judge(listed, point).agrees

    class ByGroup(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.qkv, self.proj = nn.Linear(16, 2 * (2 + 1 + 1) * 4), nn.Linear(16, 16)

        def forward(self, x):
            parts = self.qkv(x).unflatten(-1, (2, -1)).split([8 if letter == "q" else 4 for letter in order], dim=-1)
            named = dict(zip(order, parts, strict=True))
            query = named["q"].unflatten(-1, (2, -1)).flatten(2, 3)  # (B,T,G,2*K) -> (B,T,H,K)
            return self.proj(attend(query, named["k"], named["v"], None))

    grouped = adapt(ByGroup, per_head("qkv", order, out="proj"), axes=["num_kv_heads"])
    assert judge(grouped, Workload(**(point.axes() | {"kv_len": 5}))).agrees


@pytest.mark.parametrize("bias", BIASES)
def test_biases_are_asked_for_and_found_out(bias):
    point = Workload(**(POINT.axes() | {"bias": bias}))
    assert judge(RIGHT["packed qkv"], point).agrees
    reason = reason_against(RIGHT["split"], point)
    assert (reason is None) == (bias == "all")
    assert bias == "all" or reason == f"the module has the biases of bias=all, not of bias={bias}"
    without = reason_against(adapt(lambda s: Split(s, bias=False), SPLIT, call=across), point)
    assert without == (None if bias == "none" else f"the module has the biases of bias=none, not of bias={bias}")
    assert (reason_against(RIGHT["heads"], point) is None) == (bias in {"all", "qkv"})


def test_a_bias_that_no_axis_has_is_reported():
    class KeyWithout(Split):
        def __init__(self, sizes):
            super().__init__(sizes)
            self.k_proj = nn.Linear(sizes.embed_dim, sizes.embed_dim, bias=False)

    assert "no k_proj.bias but other biases" in str(reason_against(adapt(KeyWithout, SPLIT, call=across), POINT))
    rest = Layout(pack=lambda weights: {n: t for n, t in SPLIT.pack(weights).items() if n != "k_proj.bias"})
    assert judge(adapt(KeyWithout, rest, call=across), POINT).agrees  # softmax does not see the bias of the keys
    for direction in ("forward_backward", "inference"):
        none = Layout(pack=lambda weights: SPLIT.pack(weights.biased("none")))
        point = Workload(**(POINT.axes() | {"direction": direction}))
        reason = reason_against(adapt(lambda s: Split(s, bias=False), none, call=across), point)
        assert reason == "the layout has no place for query_bias, value_bias, out_bias, which bias=all asks for"


def test_what_an_adapter_cannot_is_reported_with_its_reason():
    unmasked = adapt(Packed, packed("qkv", out="proj"))
    assert "passes on no mask causal, but none" in str(reason_against(unmasked, POINT))
    assert "choose scope=module" in str(reason_against(unmasked, Workload()))
    for axes in ({"value_dim": 6}, {"embed_dim": 20}, {"num_kv_heads": 1}):
        reason = reason_against(RIGHT["split"], Workload(**(POINT.axes() | axes)))
        assert next(iter(axes)) in str(reason)
    own = adapt(Packed, packed("qkv", out="proj"), unsupported=lambda workload: "not on Sundays")
    assert reason_against(own, Workload(scope="module")) == "not on Sundays"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (packed("in_proj", out="proj"), "there is no parameter in_proj.weight"),
        (packed("qkv", out="prj"), "there is no parameter prj.weight (did you mean proj.weight?)"),
        (
            stacked({"qkv": "q", "proj": "kv"}, out=None),
            "qkv.weight is (36, 12) in the module, the layout makes (12, 12)",
        ),
        (packed("qkv", out=None), "names no proj.weight"),
    ],
)
def test_a_layout_that_does_not_fit_is_reported_on_one_line(layout, said):
    found = adapt(Packed, layout)
    point = Workload(**(POINT.axes() | {"mask": "none"}))
    assert reason_against(found, point) is None
    with pytest.raises(ValueError, match=re.escape(said)) as raised:
        found.build(draw_weights(point))
    assert "\n" not in str(raised.value)


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="did you mean kv_len"):
        adapt(Packed, packed("qkv", out="proj"), axes=["kv_length"])
    with pytest.raises(ValueError, match="no call"):
        adapt(Packed, packed("qkv", out="proj"), masks=["causal"])


def test_a_value_in_a_file_takes_part_and_a_bare_module_is_reported_of_adapters(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\nfrom attnbench.contract.adapters import adapt, packed\n"
        "mine = adapt(lambda sizes: nn.Identity(), packed('qkv', out='proj'))\nclass Bare(nn.Module): ...\n"
    )
    assert loading.implementation(f"{file}:mine").source == f"{file}:mine"
    with pytest.raises(ValueError, match=re.escape("attnbench.contract.adapters (docs/adapters.md)")):
        loading.implementation(f"{file}:Bare")


def test_an_adapter_takes_masks_that_change_scores_only_where_it_lists_them():
    def adapted(masks):
        return adapt(Split, SPLIT, call=across, masks=masks)

    point = Workload(scope="module", mask="causal+alibi")
    assert "list causal+alibi among its masks" in str(adapted(None).unsupported(point))
    assert "passes on no mask causal+alibi, but none, causal" in str(adapted(["none", "causal"]).unsupported(point))
    assert adapted(["causal+alibi"]).unsupported(point) is None
    assert adapt(Split, SPLIT, call=across, changes_scores=True).unsupported(point) is None
    assert adapted(None).unsupported(Workload(scope="module", mask="causal+boolean(30)")) is None
