"""`attention` computes what scaled_dot_product_attention does, by what a policy chooses; elsewhere by PyTorch's own."""

import itertools
import math
import warnings
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnbench.checking.in_model import REFERENCE, build, expect, judge, register
from attnbench.contract import BoundMask, dispatch, trial
from attnbench.contract.dispatch import Dispatcher, usable
from attnbench.contract.loading import implementation
from attnbench.devices import device, environment
from attnbench.storage.model_events import Asked
from attnbench.workloads.masks import parse_mask
from attnbench.workloads.policy import COORDINATES, SIZES, Evidence, Kind, Policy, Regret
from attnbench.workloads.workload import Workload

sdpa = torch.nn.functional.scaled_dot_product_attention
HERE = environment.collect().machine_fingerprint
SMALL, LARGE = (1,) * len(SIZES), (4096,) * len(SIZES)


def kind(candidates, workloads, scale=10.0, **axes):
    given = {"device": "cpu", "dtype": "float32", "direction": "inference", "queries": "many"} | axes
    scales = dict.fromkeys(COORDINATES, scale)
    return Kind(
        **given, chosen={}, candidates=candidates, scales=scales, signal=1.0, noise=0.01, workloads=tuple(workloads)
    )


def always(use):
    """Kinds of calls, all of which that one computes."""
    rows = [(mask, *sizes, 0.5) for mask in ("none", "causal", "other") for sizes in (SMALL, LARGE)]
    return [
        kind((use,), rows, dtype=dtype, direction=direction, queries=queries)
        for dtype, direction, queries in itertools.product(
            ("float32", "float64"), ("inference", "forward_backward"), ("one", "many")
        )
    ]


def policy(kinds=(), machine=HERE):
    return Policy(
        machine=machine,
        date="2026-01-01",
        environment={},
        num_threads=1,
        evidence=Evidence(runs=(), num_workloads=0, candidates=()),
        regret=Regret(mean=0, worst=0, sdpa_mean=0, sdpa_worst=0),
        kinds=tuple(kinds or always("fused")),
    )


def tensors(heads=4, groups=4, tokens=6, keys=6, dtype=torch.float32, *, grad=False, batch=2, width=8):
    torch.manual_seed(0)
    shapes = [(batch, heads, tokens, width), (batch, groups, keys, width), (batch, groups, keys, width)]
    return [torch.randn(*shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """The names of what was built, in order."""
    built = []

    def seen(name):
        built.append(name)
        return implementation(name)

    monkeypatch.setattr(dispatch, "implementation", seen)
    dispatch._module.cache_clear()
    dispatch._implementation.cache_clear()
    yield built
    dispatch._implementation.cache_clear()


@pytest.mark.parametrize("use", ["fused", "bmm", "chunked", "naive_loop"])
@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize("keys", [6, 9, 3])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_output_and_gradients_are_those_of_sdpa(use, groups, keys, is_causal, scale):
    dispatcher, chosen = Dispatcher(), policy(always(use))
    for grad in (False, True):
        given = tensors(groups=groups, keys=keys, dtype=torch.float64, grad=grad)
        made = dispatcher.attention(*given, is_causal=is_causal, scale=scale, policy=chosen, trials=False)
        right = sdpa(*given, is_causal=is_causal, scale=scale, enable_gqa=groups != 4)
        torch.testing.assert_close(made, right)
        if grad:
            for one, other in zip(
                torch.autograd.grad(made.sin().sum(), given), torch.autograd.grad(right.sin().sum(), given), strict=True
            ):
                torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_mask_as_a_tensor_is_pytorchs_own(calls, kind):
    given = tensors(groups=2)
    mask = torch.rand(6, 6) > 0.3 if kind == "bool" else torch.randn(6, 6)
    made = Dispatcher().attention(*given, mask=mask, policy=policy())
    torch.testing.assert_close(made, sdpa(*given, attn_mask=mask, enable_gqa=True))
    assert not calls


def test_gradients_dtype_threads_shape_and_policy_are_part_of_what_is_looked_up(calls):
    dispatcher = Dispatcher()
    here = ("none", 8, 6, 6, 8, 1)  # the mask, B*H, T, S, K, H/G
    chosen = policy(
        [
            always("bmm")[3],
            kind(("chunked",), [("none", *SMALL, 0.5), ("none", *LARGE, 0.5)], dtype="float64"),
            kind(
                ("fused", "einsum", "naive_loop"),
                [(*here, 1, 0.5, 1, 1), (*here, 2, 1, 0.5, 1), ("none", 8, 7, 6, 8, 1, 1, 1, 1, 0.5)],
                scale=0.1,
            ),
        ]
    )

    def used(**more):
        calls.clear()
        dispatcher.attention(*tensors(**more), policy=chosen, trials=False)
        return calls[-1] if calls else None

    assert used() == "fused"
    assert used() is None  # it is kept
    assert used(grad=True) == "bmm"
    with torch.no_grad():
        assert used(grad=True) is None  # as without gradients
    assert used(dtype=torch.float64) == "chunked"
    assert used(tokens=7) == "naive_loop"
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert used() == "einsum"
    finally:
        torch.set_num_threads(before)
    assert len(dispatcher.kept()) == 5


def test_no_more_kinds_are_kept_than_is_said():
    dispatcher, chosen = Dispatcher(), policy()
    for tokens in range(1, dispatch.MOST_KINDS + 6):
        dispatcher.attention(*tensors(tokens=tokens, heads=1, groups=1), policy=chosen)
    assert len(dispatcher.kept()) == dispatch.MOST_KINDS


@pytest.fixture
def trials(monkeypatch):
    """Trials take no time: the last contender is twice as fast as the others. Seen are the names of each."""
    seen = []

    def settled(calls, clock, between):
        seen.append(tuple(calls))
        for call in calls.values():
            between()
            call()
        return {name: trial.Tried(log=math.log(0.5 if name == [*calls][-1] else 1), spread=0.01) for name in calls}

    monkeypatch.setattr(trial, "trial", settled)
    return seen


def unsure(*names, **axes):
    """A kind of call of which hardly anything is known."""
    rows = [(mask, *sizes, *(0.98 for _ in names)) for mask in ("none", "causal", "other") for sizes in (SMALL, LARGE)]
    return policy([kind(names, rows, scale=0.1, **axes)])


def test_where_the_policy_is_unsure_contenders_are_tried_once_for_lengths_nearby(trials, calls):
    dispatcher, chosen = Dispatcher(), unsure("bmm", "fused")
    with torch.no_grad():
        for tokens in (64, 64, 65, 66, 67):
            given = tensors(tokens=tokens, keys=tokens)
            made = dispatcher.attention(*given, is_causal=True, policy=chosen)
            torch.testing.assert_close(made, sdpa(*given, is_causal=True))
        assert trials == [("sdpa", "bmm", "fused")]
        (choice,) = dispatcher.choices()
        assert (choice.name, choice.contenders, choice.workload.seq_len) == ("fused", ("sdpa", "bmm", "fused"), 64)
        dispatcher.attention(*tensors(tokens=80, keys=80), is_causal=True, policy=chosen)
        dispatcher.attention(*tensors(tokens=64, keys=64, batch=3), is_causal=True, policy=chosen)
    assert len(trials) == 3
    assert calls[-1] == "fused"


def test_where_nothing_can_be_tried_what_is_expected_is_called(trials, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError

    given, dispatcher, chosen = tensors(), Dispatcher(), unsure("fused")
    asked = Workload(
        batch_size=given[0].shape[0], num_heads=given[0].shape[1], num_kv_heads=given[1].shape[1],
        seq_len=given[0].shape[2], kv_len=given[1].shape[2], head_dim=given[0].shape[3], direction="inference",
        num_threads=torch.get_num_threads(),
    )  # fmt: skip
    expected = chosen.choose(asked)
    monkeypatch.setattr(torch, "zeros", full)
    with torch.no_grad():
        dispatcher.attention(*given, policy=chosen)
    assert trials == []
    assert [(choice.name, choice.contenders) for choice in dispatcher.choices()] == [(expected, ("sdpa", "fused"))]


def test_what_a_trial_chose_is_not_called_where_rounding_must_not_depend_on_it(trials, calls):
    dispatcher, chosen, given = Dispatcher(), unsure("fused"), tensors()
    with torch.no_grad():
        dispatcher.attention(*given, policy=chosen)
        assert dispatcher.choices()[0].name == "fused"
        calls.clear()
        torch.use_deterministic_algorithms(mode=True)
        try:
            assert dispatcher.attention(*given, policy=chosen).equal(sdpa(*given))
        finally:
            torch.use_deterministic_algorithms(mode=False)
    assert calls == []


def test_who_raises_in_a_trial_is_not_called(monkeypatch):
    monkeypatch.setattr(trial, "trial", lambda *_: {})
    dispatcher, chosen = Dispatcher(), unsure("fused")
    monkeypatch.setattr(type(chosen), "choose", lambda *_: "fused")
    with torch.no_grad():
        dispatcher.attention(*tensors(), policy=chosen)
    assert [choice.name for choice in dispatcher.choices()] == ["sdpa"]


def test_as_a_cache_grows_hardly_any_call_is_tried(trials):
    dispatcher, chosen = Dispatcher(), unsure("bmm", queries="one")
    for keys in range(100, 200):
        dispatcher.attention(*tensors(tokens=1, keys=keys), policy=chosen)
    assert len(trials) == dispatch.STEPS + 1


def test_a_trial_leaves_no_trace_in_gradients_random_numbers_and_saved_tensors(trials):
    dispatcher, chosen = Dispatcher(), unsure("fused", direction="forward_backward")
    given, saved = tensors(grad=True), []
    state = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        dispatcher.attention(*given, policy=chosen)
        first = len(saved)
        made = dispatcher.attention(*given, policy=chosen)
    assert trials == [("sdpa", "fused")]
    assert first > 0
    assert len(saved) == 2 * first
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in given)
    made.sum().backward()
    assert all(each.grad is not None for each in given)


def test_a_model_that_is_recomputed_for_its_gradients_works_with_trials():
    chosen = unsure("fused", direction="forward_backward")
    given = tensors(grad=True)
    made = checkpoint(partial(Dispatcher().attention, policy=chosen), *given, use_reentrant=False)
    right = sdpa(*tensors(grad=True))
    torch.testing.assert_close(made, right)
    made.sum().backward()


def test_nothing_is_tried_where_it_is_not_allowed_or_would_tell_nothing(trials, monkeypatch):
    chosen = unsure("fused")

    class Own(torch.Tensor):
        """A subclass of tensor."""

    given = tensors()
    Dispatcher().attention(*given, policy=chosen, trials=False)
    Dispatcher().attention(*(each.as_subclass(Own) for each in given), policy=chosen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Dispatcher().attention(*given, policy=chosen).dtype == sdpa(*given).dtype
    torch.use_deterministic_algorithms(mode=True)
    try:
        Dispatcher().attention(*given, policy=chosen)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    Dispatcher().attention(*(each.to("meta") for each in given), policy=chosen)
    monkeypatch.setattr(type(device("cpu")), "is_capturing", lambda _: True)
    Dispatcher().attention(*given, policy=chosen)
    monkeypatch.setattr(type(device("cpu")), "is_capturing", lambda _: False)
    monkeypatch.setattr(dispatch, "SHORT_OF_MEMORY", 2**60)
    Dispatcher().attention(*given, policy=chosen)
    assert trials == []
    monkeypatch.undo()
    Dispatcher().attention(*given, policy=policy())  # sure
    assert trials == []


def test_an_error_of_the_call_itself_reaches_its_caller():
    chosen = unsure("fused")
    query, key, value = tensors()
    with pytest.raises(RuntimeError):
        Dispatcher().attention(query, key[:, :, :, :4], value, policy=chosen)


def test_on_another_machine_pytorchs_own_runs_and_it_says_so_once(calls):
    dispatcher, elsewhere = Dispatcher(), policy(machine="00000000")
    with pytest.warns(UserWarning, match="of another machine .* 00000000"):
        made = dispatcher.attention(*tensors(), policy=elsewhere)
    torch.testing.assert_close(made, sdpa(*tensors()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dispatcher.attention(*tensors(tokens=9), policy=elsewhere)
    assert not calls


def test_what_the_chosen_one_does_not_support_is_pytorchs_own(calls):
    chosen = policy(always("torch_mha"))  # it has no attend
    torch.testing.assert_close(Dispatcher().attention(*tensors(), policy=chosen), sdpa(*tensors()))
    assert "torch_mha" in calls
    assert not dispatch._module.cache_info().currsize


def test_the_policy_is_that_of_the_variable_or_else_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNBENCH_POLICY", raising=False)
    assert usable(None) is None
    policy().save(tmp_path / "results" / "policy.json")
    assert usable(None).kinds[0].candidates == ("fused",)
    policy(always("bmm")).save(tmp_path / "other.json")
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "other.json"))
    assert usable(None).kinds[0].candidates == ("bmm",)
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="cannot read the policy"):
        Dispatcher().attention(*tensors())


def test_fastest_says_what_to_do_without_a_policy_and_follows_one(tmp_path, monkeypatch, calls):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNBENCH_POLICY", raising=False)
    fastest = implementation("fastest")
    assert "learn one with `attnbench fastest" in fastest.unsupported(Workload())
    path = tmp_path / "policy.json"
    monkeypatch.setenv("ATTNBENCH_POLICY", str(path))
    policy(machine="00000000").save(path)
    assert "of another machine" in fastest.unsupported(Workload())
    dispatch.read.cache_clear()
    policy().save(path)
    assert fastest.unsupported(Workload()) is None
    assert fastest.unsupported(Workload(sinks="learned"))
    dispatch._implementation.cache_clear()
    given, rule = tensors(groups=2, keys=9), parse_mask("padding(5,9)")
    mask = BoundMask(rule, (2, 6, 9), "cpu")
    made = Dispatcher().attend(*given, mask, trials=False)
    torch.testing.assert_close(made, sdpa(*given, attn_mask=mask.visible, enable_gqa=True))
    assert calls[-1] == "fused"
    dispatch.read.cache_clear()


def test_what_nobody_supports_is_an_error_and_no_silent_answer(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNBENCH_POLICY", raising=False)
    mask = BoundMask(parse_mask("softcap(20)"), (2, 6, 6), "cpu", num_heads=4)
    with pytest.raises(ValueError, match="has no softcap"):
        Dispatcher().attend(*tensors(), mask)


def test_inside_of_a_model_of_transformers_logits_and_gradients_are_right(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    policy().save(tmp_path / "policy.json")
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "policy.json"))
    seen = []
    dispatcher = Dispatcher()

    def counted(*given, **more):
        seen.append(more["is_causal"])
        return dispatcher.attention(*given, **more)

    monkeypatch.setattr(dispatch, "attention", counted)
    monkeypatch.setattr("attnbench.checking.in_model.OWN", ("eager", "sdpa", "by_policy"))
    register()
    dispatch.register_attention("by_policy")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    for grads in (False, True):
        asked = Asked(config="", attentions=(), seq_len=12, has_gradients=grads)
        model = build(asked, config)
        judged = judge(asked, model, expect(model, grads=grads), "by_policy")
        assert judged.is_right, judged
        assert not judged.is_refused
    assert seen
    assert all(seen)
    assert REFERENCE in transformers.AttentionInterface()


def test_a_model_that_asks_for_more_is_refused(monkeypatch):
    transformers = pytest.importorskip("transformers")
    dispatch.register_attention("by_policy")
    attend = transformers.AttentionInterface()["by_policy"]
    with pytest.raises(ValueError, match="does not take softcap"):
        attend(torch.nn.Module(), *tensors(), None, softcap=20.0)
