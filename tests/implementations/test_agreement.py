"""Every implementation computes the formula under every mask, for every kind of shape, along every axis, by pairs."""

import random
from dataclasses import replace
from functools import partial
from itertools import combinations

import pytest
import torch
from msgspec import structs
from torch import Tensor, nn

from attnbench.case import Inputs, bind, draw_weights, laid_out, reason_against
from attnbench.checking.agreement import check
from attnbench.contract import Attention, Implementation, Workload
from attnbench.implementations import chunked
from attnbench.workloads.masks import parse_mask
from tests import reference
from tests.checks import bundled, portable, references
from tests.mask_texts import not_among

IMPLEMENTATIONS: dict[str, Implementation] = bundled()
HERE = portable()
TEXTBOOK = {"bmm", "chunked", "einsum", "fused", "module_list", "naive_loop"}
BY_BIAS = {"sdpa", "sdpa_flash", "sdpa_math", "torch_mha"}
NAMED_MASKS = [
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
    "ragged",
    "relative_buckets(8,9)",  # the encoder of T5
    "causal+relative_buckets_past(4,5)",  # its decoder
]
MASKS = [*NAMED_MASKS, *not_among(NAMED_MASKS)]
TILES = {"batch_size": 2, "seq_len": 258, "kv_len": 514, "num_heads": 2, "head_dim": 2, "dtype": "float32"}
"""Longer than two tiles of `chunked`, the only implementation here with its own tiles."""
AXES: dict[str, list[dict[str, object]]] = {
    "lengths": [
        {"seq_len": 7},
        {"seq_len": 5, "kv_len": 9},
        {"seq_len": 6, "kv_len": 4},
        {"seq_len": 1, "kv_len": 8},  # decoding
        {"seq_len": 33},
        {"seq_len": 1},
    ],
    "heads": [
        {},
        {"num_kv_heads": 2, "value_dim": 5},
        {"num_heads": 6, "num_kv_heads": 2},  # 6 heads: ALiBi uses slopes of two sequences
        {"num_kv_heads": 1, "value_dim": 2},
    ],
    "head_dim": [{"head_dim": width} for width in (3, 8, 1, 16)],
    "batch_size": [{"batch_size": size} for size in (2, 1, 3)],
    "dtype": [{"dtype": name} for name in ("float32", "bfloat16", "float16")],
    "scale": [{}, {"scale": 0.3}],
    "sinks": [{}, {"sinks": "learned"}],
    "layout": [
        {"layout": name} for name in ("contiguous", "transposed", "mixed", "expanded", "broadcast", "value_in_key")
    ],
    "bias": [{"bias": name} for name in ("all", "none", "qkv", "out")],
}
"""Values of each axis; layouts are those of scope attention, biases of module."""
USUAL = {"batch_size": 2, "seq_len": 7, "num_heads": 4, "head_dim": 3, "direction": "forward_backward"}
ATTEMPTS = 24  # random rows, of which the design gets one
Row = dict[str, int]


def workload(axes: dict[str, object]) -> Workload | None:
    """Build the workload of these axes; None if it is invalid."""
    try:
        return Workload(**(USUAL | axes))  # type: ignore[arg-type] # numbers and names
    except ValueError:
        return None


def valued(scope: str, mask: str, row: Row) -> Workload | None:
    axes: dict[str, object] = {"scope": scope, "mask": mask}
    for axis, place in row.items():
        axes |= AXES[axis][place]
    return workload(axes)


def is_taken(name: str, point: Workload | None) -> bool:
    return point is not None and IMPLEMENTATIONS[name].unsupported(point) is None


def axes_of(scope: str) -> list[str]:
    return [axis for axis in AXES if axis != ("bias" if scope == "attention" else "layout")]


def arms() -> list[tuple[str, str]]:
    attending = [
        (name, "attention") for name in HERE if IMPLEMENTATIONS[name].unsupported(Workload(mask="causal")) is None
    ]
    return attending + [(name, "module") for name in HERE]


def has_forward_of_its_own(name: str) -> bool:
    """Whether scope `module` is more than projections and `attend`."""
    return getattr(IMPLEMENTATIONS[name].build, "forward", None) is not Attention.forward


def design() -> list[tuple[str, Workload]]:
    """Build rows in which each arm meets each mask and each axis value, and masks and values meet one another."""
    draws, covered, rows = random.Random(0), set[object](), []

    def add(name: str, scope: str, masks: list[str], **fixed: int) -> None:
        """Add the row, of some at random with some values fixed, that adds most pairs."""
        options: list[tuple[Workload | None, set[object]]] = []
        for _ in range(ATTEMPTS):
            mask = draws.choice(masks)
            row = {axis: draws.randrange(len(AXES[axis])) for axis in axes_of(scope)} | fixed
            pairs = set[object](combinations([("arm", name, scope), ("mask", mask), *row.items()], 2))
            options.append((valued(scope, mask, row), pairs))
        options.sort(key=lambda option: -len(option[1] - covered))
        point, pairs = next((option for option in options if is_taken(name, option[0])), (None, set()))
        if point is not None:
            covered.update(pairs)
            rows.append((name, point))

    for name, scope in arms():
        probes = [(mask, valued(scope, mask, {"lengths": place})) for place in (0, 1, 2) for mask in MASKS]
        taken = list(dict.fromkeys(mask for mask, point in probes if is_taken(name, point)))
        for mask in taken if scope == "attention" or has_forward_of_its_own(name) else ():
            add(name, scope, [mask])
        for axis in axes_of(scope):
            for place in range(len(AXES[axis])):
                if (("arm", name, scope), (axis, place)) not in covered:
                    add(name, scope, taken, **{axis: place})
    return rows


def tiled() -> list[tuple[str, Workload]]:
    """Build rows of `chunked` under each mask on several tiles."""
    points = [workload(TILES | {"mask": mask}) for mask in MASKS]
    return [("chunked", point) for point in points if is_taken("chunked", point)]


DESIGN = design() + tiled()


def exact_dtype(name: str, point: Workload) -> tuple[torch.dtype, dict[str, float]]:
    """Return float64 with a tight tolerance if the implementation computes in it, else float32."""
    if IMPLEMENTATIONS[name].unsupported(structs.replace(point, dtype="float64")) is None:
        return torch.float64, {"rtol": 1e-9, "atol": 1e-11}
    return torch.float32, {"rtol": 1e-4, "atol": 1e-4}


class Called:
    """One implementation built with the weights of a draw, in a dtype."""

    def __init__(self, name: str, drawn: reference.Draw, dtype: torch.dtype) -> None:
        self.drawn = drawn
        self.module: nn.Module = (
            IMPLEMENTATIONS[name].build(drawn.weights.map(lambda each: each.detach().to(dtype))).eval()
        )
        self.mask = bind(structs.replace(drawn.point, dtype="float64"))
        self.mask.inputs = {name: tensor.to(dtype) for name, tensor in drawn.operands.items()}
        self.tensors = {name: tensor.to(dtype) for name, tensor in drawn.tensors.items()}

    def __call__(self) -> Tensor:
        if self.drawn.point.scope == "attention":
            return self.module.attend(*self.tensors.values(), self.mask)  # type: ignore[operator, no-any-return]
        found: Tensor = self.module(*self.tensors.values(), mask=self.mask)
        return found


SELF_ATTENTION = {"fused", "module_list"}
"""Implementations whose modules attend to their own tokens alone."""


def drawn_for(name: str, point: Workload) -> reference.Draw:
    """Draw inputs that lie in the workload's layout, with the context that the implementation has."""
    drawn = reference.draw(point)
    if point.scope == "attention":
        return replace(drawn, tensors=laid_out(Inputs(tensors=drawn.tensors, weights=drawn.weights), point).tensors)
    return replace(drawn, tensors=drawn.tensors | {"context": drawn.tensors["x"]}) if name in SELF_ATTENTION else drawn


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "point"), [pytest.param(*row, id=f"{row[0]}-{row[1].id}") for row in DESIGN])
def test_output_and_gradients_are_those_of_the_formula(name: str, point: Workload) -> None:
    drawn = drawn_for(name, point)
    dtype, near = exact_dtype(name, point)
    expected, call = drawn.expected(), Called(name, drawn, dtype)
    before = [tensor.detach().clone() for tensor in call.tensors.values()]
    found = call()
    torch.testing.assert_close(found.double(), expected, **near)
    torch.testing.assert_close(call().double(), expected, **near)  # again, with unchanged inputs
    assert all(map(torch.equal, before, call.tensors.values()))

    inputs = [*drawn.tensors.values(), *drawn.operands.values()]
    parameters = dict(call.module.named_parameters()) if point.scope == "module" else {}
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradient = partial(torch.autograd.grad, materialize_grads=True)
    right = gradient(expected, drawn.leaves, direction)
    packed_gradients = gradient(found, [*inputs, *parameters.values()], direction.to(dtype))
    back = list(packed_gradients[: len(inputs)])
    if parameters:
        packed = call.module.pack(drawn.weights)  # type: ignore[operator]
        assert set(packed) == set(parameters)
        by_name = {key: each.double() for key, each in zip(parameters, packed_gradients[len(inputs) :], strict=True)}
        canonical = list(drawn.weights.tensors().values())
        back += gradient(list(packed.values()), canonical, [by_name[each] for each in packed])
    torch.testing.assert_close(back, list(right), rtol=near["rtol"], atol=100 * near["atol"])

    without = structs.replace(point, direction="inference")
    takes_inference = IMPLEMENTATIONS[name].unsupported(without) is None
    with torch.no_grad():
        if takes_inference:  # nn.MultiheadAttention has another code path here
            torch.testing.assert_close(call().double(), expected, **near)
            if point.scope == "module" and point.seq_len == point.kv_len:
                alone = call.module(call.tensors["x"], mask=call.mask)
                tensors = {"x": drawn.tensors["x"], "context": drawn.tensors["x"]}
                expected = reference.Draw(point, tensors, drawn.operands, drawn.weights).expected()
                torch.testing.assert_close(alone.double(), expected, **near)
        assert_close_in_its_dtype(name, drawn)


def assert_close_in_its_dtype(name: str, drawn: reference.Draw) -> None:
    dtype = getattr(torch, drawn.point.dtype)

    def rounded(tensor: Tensor) -> Tensor:
        return tensor.to(dtype).double()

    found = Called(name, drawn, dtype)()
    assert found.dtype is dtype
    tensors, operands = ({key: rounded(each) for key, each in some.items()} for some in (drawn.tensors, drawn.operands))
    expected = reference.Draw(drawn.point, tensors, operands, drawn.weights.map(rounded)).expected()
    assert found.shape == expected.shape
    if not drawn.point.mask_rule.changes_scores:  # else scores, and so their roundings, are large
        largest = max(1.0, float(expected.abs().max()), *(float(each.abs().max()) for each in tensors.values()))
        assert (found.double() - expected).abs().max() <= 8 * torch.finfo(dtype).eps * largest


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("name", HERE)
def test_the_output_projection_may_be_absent(name: str, *, has_bias: bool) -> None:
    point = Workload(**(USUAL | {"scope": "module", "mask": "causal", "bias": "qkv" if has_bias else "none"}))
    drawn = drawn_for(name, point)
    weights = replace(drawn.weights, out=None)
    drawn = reference.Draw(point, drawn.tensors, drawn.operands, weights)
    if name.startswith("torch_mha"):
        with pytest.raises(ValueError, match=r"out_proj\.weight is \(12, 12\) .* not named in the layout"):
            IMPLEMENTATIONS[name].build(weights)
    else:
        dtype, near = exact_dtype(name, point)
        torch.testing.assert_close(Called(name, drawn, dtype)().double(), drawn.expected(), **near)


EXTREME = [name for name in HERE if IMPLEMENTATIONS[name].unsupported(Workload(sinks="learned", seq_len=6)) is None]


@pytest.mark.parametrize("name", EXTREME)
def test_a_sink_without_weight_changes_nothing_and_one_that_takes_all_leaves_nothing(name: str) -> None:
    drawn = reference.draw(Workload(**(USUAL | {"sinks": "learned"})))
    call = Called(name, drawn, torch.float64)
    without = reference.attention(**drawn.tensors, point=drawn.point, operands={})
    call.mask.inputs = {"sinks": torch.full((4,), -torch.inf, dtype=torch.float64)}
    torch.testing.assert_close(call(), without, rtol=0, atol=1e-12)
    call.mask.inputs = {"sinks": torch.full((4,), 1e3, dtype=torch.float64)}
    assert call().abs().max() < 1e-12


DROPOUTS = ({"dropout": 0.1}, {"dropout": 0.6}, {})
SETTINGS = ({"float32_matmul_precision": "medium"}, {"num_threads": 1})


def settled() -> list[tuple[str, Workload]]:
    """Return each arm with one setting of the process, and dropout if supported: the two scopes differ in both."""
    rows = []
    for name, scope in arms():
        first = (HERE.index(name) + (scope == "module")) % len(SETTINGS)
        usual = USUAL | {"head_dim": 8, "seq_len": 9, "scope": scope, "mask": "causal"} | SETTINGS[first]
        points = [Workload(**(usual | DROPOUTS[place])) for place in (first, 1 - first, 2)]
        rows += [(name, point) for point in points if reason_against(IMPLEMENTATIONS[name], point) is None][:1]
    return rows


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("name", "point"), [pytest.param(*row, id=f"{row[0]}-{row[1].id}") for row in settled()])
def test_the_check_passes_with_dropout_and_the_settings_of_a_process(name: str, point: Workload) -> None:
    agreement = check(references(point), IMPLEMENTATIONS[name])
    assert agreement.agrees, agreement.diagnosis


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_refusal_gives_its_reason_and_textbook_forms_refuse_no_mask(name: str) -> None:
    implementation = IMPLEMENTATIONS[name]
    scope = "module" if implementation.unsupported(Workload(scope="attention")) else "attention"
    points = {mask: workload({"mask": mask, "scope": scope}) for mask in MASKS}
    reasons = {mask: implementation.unsupported(point) for mask, point in points.items() if point is not None}
    refused = {mask: reason for mask, reason in reasons.items() if reason is not None}
    others = [valued(scope, "causal", {axis: place}) for axis in AXES for place in range(len(AXES[axis]))]
    more = [implementation.unsupported(point) for point in others if point is not None]
    assert all(" " in reason for reason in [*refused.values(), *filter(None, more)])
    learned = {mask for mask in points if parse_mask(mask).is_learned}
    capped = {mask for mask in points if "softcap" in mask}
    late = {mask for mask in capped if "additive+softcap" in mask or "alibi_bottom_right+softcap" in mask}
    if name in TEXTBOOK | BY_BIAS:
        expected = late if name == "einsum" else capped | learned if name == "sdpa_flash" else capped
        assert set(refused) == expected
        assert all("softcap" in refused[mask] for mask in expected & capped)


def usual(**axes: object) -> Workload:
    return Workload(**({"batch_size": 2, "seq_len": 6, "num_heads": 4, "head_dim": 8} | axes))


@pytest.mark.parametrize("name", HERE)
def test_what_has_no_attend_refuses_scope_attention_and_nothing_else_does(name: str) -> None:
    point = usual(mask="causal")
    module = IMPLEMENTATIONS[name].build(draw_weights(usual(scope="module")))
    assert (IMPLEMENTATIONS[name].unsupported(point) is None) == hasattr(module, "attend")
    assert IMPLEMENTATIONS[name].unsupported(usual(scope="module", mask="causal")) is None


HALF, LONGER = {"device": "cuda", "dtype": "float16"}, {"mask": "causal", "kv_len": 9}
REFUSED = {
    "sdpa_cudnn": [{}, {"device": "cuda"}, HALF | {"head_dim": 264}, HALF | {"kv_len": 1}, HALF | LONGER],
    "sdpa_efficient": [{}, {"device": "cuda", "dtype": "float64"}, {"device": "cuda", "mask": "softcap(30)"}],
    "torch_varlen": [{}, {"device": "cuda"}, HALF | {"mask": "padding"}, HALF | LONGER],
    "flex": [{}, {"direction": "inference", "dtype": "float64"}, {"device": "cuda", "head_dim": 8}],
    "sdpa_flash": [HALF | {"dtype": "float32"}, HALF | {"mask": "padding"}, HALF | LONGER, HALF | {"head_dim": 512}],
}
"""What needs CUDA or a compiler: whatever else is not refused, test_agreement tries."""


@pytest.mark.parametrize(("name", "axes"), [(name, axes) for name, refused in REFUSED.items() for axes in refused])
def test_a_refusal_gives_its_reason_in_words(name: str, axes: dict[str, object]) -> None:
    reason = IMPLEMENTATIONS[name].unsupported(usual(**axes))
    assert reason is not None
    assert " " in reason


def test_why_torch_mha_refuses_queries_that_see_no_key_in_inference() -> None:
    """If this fails, PyTorch has fixed its fast path, and the refusal can go."""
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x, hidden = torch.ones(1, 3, 4), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        without_gradients = module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    assert without_gradients.isnan().all()
    assert module(x, x, x, key_padding_mask=hidden, need_weights=False)[0].isfinite().all()
    point = usual(mask="padding(6,0)", scope="module", direction="inference", head_dim=8)
    assert "fast path" in str(IMPLEMENTATIONS["torch_mha"].unsupported(point))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_flash_takes_half_precision_on_cuda(mask: str) -> None:
    point = usual(device="cuda", dtype="bfloat16", mask=mask)
    assert IMPLEMENTATIONS["sdpa_flash"].unsupported(point) is None


LENGTH = chunked.TILE + 44
SHARE = 0.3


def kept_weights(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Recover the weights (B, H, T, S) after dropout from the output for unit vectors as values."""
    torch.manual_seed(3)
    units = torch.eye(key.shape[2], dtype=key.dtype).expand(*key.shape[:2], -1, -1)
    return chunked.attention(query, key, units, dropout=SHARE)


def test_the_backward_pass_drops_what_the_forward_pass_dropped():
    draws = torch.Generator().manual_seed(5)
    query, key, value = torch.randn(3, 2, 3, LENGTH, 4, generator=draws, dtype=torch.float64).requires_grad_().unbind()
    dropped = kept_weights(query.detach(), key.detach()) == 0
    torch.manual_seed(3)
    found = chunked.attention(query, key, value, dropout=SHARE)
    expected = (query @ key.mT / 2).softmax(-1).masked_fill(dropped, 0.0) / (1 - SHARE) @ value
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    weight = torch.randn(found.shape, generator=draws, dtype=torch.float64)
    of_tiles = torch.autograd.grad((found * weight).sum(), (query, key, value))
    for one, other in zip(of_tiles, torch.autograd.grad((expected * weight).sum(), (query, key, value)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)
