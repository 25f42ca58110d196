"""Each mask in each implementation that takes it, forward and backward, against a formula written down once more."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from attnbench.checking.case import bind
from attnbench.contract import Attention, BoundMask, Implementation, Weights, Workload
from attnbench.plugins import plugs
from attnbench.workloads.masks import parse_mask
from tests.mask_texts import fits, not_among

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
GIVEN = [
    "none",
    "causal",
    "causal_bottom_right",
    "sliding_window(3)",
    "sliding_window_bottom_right(3)",
    "padding",
    "padding_to_nothing",
    "prefix(2)",
    "document",
    "boolean(40)",
    "additive",
    "alibi",
    "alibi_bottom_right",
    "softcap(2)",
    "causal+padding",  # a batch of sentences in a decoder
    "causal+document",  # sentences packed into one row
    "causal+alibi",  # ALiBi's own
    "sliding_window_bottom_right(3)+softcap(2)",  # Gemma 2
    "padding_to_nothing+softcap(2)+additive",
    "boolean(40)+alibi_bottom_right+softcap(3)",
    "window(1,2)",
    "causal+chunks(3)",  # Llama 4
    "causal_bottom_right+chunks_bottom_right(3)",
    "streaming(2,1)",
    "streaming_bottom_right(2,1)",
    "tree(2)",
    "tree_of(0,1,2,1,4)",
    "ragged",
    "relative_buckets(8,9)",  # the encoder of T5
    "causal+relative_buckets_past(4,5)",  # its decoder
    "decomposed",  # SAM
    "padding+decomposed+additive",
]
MASKS = [*GIVEN, *not_among(GIVEN)]
TEXTBOOK = {"bmm", "chunked", "einsum", "fused", "module_list", "naive_loop"}
BY_BIAS = {"sdpa", "sdpa_flash", "sdpa_math", "torch_mha"}
SHAPES: dict[str, dict[str, int]] = {
    "square": {},
    "grouped": {"num_heads": 6, "num_kv_heads": 2, "value_dim": 5},  # 6 heads: slopes of two rows
    "decode": {"seq_len": 1, "kv_len": 7},
    "chunked prefill": {"seq_len": 3, "kv_len": 8, "num_kv_heads": 1},
    "more queries": {"seq_len": 6, "kv_len": 4, "value_dim": 2},
    "several tiles": {"batch_size": 2, "seq_len": 258, "kv_len": 514, "num_heads": 2, "head_dim": 2},
}
GROUPED = {"batch_size": 2, "seq_len": 5, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, "dtype": "float64"}
SINKS = {"sinks": "learned"}
SCALE = {"scale": 0.3}
SEVERAL_TILES = {
    "causal+chunks(3)",
    "streaming(2,1)",
    "causal+alibi",
    "sliding_window_bottom_right(3)+softcap(2)",
    "boolean(40)+alibi_bottom_right+softcap(3)",
}


def points() -> list[Workload]:
    made = []
    for mask, (name, shape) in product(MASKS, SHAPES.items()):
        sizes = {"batch_size": 2, "seq_len": 5, "num_heads": 4, "head_dim": 3, "dtype": "float64"} | shape
        batch, queries = int(sizes["batch_size"]), int(sizes["seq_len"])  # type: ignore[call-overload]
        sized = (batch, queries, int(sizes.get("kv_len", queries)))  # type: ignore[call-overload]
        if fits(mask, sized) and (name != "several tiles" or mask in SEVERAL_TILES):
            made.append(Workload(mask=mask, **sizes))  # type: ignore[arg-type] # names and whole numbers
    assert {point.mask for point in made} == {str(parse_mask(mask)) for mask in MASKS}
    for mask, axes in product(
        ("none", "causal+padding", "padding_to_nothing", "additive"), (SINKS, SCALE, SINKS | SCALE)
    ):
        made.append(Workload(mask=mask, **(GROUPED | axes)))  # type: ignore[arg-type]
    return made


def has_forward_of_its_own(name: str) -> bool:
    """Where it has not, scope `module` is the projections, which have their own laws, and `attend`."""
    return getattr(IMPLEMENTATIONS[name].build, "forward", None) is not Attention.forward


def supported(scope: str) -> list[object]:
    asked = [Workload(**(point.axes() | {"scope": scope})) for point in points()]
    return [
        pytest.param(name, point, id=f"{name}-{point.id}")
        for name, point in product(IMPLEMENTATIONS, asked)
        if (scope == "attention" or has_forward_of_its_own(name))
        and not (name == "naive_loop" and point.seq_len > 100)
        and IMPLEMENTATIONS[name].unsupported(point) is None
    ]


def slopes(num_heads: int) -> Tensor:
    """ALiBi's, as its authors' program has them: a geometric row, and every other one of the next to fill up."""
    if num_heads & (num_heads - 1) == 0:
        start = 2.0 ** (-8 / num_heads)
        return torch.tensor([start ** (head + 1) for head in range(num_heads)], dtype=torch.float64)
    whole = 1 << (num_heads.bit_length() - 1)
    return torch.cat([slopes(whole), slopes(2 * whole)[0::2][: num_heads - whole]])


def bucket(ahead: int, buckets: int, farthest: int, *, is_two_sided: bool) -> int:
    """The bucket of a distance, as the package transformers has it for T5, in words of its own."""
    start = 0
    if is_two_sided:
        buckets //= 2
        start, distance = (buckets if ahead > 0 else 0), abs(ahead)
    else:
        distance = max(0, -ahead)
    exact = buckets // 2
    if distance < exact:
        return start + distance
    power = math.log(distance / exact) / math.log(farthest / exact)
    return start + min(buckets - 1, exact + int(power * (buckets - exact) + 1e-9))


def learned(part: str, point: Workload, inputs: dict[str, Tensor]) -> Tensor:
    """What a learned bias adds (..., H, T, S), place by place."""
    query_len, key_len = point.seq_len, point.kv_len
    if part == "decomposed":
        columns = max(each for each in range(1, key_len + 1) if key_len % each == 0 and each**2 <= key_len)
        added = [
            inputs["row_bias"][..., j // columns] + inputs["column_bias"][..., j % columns] for j in range(key_len)
        ]
        return torch.stack(added, dim=-1)
    is_two_sided = not part.startswith("relative_buckets_past")
    offset = 0 if is_two_sided else key_len - query_len
    sizes = (8, 9) if is_two_sided else (4, 5)
    (table,) = (each for name, each in inputs.items() if name.startswith("relative_bias"))
    places = [
        [bucket(j - i - offset, *sizes, is_two_sided=is_two_sided) for j in range(key_len)] for i in range(query_len)
    ]
    return table[:, torch.tensor(places)]


def changed(scores: Tensor, point: Workload, inputs: dict[str, Tensor]) -> Tensor:
    """What the mask's text says about scores (B, H, T, S), part by part; a mask without words here says so itself."""
    query, key = torch.arange(point.seq_len)[:, None], torch.arange(point.kv_len)
    slope = slopes(point.num_heads)[:, None, None]
    for part in point.mask.split("+"):
        if part == "alibi":
            scores = scores - slope * (query - key).abs()
        elif part == "alibi_bottom_right":
            scores = scores - slope * (query + point.kv_len - point.seq_len - key).abs()
        elif part.startswith("softcap"):
            limit = float(part.removeprefix("softcap(").removesuffix(")"))
            scores = limit * torch.tanh(scores / limit)
        elif parse_mask(part).is_learned:
            scores = scores + learned(part, point, inputs)
        elif (mask := parse_mask(part)).changes_scores:  # additive, which is drawn: its own tests say how
            head = torch.from_numpy(mask.per_head(point.num_heads))[:, None, None]
            offset = point.kv_len - point.seq_len
            scores = scores + mask.bias(head, query, key, offset) if mask.is_additive else mask.transform(scores)
    return scores


def formula(query: Tensor, key: Tensor, value: Tensor, point: Workload, inputs: dict[str, Tensor]) -> Tensor:
    group = torch.arange(point.num_heads) // (point.num_heads // point.num_kv_heads)
    scores = changed(torch.einsum("bhtk,bhsk->bhts", query, key[:, group]) * point.score_scale, point, inputs)
    seen = torch.from_numpy(point.mask_rule.dense(point.batch_size, point.seq_len, point.kv_len).copy())[:, None]
    powers = scores.exp() * seen
    total = powers.sum(-1, keepdim=True)
    if "sinks" in inputs:
        total = total + inputs["sinks"].exp()[:, None, None]
    return torch.einsum("bhts,bhsv->bhtv", powers / total.where(total > 0, 1.0), value[:, group])


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def weights_of(point: Workload) -> Weights:
    width = point.embed_dim
    return Weights(
        query=normal(point.num_heads, point.head_dim, width, seed=1).detach(),
        key=normal(point.num_kv_heads, point.head_dim, width, seed=2).detach(),
        value=normal(point.num_kv_heads, point.value_dim, width, seed=3).detach(),
        out=normal(width, point.num_heads * point.value_dim, seed=4).detach(),
    )


def with_operands(point: Workload) -> tuple[BoundMask, dict[str, Tensor]]:
    """The mask with drawn operands: sinks, and what learned biases are looked up in."""
    drawn = {name: normal(*shape, seed=10 + place) for place, (name, shape) in enumerate(point.operands.items())}
    bound = bind(point)
    bound.inputs = drawn
    return bound, drawn


def assert_same(found: Tensor, expected: Tensor, inputs: list[Tensor]) -> None:
    """Output and gradients."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    direction = normal(*expected.shape, seed=7).detach()
    gradients = [torch.autograd.grad(made, inputs, direction, materialize_grads=True) for made in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "point"), supported("attention"))
def test_attention_under_every_mask_is_the_formula(name: str, point: Workload) -> None:
    batch, heads, groups = point.batch_size, point.num_heads, point.num_kv_heads
    query = normal(batch, heads, point.seq_len, point.head_dim, seed=4)
    key = normal(batch, groups, point.kv_len, point.head_dim, seed=5)
    value = normal(batch, groups, point.kv_len, point.value_dim, seed=6)
    bound, operands = with_operands(point)
    found = IMPLEMENTATIONS[name].build(weights_of(point)).eval().attend(query, key, value, bound)
    expected = formula(query, key, value, point, operands)
    assert_same(found, expected, [query, key, value, *operands.values()])


@pytest.mark.parametrize(("name", "point"), supported("module"))
def test_modules_under_every_mask_are_the_formula(name: str, point: Workload) -> None:
    weights = weights_of(point)
    x = normal(point.batch_size, point.seq_len, point.embed_dim, seed=8)
    context = normal(point.batch_size, point.kv_len, point.embed_dim, seed=9)
    bound, operands = with_operands(point)
    found = IMPLEMENTATIONS[name].build(weights).eval()(x, context, mask=bound)
    projected = [
        torch.einsum("btd,hkd->bhtk", tokens, weight)
        for tokens, weight in ((x, weights.query), (context, weights.key), (context, weights.value))
    ]
    assert weights.out is not None
    expected = formula(*projected, point, operands).transpose(1, 2).flatten(2) @ weights.out.T
    assert_same(found, expected, [x, context, *operands.values()])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_mask_is_refused_with_its_reason_and_by_the_textbook_forms_never(name: str) -> None:
    implementation = IMPLEMENTATIONS[name]
    scope = "module" if implementation.unsupported(Workload(scope="attention")) else "attention"
    asked = [mask for mask in MASKS if fits(mask, (2, 512, 512))]
    reported = {mask: implementation.unsupported(Workload(mask=mask, scope=scope, batch_size=2)) for mask in asked}
    refused = {mask: reason for mask, reason in reported.items() if reason is not None}
    assert all(" " in reason for reason in refused.values())
    learned = {mask for mask in asked if parse_mask(mask).is_learned}
    capped = {mask for mask in asked if "softcap" in mask}
    if name in TEXTBOOK:
        assert set(refused) == (learned if name == "chunked" else set())
    if name in BY_BIAS:
        assert set(refused) == (capped | learned if name == "sdpa_flash" else capped)
        assert all(refused[mask].endswith("has no softcap") for mask in capped)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["causal+alibi", "additive", "softcap(2)", "softcap(2)+alibi_bottom_right"])
def test_the_output_has_the_dtype_of_the_inputs(mask: str, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for scope, (name, implementation) in product(("attention", "module"), IMPLEMENTATIONS.items()):
        point = Workload(seq_len=4, kv_len=6, num_heads=2, head_dim=4, mask=mask, dtype=dtype, scope=scope)
        if implementation.unsupported(point) is not None:
            continue
        module = implementation.build(weights_of(point).map(lambda tensor: tensor.to(kind))).eval()
        sizes = [(1, 2, length, 4) if scope == "attention" else (1, length, 8) for length in (4, 6)]
        query, key = (normal(*size, seed=1).detach().to(kind) for size in sizes)
        bound = bind(point)
        made = module(query, key, mask=bound) if scope == "module" else module.attend(query, key, key, bound)
        assert made.dtype is kind, name
