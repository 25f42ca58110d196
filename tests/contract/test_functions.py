"""Plain functions: each receives the parameters it names, right ones pass, wrong ones are named; errors are clear."""

import re
import sys
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from attnbench import plugins
from attnbench.case import build, draw_normal, place, reason_against
from attnbench.checking.agreement import check
from attnbench.contract.adapters import adapt
from attnbench.contract.functions import keywords
from attnbench.contract.loading import compiled, from_value, implementation
from attnbench.processes.worker import attempts
from attnbench.storage.records import Agreement, Status
from attnbench.workloads.workload import Workload
from tests.checks import references

SIZES = {"batch_size": 2, "num_heads": 4, "head_dim": 8, "seq_len": 13, "direction": "forward_backward"}


def attend(query, key, value, *, mask=None, bias=None, scale=None, sinks=None):
    """The textbook form, the base of the others."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if bias is None else scores + bias
    scores = scores if mask is None else scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], dim=-1)
    return scores.softmax(dim=-1)[..., : key.shape[-2]].nan_to_num(0.0) @ value


def everything(query, key, value, *, mask=None, is_causal=False, bias=None, scale=1.0, num_kv_heads=1):
    """Takes every input except dropout, and repeats keys and values itself."""
    assert key.shape[1] == num_kv_heads
    assert not (is_causal and mask is not None)
    key, value = (tensor.repeat_interleave(query.shape[1] // num_kv_heads, dim=1) for tensor in (key, value))
    if is_causal:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    return attend(query, key, value, mask=mask, bias=bias, scale=scale)


def biased(query, key, value, bias=None):
    return attend(query, key, value, bias=bias)


def causal_alone(query, key, value, *, is_causal=False):
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)


def without_bias(query, key, value, *, mask=None, bias=None):
    return attend(query, key, value, mask=mask)


def grouped(query, key, value, *, mask=None, num_kv_heads=1):
    """Pairs each key/value head with its query heads, without a copy."""
    query = query.unflatten(1, (num_kv_heads, -1))  # (B,H,T,K) -> (B,G,H/G,T,K)
    mask = None if mask is None else mask.unsqueeze(2)  # (B,1,T,S) -> (B,1,1,T,S)
    return attend(query, key[:, :, None], value[:, :, None], mask=mask).flatten(1, 2)


def interleaved(query, key, value, *, mask=None, num_kv_heads=1):
    """Query head h reads key/value head h mod G."""
    times = query.shape[1] // num_kv_heads
    return attend(query, key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1), mask=mask)


def wrong_scale(query, key, value, *, mask=None, scale=1.0):
    return attend(query, key, value, mask=mask, scale=scale * scale)


MASKS = ("none", "causal", "padding", "causal_bottom_right", "alibi", "causal+alibi", "padding+additive")


def case_of(function, **axes):
    workload = Workload(**(SIZES | axes))
    return build(workload, from_value(function, "f"), place(draw_normal(workload, 0), workload))


def judged(function, *, is_brief=False, **axes) -> Agreement | str:
    workload, made = Workload(**(SIZES | axes)), from_value(function, function.__name__)
    reason = reason_against(made, workload)
    return reason or check(references(workload, is_brief=is_brief), made)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "refused"),
    [
        (attend, ()),
        (everything, ()),
        (biased, ()),
        (causal_alone, ("padding", "alibi", "causal+alibi", "padding+additive")),
        (grouped, ("alibi", "causal+alibi", "padding+additive")),
    ],
)
@pytest.mark.parametrize("mask", MASKS)
def test_a_right_function_agrees_under_each_mask_that_it_can_be_given(function, refused, mask):
    found = judged(function, mask=mask, is_brief=mask not in {"causal", "padding"})
    if mask in refused:
        assert isinstance(found, str)
    else:
        assert isinstance(found, Agreement), found
        assert found.agrees, found.diagnosis


@pytest.mark.one_in(2)
@pytest.mark.parametrize("function", [attend, everything, biased, grouped])
def test_grouped_heads_come_repeated_or_as_they_are(function):
    for axes in ({"num_kv_heads": 2}, {"num_kv_heads": 1}, {"num_kv_heads": 2, "kv_len": 9, "mask": "causal"}):
        found = judged(function, **axes)
        assert found.agrees, found.diagnosis
    assert judged(function, num_kv_heads=2, scope="module", mask="causal").agrees


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "axes", "named"),
    [
        (without_bias, {"mask": "causal+alibi"}, ""),
        (interleaved, {"num_kv_heads": 2}, "kv_heads_interleaved"),
        (wrong_scale, {"mask": "causal"}, "scaled_by_width"),
    ],
)
def test_a_wrong_one_is_wrong(function, axes, named):
    found = judged(function, **axes)
    assert not found.agrees
    assert found.diagnosis
    assert not named or named in found.mistakes
    plain = {"mask": "causal", "num_kv_heads": 4} if function is not wrong_scale else {"mask": "causal", "head_dim": 1}
    assert judged(function, **plain).agrees  # so the planted mistake is the error


def test_what_it_is_given_follows_from_its_signature():
    seen = {}

    def watching(query, key, value, *, mask=None, is_causal=False, bias=None, scale=0.0, num_kv_heads=0):
        seen.update(mask=mask, is_causal=is_causal, bias=bias, scale=scale, num_kv_heads=num_kv_heads, key=key)
        return query

    def called(mask: str, function=watching) -> dict[str, object]:
        seen.clear()
        case_of(function, seq_len=5, num_kv_heads=2, head_dim=4, mask=mask, direction="inference").output()
        return seen

    causal = called("causal")
    assert (causal["mask"], causal["is_causal"], causal["bias"]) == (None, True, None)
    assert (causal["scale"], causal["num_kv_heads"], causal["key"].shape[1]) == (0.5, 2, 2)
    window = called("sliding_window(2)")
    assert (window["mask"].dtype, window["is_causal"], window["bias"]) == (torch.bool, False, None)
    alibi = called("causal+alibi")
    assert (alibi["mask"], alibi["is_causal"], alibi["bias"].shape) == (None, True, (1, 4, 5, 5))
    assert alibi["bias"].isfinite().all()
    both = called("sliding_window(2)+alibi")
    assert both["mask"] is not None
    assert both["bias"].isfinite().all()
    assert not any(value for name, value in called("none").items() if name in {"mask", "is_causal", "bias"})

    def summed(query, key, value, *, bias=None):
        seen.update(bias=bias, key=key)
        return query

    assert called("causal", summed)["bias"].isinf().any()  # without `mask` the bias hides
    assert seen["key"].shape[1] == 4  # without `num_kv_heads` heads are repeated


def unmasked(query, key, value):
    return query


@pytest.mark.parametrize(
    ("function", "axes", "said"),
    [
        (causal_alone, {"mask": "padding"}, "no parameter mask: is_causal passes on the causal mask alone"),
        (causal_alone, {"mask": "causal+alibi"}, "no parameter bias, and mask causal+alibi changes scores"),
        (everything, {"mask": "softcap(20)"}, "no parameter softcap, and mask softcap(20) changes scores"),
        (unmasked, {"mask": "causal"}, "no parameter mask: it takes part in unmasked workloads only"),
        (unmasked, {"mask": "relative_buckets"}, "the function has no parameter bias"),
        (unmasked, {"dropout": 0.1, "direction": "forward"}, "no parameter dropout"),
        (unmasked, {"scale": 0.3}, "it takes no scale of the scores: name a parameter scale"),
        (unmasked, {"sinks": "learned"}, "it takes no sinks: name a parameter sinks"),
    ],
)
def test_what_it_cannot_be_given_is_unsupported_with_the_reason(function, axes, said):
    assert said in str(reason_against(from_value(function, "f"), Workload(**axes)))


def by_window(query, key, value, *, window_size=(-1, -1), softcap=None):
    """A window counted from the end, as in flash-attention, and a softcap."""
    scores = query @ key.mT * query.shape[-1] ** -0.5
    scores = scores if softcap is None else softcap * (scores / softcap).tanh()
    ahead = torch.arange(key.shape[2]) - torch.arange(query.shape[2])[:, None] - (key.shape[2] - query.shape[2])
    left, right = window_size
    hidden = ((right >= 0) & (ahead > right)) | ((left >= 0) & (ahead < -left))
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


@pytest.mark.parametrize("mask", ["causal", "sliding_window(3)+softcap(2)", "softcap(2)", "window(2,1)", "none"])
def test_windows_and_softcaps_reach_a_function_that_names_them(mask):
    found = judged(by_window, mask=mask)
    assert found.agrees, found.diagnosis
    assert "only none, causal and sliding windows" in judged(by_window, mask="padding")


def test_a_function_that_takes_a_window_gets_no_mask_for_it():
    """Its mask hid what it did wrong with the window, as where a limit of 0 is no limit."""
    masks = []

    def both(query, key, value, *, mask=None, window_size=(-1, -1)):
        masks.append(mask)
        if mask is None:
            left, right = window_size
            return by_window(query, key, value, window_size=(left or -1, right))
        return (query @ key.mT * query.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ value

    for mask, is_right in {"sliding_window(3)": True, "padding(9,5)": True, "sliding_window(1)": False}.items():
        masks.clear()
        sizes = {"seq_len": 9, "batch_size": 2, "direction": "inference"}
        assert judged(both, is_brief=True, mask=mask, **sizes).agrees == is_right
        assert {each is None for each in masks} == {"window" in mask}


def test_a_window_by_default_is_named():
    found = judged(lambda q, k, v, window_size=(9, 9): by_window(q, k, v, window_size=window_size), seq_len=37)
    assert "query i sees key i-9 to key i+9, where the mask is none" in found.diagnosis


def needs_more(query, key, value, window, layer):
    return query


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (lambda query, key: query, "f takes (query, key), and is called with query, key and value by position"),
        (needs_more, "(missing a required argument: 'window'); give everything else a default"),
        (lambda query, key, value, mask, /: query, "missing a required"),
        (torch.add, "wrap it, as in def mine(query, key, value, *, mask=None)"),
        (nn.Linear(1, 1), "adapt(lambda sizes: "),
    ],
)
def test_a_function_that_cannot_be_called_is_reported_with_what_it_can_be_given(value, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        from_value(value, "f")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda query, key, value: (query, None), "f(q, k, v)[0]))"),
        (lambda query, key, value: None, "returned None"),
        (
            lambda query, key, value: query.transpose(1, 2),
            '(if it takes tokens before heads: adapt(..., layout="bthk"))',
        ),
        (lambda query, key, value: query.transpose(1, 2).flatten(2), "(heads are merged, and must stay apart)"),
        (lambda query, key, value: query[..., :1], "returned (2, 4, 13, 1): it must"),
    ],
    ids=["tuple", "none", "tokens first", "merged", "narrow"],
)
@pytest.mark.parametrize("scope", ["attention", "module"])
def test_an_output_of_the_wrong_form_is_reported_as_what_it_is(function, said, scope):
    made, workload = from_value(function, "mine.py:f"), Workload(**(SIZES | {"scope": scope}))
    with pytest.raises(ValueError, match=re.escape(said)):
        check(references(workload), made)


def needs_a_mask(query, key, value, *, mask=None, bias=None):
    return attend(query, key, value, mask=mask.bool(), bias=bias)


def test_a_function_that_does_not_expect_none_is_told_of_it_with_its_place():
    made = from_value(needs_a_mask, "mine.py:f")
    with pytest.raises(ValueError, match=r"mine\.py:f is passed mask, bias = None here") as raised:
        check(references(Workload(**SIZES)), made)
    status, message = attempts.describe(raised.value)
    assert status is Status.error
    line = needs_a_mask.__code__.co_firstlineno + 1
    assert message.endswith(f"no attribute 'bool') (test_functions.py, line {line})")
    assert judged(needs_a_mask, mask="causal").agrees


def test_a_failure_inside_a_package_names_its_line_there_and_the_line_that_called_it():
    with pytest.raises(ValueError, match="Improper number of dimensions") as raised:
        np.linalg.norm(np.ones(3), axis=(0, 1, 2))
    places = r" \(test_functions\.py, line \d+; numpy/linalg/\w+\.py, line \d+\)$"
    assert re.search(places, attempts.describe(raised.value)[1])


def test_every_way_to_take_parameters_is_understood():
    assert keywords(lambda *tensors, mask=None: None, "f") == {"mask": "mask"}
    assert keywords(lambda query, key, value, **others: None, "f") == {"mask": "mask"}
    assert [*keywords(partial(everything, scale=2.0), "f")] == ["mask", "is_causal", "bias", "num_kv_heads"]
    assert keywords(lambda query, key, value, scale, other=3: None, "f") == {"scale": "scale"}
    assert keywords(lambda q, k, v, causal, attn_mask=None: None, "f") == {"mask": "attn_mask", "is_causal": "causal"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("function", "axes"), [(everything, {"mask": "causal+alibi", "num_kv_heads": 2}), (biased, {"mask": "padding"})]
)
def test_a_compiled_function_is_given_the_same(monkeypatch, function, axes):
    def captured(function):  # the graph as Inductor gets it, run unchanged
        return torch.compile(function, backend="eager", dynamic=False, fullgraph=True)

    monkeypatch.setattr("attnbench.contract.loading.compile_whole", captured)
    workload = Workload(**(SIZES | axes | {"direction": "inference"}))
    with torch._dynamo.config.patch(recompile_limit=1000):  # as compile_whole does
        assert check(references(workload), compiled(from_value(function, "f"))).agrees


SOURCE = """
import nothing_of_this_name
from attnbench.contract import CanonicalAttention

def mine(query, key, value, *, mask=None, scale=None): ...
def short(q, k, v, is_causal=False): ...
def wrapped(q, k, v): ...
def _helper(query, key, value): ...
def other(x): ...

class Attends:
    def attend(self, query, key, value, bias=None): ...

class Bound(CanonicalAttention):
    def attend(self, query, key, value, mask): ...

class Nothing: ...

split_layers = adapt(make, split("q", "k", "v", out="o"))
one, (two, _hidden) = adapt(wrapped), (adapt(WRAPPED), 3)
many, few = (adapt(each) for each in (mine, short))
bound = partial(F.scaled_dot_product_attention, is_causal=True)
other_bound = partial(other, 3)

class Core(Module):
    def forward(self, q, k, v, mask=None): ...

core = Core()
def quick(quantity, kernel, variance): ...
def banded(q, k, v, left, right): ...
def by_band(q, k, v): return banded(q, k, v, 8, right=0)
a, b, c = (adapt(number, call=lambda f, q, k, v, mask: wrapped(q, k, v)), adapt(number), adapt(number))
number = 3
"""
HELD = ["mine", "short", "Attends", "Bound", "split_layers", "one", "two", "many", "few"]
HELD += ["bound", "Core", "core", "by_band", "a", "b", "c"]


def test_what_a_file_holds_is_read_without_running_it(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    assert plugins.discover_implementations(file) == HELD
    file.write_text("number = 3\n")
    with pytest.raises(ValueError, match="holds nothing that looks like an implementation"):
        plugins.discover_implementations(file)


def test_a_list_says_what_a_function_in_a_file_is_given_and_names_a_module(tmp_path):
    file = tmp_path / "mine.py"
    function = "def mine(query, key, value, *, mask=None, scale=None): ...\n"
    module = "from attnbench.contract.adapters import adapt, packed\nmodule = adapt(None, packed('qkv', out='proj'))\n"
    file.write_text(function + module)
    assert implementation(f"{file}:mine").source == f"{file}:mine, given query, key, value, mask, scale"
    assert implementation(f"{file}:module").source == f"{file}:module"


def test_a_file_may_be_named_like_the_package_that_it_imports(tmp_path, monkeypatch):
    package = tmp_path / "installed"
    package.mkdir()
    file = tmp_path / "namesake.py"
    file.write_text("import namesake\ndef mine(query, key, value): return namesake.NUMBER * value\n")
    monkeypatch.syspath_prepend(tmp_path)  # as with `python -m attnbench` in that folder
    with pytest.raises(ValueError, match=r"imports namesake, which is not installed.*rename the file"):
        implementation(f"{file}:mine")
    (package / "namesake.py").write_text("NUMBER = 3\n")
    sys.path.append(str(package))
    try:
        assert plugins.load(f"{file}:mine")(0, 0, 2) == 6
    finally:
        sys.path.remove(str(package))
        del sys.modules["namesake"]


@pytest.mark.parametrize(
    "axes",
    [
        {"scale": 0.3},
        {"sinks": "learned", "mask": "causal+padding", "num_kv_heads": 2},
        {"mask": "causal+relative_buckets_past(8,20)", "scale": 1.0},
    ],
    ids=str,
)
def test_scale_sinks_and_learned_biases_reach_a_function_with_their_gradients(axes):
    found = judged(attend, **axes)
    assert found.agrees, found.diagnosis
    compared = {tensor.tensor for _, tensor in found.tensors()}
    assert {f"gradient of {name}" for name in Workload(**(SIZES | axes)).operands} <= compared


class Core(nn.Module):
    def forward(self, q, k, v, attn_mask=None):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask)


@pytest.mark.parametrize("value", [Core, Core()], ids=["class", "instance"])
def test_a_module_of_query_key_and_value_is_a_function(value):
    made = from_value(value, "core")
    assert check(references(Workload(**SIZES, mask="causal"), is_brief=True), made).agrees
    assert isinstance(value, type) or adapt(value, masks=("none",)).built_in() == {"mask": "none"}


@torch.no_grad()
def without_backward(query, key, value, *, mask=None):
    return attend(query, key, value, mask=mask)


def viewing(query, key, value):
    return value if key.shape[2] == 1 else attend(query, key, value)


def test_code_without_a_backward_pass_is_checked_in_inference_and_says_so():
    for scope in ("attention", "module"):
        found = judged(without_backward, mask="causal", scope=scope)
        assert found.agrees, found.diagnosis
        assert any("no backward" in rule.found for rule in found.rules if rule.is_noted)
    assert not any("no backward" in rule.found for rule in judged(attend).rules)
    assert not judged(lambda query, key, value: torch.zeros_like(query)).agrees


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch's, in a call without gradients
def test_reentrant_checkpointing_and_views_of_values_are_right():
    def reentrant(query, key, value):
        return checkpoint(attend, query, key, value, use_reentrant=True)

    for function, axes in ((reentrant, {}), (viewing, {"seq_len": 1})):
        assert judged(function, **axes).agrees
    cases = [case_of(function) for function in (reentrant, attend)]
    for case in cases:
        for tensor in case.tensors.values():
            tensor.requires_grad_()
    for one, other in zip(*(case.call()() for case in cases), strict=True):
        torch.testing.assert_close(one, other)


def test_not_implemented_means_unsupported():
    def refusing(query, key, value):
        raise NotImplementedError("not yet")

    with pytest.raises(NotImplementedError) as raised:
        judged(refusing)
    assert attempts.describe(raised.value)[0] is Status.unsupported


def test_a_cache_that_is_kept_is_named_with_the_line_to_write():
    tensor = torch.ones(1, requires_grad=True).exp()
    tensor.backward()
    with pytest.raises(RuntimeError) as raised:
        tensor.backward()
    assert "has_cache=True" in attempts.describe(raised.value)[1]


@pytest.mark.parametrize(("scale", "expected"), [(0.0, None), (0.5, 0.5)])
def test_a_default_scale_is_left_out_as_callers_do(scale, expected):
    seen = []

    def with_branch(query, key, value, *, scale=None):
        seen.append(scale)
        return F.scaled_dot_product_attention(query, key, value, scale=scale)

    def with_number(query, key, value, *, scale=None):
        return (query @ key.mT * scale).softmax(-1) @ value

    answers = [case_of(each, scale=scale).output() for each in (with_branch, with_number)]
    assert seen == [expected]
    torch.testing.assert_close(*answers)
