"""Code in another process is judged as if it were here; its effects there are seen here."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnbench.case import draw_normal, place
from attnbench.checking import dropout
from attnbench.checking.agreement import check
from attnbench.checking.calls import FormError, Instance, call_on
from attnbench.checking.reference import References
from attnbench.checking.side_effects import SideEffectError
from attnbench.contract import Attention, Implementation
from attnbench.contract.functions import from_function
from attnbench.contract.loading import implementation
from attnbench.processes.messages import Failed, Prepared
from attnbench.processes.remote import CandidateError, CandidateLostError, Candidates, Remote, TensorFile, compact
from attnbench.storage.records import Status
from attnbench.workloads.workload import Workload
from tests.checking.test_dropout import OtherGradient
from tests.checks import cell_of, facts

POINT = Workload(seq_len=9, num_heads=2, head_dim=4, mask="causal", direction="forward_backward")
PREPARED = Prepared(executed_flops=None)
DROPPING = msgspec.structs.replace(POINT, num_heads=4, num_kv_heads=4, head_dim=8, value_dim=8, dropout=0.2)


def apart(made: Implementation, point: Workload = POINT) -> Remote:
    """Return the caller of an implementation as if it were in another process, with random generators of its own."""
    candidates, state = Candidates(), [torch.Generator().manual_seed(99).get_state()]

    def ask(_function, _result, *, cell, request):
        numpys, pythons = np.random.get_state(), random.getstate()  # noqa: NPY002 - the global state is the point
        with torch.random.fork_rng():
            torch.set_rng_state(state[0])
            answer = candidates.answer(request, made, cell.workload)
            state[0] = torch.get_rng_state()
        np.random.set_state(numpys)  # noqa: NPY002
        random.setstate(pythons)
        return answer

    return Remote(ask, cell_of("x", point), PREPARED)


class Deed(nn.Module):
    """Calls an `attend` provided by the test."""

    def __init__(self, attend):
        super().__init__()
        self.deed = attend

    def attend(self, query, key, value, mask):
        return self.deed(query, key, value, mask)


def doing(attend) -> Remote:
    return apart(Implementation(build=lambda _: Deed(attend), source="a test"))


def call_of(point: Workload = POINT):
    return call_on(place(draw_normal(point, 0), point), point)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).mT,
        torch.arange(25.0)[1:].view(2, 12),
        torch.arange(3.0)[:, None].expand(3, 5),
        torch.arange(6, dtype=torch.bfloat16)[::2],
        torch.empty(0, 4),
        torch.tensor(float("nan")),
    ],
)
def test_a_tensor_arrives_with_its_values_and_its_layout(tensor):
    exchange = TensorFile()
    (places,) = exchange.send({"first": torch.ones(3), "it": tensor})
    found = TensorFile(exchange.path).receive(places["it"])
    assert found.dtype == tensor.dtype
    assert (found.shape, found.stride(), found.storage_offset()) == (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )
    assert torch.equal(found.nan_to_num(), tensor.nan_to_num())


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["fused", "sdpa", "module_list", "torch_mha"])
@pytest.mark.parametrize("axes", [{}, {"scope": "module"}, {"layout": "value_in_key"}])
def test_code_in_another_process_is_judged_as_in_this_one(name, axes):
    point = Workload(seq_len=9, num_heads=2, head_dim=4, direction="forward_backward", **axes)
    made = implementation(name)
    if made.unsupported(point):
        pytest.skip(made.unsupported(point))
    references = References(point, 0)
    here, there = check(references, made), check(references, apart(made, point))
    assert facts(there) == facts(here)
    assert there.agrees


def test_code_is_not_judged_at_sizes_that_it_declares_unsupported():
    """Rules have a short length of their own."""
    whole = lambda workload: None if workload.seq_len % 32 == 0 else "whole tiles only"  # noqa: E731
    even = lambda q, k, v, _: F.scaled_dot_product_attention(q, k, v, is_causal=True) * (q.shape[2] % 32 == 0)  # noqa: E731
    made = Implementation(build=lambda _: Deed(even), source="a test", unsupported=whole)
    point = msgspec.structs.replace(POINT, seq_len=64)
    assert check(References(point, 0), apart(made, point)).agrees


def test_inference_mode_is_checked_and_a_failure_there_is_noted():
    def weights(query, key, mask):
        return (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(mask.hidden, -torch.inf).softmax(-1)

    def doubled(query, key, value, mask):
        return weights(query, key, mask) @ value * (1 + torch.is_inference_mode_enabled())

    def seeds(query, key, value, mask):
        if torch.is_inference_mode_enabled():
            torch.manual_seed(torch.initial_seed() + 1)
        return weights(query, key, mask) @ value

    def refused(query, key, value, mask):
        assert not torch.is_inference_mode_enabled()
        return weights(query, key, mask) @ value

    found = check(References(POINT, 0), doing(doubled))
    assert [each.rule for each in found.broken_rules] == ["without gradients"]
    assert "inference_mode" in found.broken_rules[0].found
    assert "seed" in check(References(POINT, 0), doing(seeds)).broken_rules[0].found
    found = check(References(POINT, 0), doing(refused))
    assert (found.agrees, found.notes[0].rule) == (True, "without gradients")


def test_a_changed_input_is_a_side_effect():
    def zeroes(query, key, value, mask):
        key.data.zero_()
        return query + value

    call = call_of()
    with pytest.raises(SideEffectError, match="changed its input key"):
        doing(zeroes).call(call)
    assert call.tensors["key"].count_nonzero() > 0


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query):
        return query * 1.0

    @staticmethod
    def backward(ctx, grad_output):
        grad_output.mul_(2.0)
        return grad_output.clone()


def test_a_changed_incoming_gradient_is_a_side_effect():
    caller = doing(lambda query, key, value, mask: Doubling.apply(query))
    answer = caller.call(call_of())
    with pytest.raises(SideEffectError, match="backward pass changed its input gradient"):
        caller.pull_back(answer, torch.ones_like(answer.output))


def test_two_backward_passes_may_wait():
    caller, call = doing(lambda query, key, value, mask: query**2), call_of()
    answers = [caller.call(call) for _ in range(2)]
    for answer, size in zip(answers, (3.0, 5.0), strict=True):
        found = caller.pull_back(answer, torch.full_like(answer.output, size))
        torch.testing.assert_close(found["gradient of query"], 2 * size * call.tensors["query"].detach())
        assert found["gradient of key"].count_nonzero() == 0


def test_an_output_that_a_later_call_overwrites_is_named():
    workspace = torch.empty(POINT.batch_size, 2, 9, 4)

    def attend(query, key, value, mask):
        with torch.no_grad():
            return workspace.copy_(query)

    caller, call = doing(attend), call_of(msgspec.structs.replace(POINT, direction="inference"))
    first, second = (caller.call(each) for each in (call, call))
    assert second.overwritten == ()  # the same bytes
    call.tensors["query"].mul_(2.0)
    assert caller.call(call).overwritten == (first.number, second.number)


def test_a_module_is_built_by_its_first_call_and_forgotten_there_when_nobody_uses_it():
    candidates, requests = Candidates(), []
    made = Implementation(build=lambda _: Deed(lambda query, *_: query * 1.0), source="a test")

    def ask(function, _result, *, cell, request):
        requests.append(function)
        return candidates.answer(request, made, cell.workload)

    caller = Remote(ask, cell_of("x", POINT), PREPARED)
    for _ in range(5):
        caller.call(call_of())
    assert len(candidates._instances) <= 2
    assert requests == ["compute"] * 5


def test_a_subclass_of_tensor_is_no_output():
    class Lazy(torch.Tensor):
        pass

    caller = doing(lambda query, key, value, mask: (query * 1.0).as_subclass(Lazy))
    with pytest.raises(FormError, match=r"Lazy; it must be exactly a torch\.Tensor"):
        caller.call(call_of())


@pytest.mark.parametrize("raised", ["TypeError", ""])
def test_an_error_there_is_one_here_and_a_lost_process_passes_through_everything(raised):
    def ask(*_, **__):
        return Failed(status=Status.crashed, message="TypeError: no", raised=raised, said="no")

    with pytest.raises(CandidateError if raised else CandidateLostError) as found:
        Remote(ask, cell_of("x", POINT), PREPARED).call(call_of())
    assert found.value.failed.message == "TypeError: no"
    if raised:
        assert type(found.value).__name__ == "TypeError"
        assert str(found.value) == "no"
    assert isinstance(found.value, Exception) is bool(raised)


class DropsWithLayer(nn.Module):
    """Drops weights by nn.Dropout, and draws weights in its constructor, as most modules do."""

    def __init__(self):
        super().__init__()
        self.dropout, self.layer = nn.Dropout(0.5), nn.Linear(3, 3)

    def attend(self, query, key, value, mask):
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(mask.hidden, -torch.inf)
        return self.dropout(scores.softmax(-1)) @ value


class DropsAgain(nn.Module):
    """Draws the dropped weights anew in the backward pass."""

    dropout = 0.0

    def attend(self, query, key, value, mask):
        scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(mask.hidden, -torch.inf)
        return OtherGradient.apply(scores.softmax(-1), self.dropout) @ value


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("module", "broken"), [(DropsWithLayer, ""), (DropsAgain, "dropout gradients")])
def test_dropout_is_judged_as_in_ones_own_process_from_the_same_draws(module, broken):
    made = Implementation(build=lambda _: module(), source="a test", has_dropout=True)
    references = References(DROPPING, 3)
    with torch.random.fork_rng():  # a module draws from the judge's generator
        here = check(references, made)
    with torch.random.fork_rng():
        there = check(references, apart(made, DROPPING))
    assert facts(there) == facts(here)
    assert [each.rule for each in there.broken_rules] == [broken] * bool(broken)
    assert len(there.rules) > len(check(References(POINT, 3), made).rules)


def test_what_a_candidate_draws_from_does_not_say_which_inputs_are_drawn():
    seen = set()

    def notes(query, key, value, mask):
        seen.add(torch.initial_seed())
        return query * 1.0

    made = Implementation(build=lambda _: Deed(notes), source="a test", has_dropout=True)
    for module in (made, apart(made, DROPPING)):
        dropout.examine(module, DROPPING, 3)
    assert len(seen) == 1
    assert not seen & {3, 99}


def test_bytes_that_were_not_sent_are_missed():
    exchange, sent = TensorFile(), torch.arange(50, dtype=torch.int16)
    (places,) = exchange.send({"first": torch.zeros(3), "second": sent, "none": torch.zeros(0)})
    assert torch.equal(exchange.receive(places["second"]), sent)
    assert exchange.receive(places["none"]).numel() == 0
    with pytest.raises(ValueError, match="not sent"):
        exchange.read(msgspec.structs.replace(places["second"], num_bytes=101))


def test_operands_that_share_memory_share_it_there_too():
    seen = []

    def attend(query, key, value, mask):
        memory = [each.untyped_storage().data_ptr() for each in (query, key, value)]
        seen.append((query is key, len(set(memory)), value.storage_offset()))
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    caller, call = doing(attend), call_of()
    one, given = call.tensors["query"], list(call.tensors)
    grad = torch.ones_like(one)

    def gradients(*tensors):
        answer = caller.call(replace(call, tensors=dict(zip(given, tensors, strict=True)), grad_output=grad))
        return [answer.gradients[f"gradient of {name}"] for name in given]

    total = gradients(one, one, call.tensors["value"])
    alone = gradients(one, one.detach().clone(), call.tensors["value"])
    gradients(*torch.stack([one.detach()] * 3).unbind())
    assert seen == [(True, 2, 0), (False, 3, 0), (False, 1, 2 * one.numel())]
    torch.testing.assert_close(total[0], alone[0] + alone[1])
    torch.testing.assert_close(total[1], total[0])


def test_a_mask_is_handed_on_in_its_form():
    seen = []

    def attend(query, key, value, *, mask):
        seen.append((tuple(mask.shape), mask.stride(-1)))
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    caller, call = apart(from_function(attend, "mine.py:mine")), call_of()
    forms = ("", "transposed", "expanded over batch rows and heads", "one for each head")
    outputs = [caller.call(call.under(form=form)).output for form in forms]
    assert seen == [((1, 1, 9, 9), 1), ((1, 1, 9, 9), 9), ((1, 2, 9, 9), 1), ((1, 2, 9, 9), 1)]
    torch.testing.assert_close(outputs[1], outputs[0])
    torch.testing.assert_close(outputs[3][:, 0], outputs[0][:, 0])
    assert not torch.allclose(outputs[3][:, 1], outputs[0][:, 1])


def replying(change):
    """Return the caller of a right function whose process sends replies that `change` has changed."""
    candidates, made = Candidates(), implementation("fused")

    def ask(_function, _result, *, cell, request):
        return change(candidates.answer(request, made, cell.workload))

    return Remote(ask, cell_of("x", POINT), PREPARED)


def without(*names):
    return lambda reply: msgspec.structs.replace(
        reply, tensors={name: each for name, each in reply.tensors.items() if name not in names}
    )


def with_output(**fields):
    def change(reply):
        output = msgspec.structs.replace(reply.tensors["output"], **fields)
        return msgspec.structs.replace(reply, tensors=reply.tensors | {"output": output})

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without("output"), "there is no output"),
        (without("gradient of key"), "gradient of key is missing"),
        (with_output(shape=(1, 2, 9, 3)), "the output has shape"),
        (with_output(dtype="int32"), "the output has dtype"),
        (with_output(dtype="nn"), "no allowed form"),
        (with_output(stride=(72, 36, 4, -1)), "no allowed form"),
        (with_output(offset=1), "exceeds its storage"),
        (with_output(num_bytes=2**40), "larger than any"),
    ],
    ids=["no output", "no gradient", "shape", "dtype", "no dtype", "stride", "offset", "size"],
)
def test_a_reply_that_code_under_test_has_changed_is_refused(change, words):
    call = call_of()
    with pytest.raises(ValueError, match=words):
        replying(change).call(replace(call, grad_output=torch.ones_like(call.tensors["query"])))


def test_frozen_operands_get_no_gradient_and_the_last_of_several_passes_counts():
    caller, call = doing(lambda query, key, value, mask: query * key * value), call_of()
    ask = replace(call, grad_output=torch.ones_like(call.tensors["query"]), frozen=("key", "value"), num_passes=2)
    (found,) = caller.call(ask).gradients.items()
    assert found[0] == "gradient of query"
    torch.testing.assert_close(found[1], call.tensors["key"] * call.tensors["value"])


class WithBuffer(Attention):
    """Keeps the weight of its output projection as a buffer, so that it is never trained."""

    def __init__(self, weights):
        super().__init__(weights)
        weight = self.out.weight.detach()
        del self.out.weight
        self.out.register_buffer("weight", weight)

    def attend(self, query, key, value, mask):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


@pytest.mark.parametrize("is_remote", [False, True])
def test_a_weight_that_is_no_parameter_has_a_wrong_gradient(is_remote):
    made, point = Implementation(build=WithBuffer, source="a test"), msgspec.structs.replace(POINT, scope="module")
    found = check(References(point, 0), apart(made, point) if is_remote else made)
    wrong = {each.tensor for _, each in found.tensors() if not each.agrees}
    assert "gradient of out weights" in wrong
    assert "output" not in wrong


def test_new_weights_reach_the_same_module():
    seen, point = [], msgspec.structs.replace(POINT, scope="module", direction="inference")

    class Noting(Attention):
        def attend(self, query, key, value, mask):
            seen.append(id(self))
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    caller, call = apart(Implementation(build=Noting, source="a test"), point), call_of(point)
    before = caller.call(call).output
    call.instance.weights = call.instance.weights.map(lambda tensor: tensor.flip(-1))
    after = caller.call(call).output
    assert len(set(seen)) == 1
    torch.testing.assert_close(after, caller.call(replace(call, instance=Instance(call.instance.weights))).output)
    assert not torch.allclose(after, before)


def test_code_that_writes_into_its_input_without_gradients_alone_is_wrong():
    def scales(query, key, value, mask):
        scaled = query / query.shape[-1] ** 0.5
        if not torch.is_grad_enabled():
            query.data.mul_(0.5)
        return (scaled @ key.mT).masked_fill(mask.hidden, -torch.inf).softmax(-1) @ value

    found = check(References(msgspec.structs.replace(POINT, direction="forward"), 0), doing(scales))
    assert "changed its input query" in found.broken_rules[0].found


def test_a_view_of_a_large_buffer_is_sent_without_the_rest():
    buffer = torch.arange(60.0).view(3, 4, 5)
    assert compact(buffer[1]).untyped_storage().nbytes() == 80
    assert torch.equal(compact(buffer[1]), buffer[1])
    assert compact(buffer) is buffer


@pytest.mark.parametrize("name", ["fused", "torch_mha"])
def test_gradients_of_weights_that_are_views_arrive(name):
    point = Workload(seq_len=3, num_heads=2, head_dim=64, direction="forward_backward", scope="module")
    found = check(References(point, 0, is_brief=True), apart(implementation(name), point))
    assert found.agrees, found.diagnosis
    assert {each.tensor for _, each in found.tensors()} > {"gradient of query weights", "gradient of value weights"}
