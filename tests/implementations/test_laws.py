"""Laws that every implementation in the folder obeys, against a formula written down here once more, in float64."""

import ast
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, Weights, Workload
from attnbench.plugins import plugs

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
MASKS = (
    "none",
    "causal",
    "causal_bottom_right",
    "sliding_window(3)",
    "padding",
    "padding(4,0)",
    "prefix(2)",
    "document",
)
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def workload(mask: str, lengths: tuple[int, int] = (7, 7), heads: tuple[int, int] = (4, 4), **axes: object) -> Workload:
    sizes = {"seq_len": lengths[0], "kv_len": lengths[1], "num_heads": heads[0], "num_kv_heads": heads[1]}
    return Workload(**({"batch_size": 2, "head_dim": 3, "dtype": "float64", "mask": mask} | sizes | axes))


def fits(mask: str, lengths: tuple[int, int]) -> bool:
    try:
        workload(mask, lengths)
    except ValueError:
        return False
    return True


SMALL = [
    workload(mask, lengths) for mask, lengths in product(MASKS, ((7, 7), (5, 9), (6, 4), (1, 1))) if fits(mask, lengths)
]
GROUPED = [
    workload(mask, (5, 6), heads, value_dim=value_dim)
    for mask, heads, value_dim in product(("none", "causal", "padding"), ((4, 2), (3, 1), (2, 2)), (3, 5))
]
LONG = [
    workload(mask, lengths, (2, 2), batch_size=1, head_dim=8)  # longer than the tiles of those that work by tiles
    for mask, lengths in product(("none", "causal", "sliding_window(270)", "padding(513)"), ((300, 600), (520, 520)))
    if not (mask.startswith("padding") and lengths[1] < 513)
] + [workload("document(260,260)", (520, 520), (2, 2), batch_size=1)]
WORKLOADS = SMALL + GROUPED + LONG


HERE = [
    name
    for name, each in IMPLEMENTATIONS.items()
    if not each.compiles and each.unsupported(workload("causal", (4, 4), scope="module")) is None
]
"""Those that run on any machine; the others are tried in test_compiled and test_optional."""


def pairs(workloads: list[Workload], scope: str) -> list[object]:
    """Every implementation with every workload that it supports in that scope."""
    asked = [Workload(**(point.axes() | {"scope": scope})) for point in workloads]
    return [
        pytest.param(name, point, id=f"{name}-{point.id}")
        for name, point in product(IMPLEMENTATIONS, asked)
        if IMPLEMENTATIONS[name].unsupported(point) is None
    ]


@dataclass
class Draw:
    """Numbers for one workload, in float64."""

    query: Tensor  # (B,H,T,K)
    key: Tensor  # (B,G,S,K)
    value: Tensor  # (B,G,S,V)
    x: Tensor  # (B,T,D)
    context: Tensor  # (B,S,D)
    weights: Weights
    mask: BoundMask


def draw(point: Workload, *, seed: int = 0, has_bias: bool = True, has_out: bool = True) -> Draw:
    generator = torch.Generator().manual_seed(seed)
    batch, heads, groups, width = point.batch_size, point.num_heads, point.num_kv_heads, point.embed_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rows = {"query": (heads, point.head_dim), "key": (groups, point.head_dim), "value": (groups, point.value_dim)}
    named = {name: normal(*size, width) / width**0.5 for name, size in rows.items()}
    named |= {f"{name}_bias": normal(*size) for name, size in rows.items()} if has_bias else {}
    named |= {"out": normal(width, heads * point.value_dim), "out_bias": normal(width)} if has_out else {}
    return Draw(
        query=normal(batch, heads, point.seq_len, point.head_dim),
        key=normal(batch, groups, point.kv_len, point.head_dim),
        value=normal(batch, groups, point.kv_len, point.value_dim),
        x=normal(batch, point.seq_len, width),
        context=normal(batch, point.kv_len, width),
        weights=Weights(**named),
        mask=BoundMask(point.mask_rule, (batch, point.seq_len, point.kv_len), "cpu"),
    )


def formula(query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
    """softmax(query @ key / sqrt(K)) @ value with the softmax spelled out."""
    group = torch.arange(query.shape[1]) // (query.shape[1] // key.shape[1])  # the key/value head of each query head
    scores = torch.einsum("bhtk,bhsk->bhts", query, key[:, group]) / query.shape[-1] ** 0.5
    seen = torch.from_numpy(mask.rule.dense(*mask.sizes).copy())[:, None]  # (B,T,S) -> (B,1,T,S)
    powers = scores.exp() * seen
    total = powers.sum(-1, keepdim=True)
    weights = powers / total.where(total > 0, 1.0)  # a query that sees no key takes nothing
    return torch.einsum("bhts,bhsv->bhtv", weights, value[:, group])


def module_formula(x: Tensor, context: Tensor, weights: Weights, mask: BoundMask) -> Tensor:
    sources = {"query": x, "key": context, "value": context}
    heads = {name: torch.einsum("btd,hkd->bhtk", source, getattr(weights, name)) for name, source in sources.items()}
    if weights.has_bias:
        heads = {name: head + getattr(weights, f"{name}_bias")[:, None] for name, head in heads.items()}
    merged = formula(**heads, mask=mask).transpose(1, 2).flatten(2)  # (B,H,T,V) -> (B,T,H*V)
    if weights.out is None:
        return merged
    return merged @ weights.out.T + (0.0 if weights.out_bias is None else weights.out_bias)


def built(name: str, weights: Weights) -> nn.Module:
    return IMPLEMENTATIONS[name].build(weights).eval()


@pytest.mark.parametrize(("name", "point"), pairs(WORKLOADS, "attention"))
def test_attention_agrees_with_the_formula(name: str, point: Workload) -> None:
    d = draw(point)
    output = built(name, d.weights).attend(d.query, d.key, d.value, d.mask)
    torch.testing.assert_close(output, formula(d.query, d.key, d.value, d.mask), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "point"), pairs(WORKLOADS, "module"))
def test_module_agrees_with_the_formula(name: str, point: Workload) -> None:
    d = draw(point)
    module = built(name, d.weights)
    across = module(d.x, d.context, mask=d.mask)
    torch.testing.assert_close(across, module_formula(d.x, d.context, d.weights, d.mask), rtol=0, atol=1e-11)
    if point.seq_len == point.kv_len:
        alone = module_formula(d.x, d.x, d.weights, d.mask)
        torch.testing.assert_close(module(d.x, mask=d.mask), alone, rtol=0, atol=1e-11)
        without = Workload(**(point.axes() | {"direction": "inference"}))
        if IMPLEMENTATIONS[name].unsupported(without) is None:
            with torch.no_grad():  # nn.MultiheadAttention takes another path without gradients
                torch.testing.assert_close(module(d.x, mask=d.mask), alone, rtol=0, atol=1e-11)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("has_out", [False, True])
@pytest.mark.parametrize("name", HERE)
def test_biases_and_output_projection_may_be_absent(name: str, *, has_bias: bool, has_out: bool) -> None:
    d = draw(workload("causal"), has_bias=has_bias, has_out=has_out)
    if name.startswith("torch_mha") and not has_out:
        with pytest.raises(ValueError, match=r"output projection|names no out_proj"):
            built(name, d.weights)
        return
    output = built(name, d.weights)(d.x, mask=d.mask)
    torch.testing.assert_close(output, module_formula(d.x, d.x, d.weights, d.mask), rtol=0, atol=1e-11)


EMPTY = [workload("padding(4,0)"), workload("causal_bottom_right", (6, 4)), workload("sliding_window(2)", (9, 4))]
TRAINED = [SMALL[0], workload("causal", (5, 9)), workload("padding", (6, 4)), *EMPTY, *GROUPED[:4], *LONG[:3]]


@pytest.mark.parametrize(("name", "point"), pairs(TRAINED, "attention"))
def test_gradients_of_the_inputs(name: str, point: Workload) -> None:
    d = draw(point)
    inputs = [tensor.requires_grad_() for tensor in (d.query, d.key, d.value)]
    weight = torch.randn(*d.query.shape[:-1], point.value_dim, generator=torch.Generator().manual_seed(1)).double()
    found = torch.autograd.grad((built(name, d.weights).attend(*inputs, d.mask) * weight).sum(), inputs)
    expected = torch.autograd.grad((formula(*inputs, d.mask) * weight).sum(), inputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(("name", "point"), pairs(TRAINED, "module"))
def test_gradients_of_the_canonical_weights(name: str, point: Workload) -> None:
    d = draw(point)
    weights = d.weights.map(Tensor.requires_grad_)
    module = built(name, d.weights.map(Tensor.detach))
    direction = torch.randn(d.x.shape, generator=torch.Generator().manual_seed(1)).double()
    parameters = dict(module.named_parameters())
    inputs = [d.x.requires_grad_(), d.context.requires_grad_()]
    total = (module(*inputs, mask=d.mask) * direction).sum()
    (*found_inputs,) = torch.autograd.grad(total, [*inputs, *parameters.values()])
    packed = module.pack(weights) | module.pack_out(weights)
    assert set(packed) == set(parameters)
    gradients = dict(zip(parameters, found_inputs[2:], strict=True))
    canonical = list(weights.tensors().values())
    found = torch.autograd.grad(list(packed.values()), canonical, [gradients[key] for key in packed])
    expected = torch.autograd.grad((module_formula(*inputs, weights, d.mask) * direction).sum(), [*inputs, *canonical])
    torch.testing.assert_close([*found_inputs[:2], *found], list(expected), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("name", "point"), pairs([workload("causal"), GROUPED[0]], "attention"))
def test_heads_are_not_mixed(name: str, point: Workload) -> None:
    d = draw(point)
    module = built(name, d.weights)
    before = module.attend(d.query, d.key, d.value, d.mask)
    group_size = point.num_heads // point.num_kv_heads
    for head in range(point.num_heads):
        query, value = d.query.clone(), d.value.clone()
        query[:, head] += 1.0
        value[:, head // group_size] += 1.0
        changed = (module.attend(query, d.key, d.value, d.mask) != before).flatten(2).any(-1).any(0)
        assert changed.nonzero().flatten().tolist() == [head]
        changed = (module.attend(d.query, d.key, value, d.mask) != before).flatten(2).any(-1).any(0)
        first = head - head % group_size
        assert changed.nonzero().flatten().tolist() == list(range(first, first + group_size))


@pytest.mark.parametrize(("name", "point"), pairs([workload("none"), workload("causal")], "module"))
def test_the_same_seed_gives_the_same_bits_and_leaves_inputs_alone(name: str, point: Workload) -> None:
    first, second = draw(point), draw(point)
    outputs = [built(name, d.weights)(d.x, d.context, mask=d.mask) for d in (first, second)]
    assert torch.equal(*outputs)
    assert outputs[0].data_ptr() != outputs[1].data_ptr()
    assert torch.equal(first.x, draw(point).x)
    assert torch.equal(first.context, draw(point).context)


@st.composite
def points(draw_from: st.DrawFn) -> Workload:
    groups = draw_from(st.integers(1, 3))
    lengths = (draw_from(st.integers(1, 40)), draw_from(st.integers(1, 40)))
    mask = draw_from(st.sampled_from([mask for mask in MASKS if fits(mask, lengths)]))
    return workload(
        mask,
        lengths,
        (groups * draw_from(st.integers(1, 3)), groups),
        head_dim=draw_from(st.sampled_from([1, 2, 7, 16])),
        value_dim=draw_from(st.sampled_from([0, 5])),
        dtype=draw_from(st.sampled_from(list(DTYPES))),
    )


@settings(deadline=None, max_examples=30, derandomize=True, database=None)
@given(point=points(), seed=st.integers(0, 1000))
def test_every_shape_mask_and_dtype(point: Workload, seed: int) -> None:
    d = draw(point, seed=seed)
    dtype = DTYPES[point.dtype]
    inputs = [tensor.to(dtype) for tensor in (d.query, d.key, d.value)]
    expected = formula(*[tensor.double() for tensor in inputs], d.mask)
    allowed = 8 * torch.finfo(dtype).eps * float(d.value.abs().max())
    for name, implementation in IMPLEMENTATIONS.items():
        if implementation.unsupported(point) is None and not implementation.compiles:  # for these: test_compiled
            output = built(name, d.weights.map(lambda tensor: tensor.to(dtype))).attend(*inputs, d.mask)
            assert output.dtype is dtype, name
            assert output.shape == expected.shape, name
            assert (output.double() - expected).abs().max() <= allowed, name


def imports(nodes: Iterable[ast.AST]) -> set[str]:
    """What is imported other than torch and the standard library."""
    kept = list(nodes)
    found = {alias.name for node in kept if isinstance(node, ast.Import) for alias in node.names}
    found |= {"." * node.level + (node.module or "") for node in kept if isinstance(node, ast.ImportFrom)}
    return {module for module in found if module.split(".")[0] not in {"torch", *sys.stdlib_module_names}}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_an_implementation_imports_torch_the_standard_library_and_the_contract_only(name: str) -> None:
    spec = importlib.util.find_spec(f"implementations.{name}")
    assert spec is not None
    text = Path(str(spec.origin)).read_text(encoding="utf-8")
    tree = ast.parse(text)
    at_import = imports(tree.body)
    assert (
        "attnbench.contract"
        in at_import
        <= {"attnbench.contract", "attnbench.contract.adapters", "attnbench.contract.dispatch", "attnbench.ranks"}
    )
    for module in imports(ast.walk(tree)) - at_import:  # inside `build`, of a package that may be missing
        assert f'missing_package("{module.split(".")[0]}' in text
