"""`attention` computes scaled_dot_product_attention with a policy's choice; otherwise it calls PyTorch's own."""

import itertools
import warnings
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from attnbench.checking.agreement import check
from attnbench.contract import dispatch
from attnbench.contract.dispatch import attention, usable
from attnbench.contract.loading import implementation
from attnbench.devices import environment
from attnbench.models.in_model import REFERENCE, Candidate, build, expect, judge, register
from attnbench.models.records import ModelSpec
from attnbench.workloads.policy import Evidence, Policy, Regret, Row
from attnbench.workloads.workload import Workload
from tests.checks import references
from tests.pairwise import pairwise

sdpa = torch.nn.functional.scaled_dot_product_attention
HERE = environment.collect().machine_fingerprint


def row(use, **fields):
    kind = {"device": "cpu", "dtype": "float32", "direction": "inference", "queries": "many", "mask": "none"}
    kind |= {"is_grouped": False, "num_threads": torch.get_num_threads()}
    shape = {"batch_heads": 8, "seq_len": 6, "kv_len": 6, "head_dim": 8}
    return Row(**(kind | shape | {"winner": use, "ratio": 0.5} | fields))


def always(use):
    """Build rows near every call of this file, all with this winner."""
    kinds = itertools.product(
        ("float32", "float64"),
        ("inference", "forward_backward"),
        ("one", "many"),
        ("none", "causal", "other"),
        (False, True),
    )
    axes = ("dtype", "direction", "queries", "mask", "is_grouped")
    lengths = [2**power for power in range(8)]
    return [
        row(use, **dict(zip(axes, kind, strict=True)), seq_len=tokens, kv_len=keys, batch_heads=batch_heads)
        for kind in kinds
        for tokens in lengths
        for keys in lengths
        for batch_heads in (2, 8)
    ]


def policy(rows=(), machine=HERE):
    return Policy(
        machine=machine,
        date="2026-01-01",
        environment={},
        num_threads=1,
        evidence=Evidence(runs=(), candidates=()),
        regret=Regret(mean=0, worst=0, sdpa_mean=0, sdpa_worst=0),
        rows=tuple(rows or always("fused")),
    )


def tensors(heads=4, groups=4, tokens=6, keys=6, dtype=torch.float32, *, grad=False, batch=2, width=8):
    torch.manual_seed(0)
    shapes = [(batch, heads, tokens, width), (batch, groups, keys, width), (batch, groups, keys, width)]
    return [torch.randn(*shape, dtype=dtype).requires_grad_(grad) for shape in shapes]


@pytest.fixture
def calls(monkeypatch):
    """Record the names of built implementations, in order."""
    built = []

    def seen(name):
        built.append(name)
        return implementation(name)

    monkeypatch.setattr(dispatch, "implementation", seen)
    return built


@pytest.fixture(autouse=True)
def _nothing_is_bound():
    dispatch.chosen.cache_clear()
    yield
    dispatch.read.cache_clear()


@pairwise(
    use=["fused", "bmm", "chunked", "naive_loop"],
    groups=[4, 2, 1],
    keys=[6, 9, 3],
    is_causal=[False, True],
    scale=[None, 0.3],
)
def test_output_and_gradients_are_those_of_sdpa(use, groups, keys, is_causal, scale):
    chosen = policy(always(use))
    for grad in (False, True):
        given = tensors(groups=groups, keys=keys, dtype=torch.float64, grad=grad)
        made = attention(*given, is_causal=is_causal, scale=scale, policy=chosen)
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
    made = attention(*given, mask=mask, policy=policy())
    torch.testing.assert_close(made, sdpa(*given, attn_mask=mask, enable_gqa=True))
    assert not calls


def test_gradients_dtype_threads_shape_and_policy_are_part_of_what_is_looked_up(calls):
    chosen = policy(
        [
            row("bmm", direction="forward_backward"),
            row("chunked", dtype="float64"),
            row("fused", num_threads=1),
            row("einsum", num_threads=2),
            row("naive_loop", num_threads=1, seq_len=7),
        ]
    )

    def used(**more):
        calls.clear()
        attention(*tensors(**more), policy=chosen)
        return calls[-1] if calls else None

    assert used() == "fused"
    assert used() is None  # it is reused
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
    assert dispatch.chosen.cache_info().currsize == 5
    attention(*tensors(), policy=policy([row("fused")]))
    assert dispatch.chosen.cache_info().currsize == 6


def test_no_more_kinds_are_kept_than_the_limit():
    chosen = policy()
    for tokens in range(1, dispatch.MOST_KINDS + 6):
        attention(*tensors(tokens=tokens, heads=1, groups=1), policy=chosen)
    assert dispatch.chosen.cache_info().currsize == dispatch.MOST_KINDS


@pytest.mark.parametrize(("more", "use"), [({}, "fused"), ({"tokens": 9, "keys": 9}, "fused"), ({"keys": 30}, None)])
def test_the_nearest_shape_chooses_within_a_factor_of_two(calls, more, use):
    attention(*tensors(**more), policy=policy([row("fused")]))
    assert calls == ([] if use is None else [use])


def test_inside_of_autocast_pytorchs_own_runs(calls):
    given = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention(*given, policy=policy()).dtype == sdpa(*given).dtype
    assert not calls


def test_a_model_that_is_recomputed_for_its_gradients_works():
    made = checkpoint(partial(attention, policy=policy()), *tensors(grad=True), use_reentrant=False)
    torch.testing.assert_close(made, sdpa(*tensors(grad=True)))
    made.sum().backward()


def test_an_error_of_the_call_itself_reaches_its_caller():
    query, key, value = tensors()
    with pytest.raises(RuntimeError):
        attention(query, key[:, :, :, :4], value, policy=policy())
    with pytest.raises(RuntimeError):
        attention(query, key.double(), value, policy=policy())


def test_on_another_machine_pytorchs_own_runs_and_it_says_so_once(calls):
    elsewhere = policy(machine="00000000")
    with pytest.warns(UserWarning, match="of another machine .* 00000000"):
        made = attention(*tensors(), policy=elsewhere)
    torch.testing.assert_close(made, sdpa(*tensors()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attention(*tensors(tokens=9), policy=elsewhere)
    assert not calls


def test_what_the_chosen_one_does_not_support_is_pytorchs_own(calls):
    chosen = policy(always("torch_mha"))  # it has no attend
    torch.testing.assert_close(attention(*tensors(), policy=chosen), sdpa(*tensors()))
    assert calls == ["torch_mha"]


def test_the_policy_is_that_of_the_variable_or_else_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ATTNBENCH_POLICY", raising=False)
    assert usable(None) is None
    policy().save(tmp_path / "results" / "policy.json")
    assert usable(None).rows[0].winner == "fused"
    policy(always("bmm")).save(tmp_path / "other.json")
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "other.json"))
    assert usable(None).rows[0].winner == "bmm"
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "none.json"))
    with pytest.raises(ValueError, match="cannot read the policy"):
        attention(*tensors())


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
    assert "no parameter softcap" in fastest.unsupported(Workload(mask="softcap(20)"))
    for axes in ({"mask": "causal"}, {"mask": "causal+padding", "kv_len": 30, "sinks": "learned"}):
        workload = Workload(batch_size=2, seq_len=6, num_heads=4, num_kv_heads=2, head_dim=8, **axes)
        assert check(references(workload, is_brief=True), fastest).agrees
    assert "fused" in calls


def test_inside_of_a_model_of_transformers_logits_and_gradients_are_right(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    policy().save(tmp_path / "policy.json")
    monkeypatch.setenv("ATTNBENCH_POLICY", str(tmp_path / "policy.json"))
    seen = []

    def counted(*given, **more):
        seen.append(more["is_causal"])
        return attention(*given, **more)

    monkeypatch.setattr(dispatch, "attention", counted)
    monkeypatch.setattr("attnbench.models.in_model.OWN", ("eager", "sdpa", "by_policy"))
    register()
    dispatch.register_attention("by_policy")
    sizes = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    for grads in (False, True):
        spec = ModelSpec(config="", seq_len=12, has_gradients=grads)
        model = build(spec, config)
        judged = judge(model, expect(model), "by_policy")
        assert judged.is_right, judged
        assert not judged.is_refused
    assert seen
    assert all(seen)
    assert REFERENCE in transformers.AttentionInterface()


def attends_by_policy():
    transformers = pytest.importorskip("transformers")
    dispatch.register_attention("by_policy")
    return transformers.AttentionInterface()["by_policy"]


def seams():
    """Return the functions that replace a model's attention: ours by policy, a candidate, and the reference."""
    register()
    reference = pytest.importorskip("transformers").AttentionInterface()[REFERENCE]
    return {"policy": attends_by_policy(), "candidate": Candidate("fused"), "reference": reference}


@pytest.mark.parametrize("seam", ["policy", "candidate", "reference"])
def test_a_model_may_pass_its_mask_by_keyword_or_none_at_all(seam):
    attend, given = seams()[seam], tensors(groups=2)
    visible = torch.ones(2, 1, 6, 6, dtype=torch.bool).tril()
    right = sdpa(*given, is_causal=True, enable_gqa=True).transpose(1, 2)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    by_keyword, _ = attend(module, *given, attention_mask=visible, dropout=0.0, scaling=8**-0.5, is_causal=False)
    torch.testing.assert_close(by_keyword.float(), right)
    if seam != "reference":  # whose masks are always dense
        without, _ = attend(module, *given, dropout=0.0, scaling=8**-0.5, is_causal=True)
        torch.testing.assert_close(without, right)


def test_a_model_that_asks_for_more_is_refused():
    with pytest.raises(ValueError, match="does not take softcap"):
        attends_by_policy()(torch.nn.Module(), *tensors(), None, softcap=20.0)
