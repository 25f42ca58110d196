"""Side effects of a call are found and named, and do not affect later checks."""

import contextlib

import pytest
import torch

from attnbench.case import bind
from attnbench.checking import side_effects
from attnbench.checking.agreement import References, check
from attnbench.contract import Implementation
from attnbench.workloads.workload import Workload
from tests.checking.textbook import Textbook


class ChangesGradient(Textbook):
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, output):
            return output.clone()

        @staticmethod
        def backward(ctx, grad):
            right = grad.clone()
            grad.mul_(2)
            return right

    def attend(self, query, key, value, mask):
        return self.Function.apply(super().attend(query, key, value, mask))


class ReadsLastForward(Textbook):
    """Its backward pass reads the tensors of the most recent forward pass, whichever that was."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, attend, query, key, value):
            ctx.attend = attend
            ReadsLastForward.last = query.detach(), key.detach(), value.detach()
            return attend(query, key, value)

        @staticmethod
        def backward(ctx, grad):
            with torch.enable_grad():
                given = [tensor.clone().requires_grad_() for tensor in ReadsLastForward.last]
                return None, *torch.autograd.grad(ctx.attend(*given), given, grad)

    def attend(self, query, key, value, mask):
        def attend(*given):
            return Textbook.attend(self, *given, mask)

        return self.Function.apply(attend, query, key, value)


class ChangesMask(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        mask.hidden[..., -1] = True  # idempotent
        return out


class ChangesMaskUnseen(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        mask.added(query.dtype).data[..., 0] = 0.5  # the tensor's version does not notice
        return out


class SetsSeed(Textbook):
    def attend(self, query, key, value, mask):
        torch.manual_seed(7)
        return super().attend(query, key, value, mask)


class SetsSeedBackward(Textbook):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        if out.requires_grad:
            out.register_hook(lambda grad: (torch.manual_seed(7), None)[1])
        return out


class Subclass(torch.Tensor):
    pass


class ReturnsSubclass(Textbook):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask).as_subclass(Subclass)


POINT = Workload(batch_size=2, seq_len=21, num_heads=2, head_dim=8, mask="causal", direction="forward_backward")


@pytest.fixture(autouse=True)
def _own_seed():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        yield


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("module", "rule", "said"),
    [
        (ChangesGradient, side_effects.INPUTS, "backward pass changed its input gradient"),
        (ReadsLastForward, "backward passes apart", "reads what belongs to the other call"),
        (ChangesMask, side_effects.MASK, "changed the mask that it was given (hidden)"),
        (ChangesMaskUnseen, side_effects.MASK, "bias in torch.float32"),
        (SetsSeed, side_effects.SEED, "the call set the seed of torch's generator"),
        (SetsSeedBackward, side_effects.SEED, "the backward pass set the seed"),
    ],
)
def test_a_fault_is_found_and_those_who_come_after_it_are_right(module, rule, said):
    references = References(POINT, 0)
    found = check(references, Implementation(build=module, source="a test"))
    assert [each.rule for each in found.broken_rules] == [rule]
    assert said in found.diagnosis
    after = check(references, Implementation(build=Textbook, source="a test"))
    assert after.agrees, after.diagnosis
    assert torch.initial_seed() == 1


def test_the_class_of_an_output_is_exactly_the_tensor():
    with pytest.raises(ValueError, match=r"test_side_effects\.Subclass; it must be exactly a torch\.Tensor"):
        check(References(POINT, 0), Implementation(build=ReturnsSubclass, source="a test"))


def test_a_mask_that_was_changed_is_made_anew_for_those_who_share_it():
    point = Workload(**(POINT.axes() | {"mask": "padding(20,7)+alibi"}))
    shared, right = bind(point), bind(point)
    shared.visible.logical_or_(shared.hidden)
    shared.added(torch.float32).zero_()
    assert shared.restore() == ["visible", "bias in torch.float32"]
    assert torch.equal(shared.visible, right.visible)
    assert torch.equal(shared.added(torch.float32), right.added(torch.float32))
    assert shared.restore() == []
    shared.visible.logical_not_()
    with side_effects.watch_call({}, shared) as seen:
        pass
    assert not seen  # it was changed before
    torch.manual_seed(1)
    with contextlib.suppress(RuntimeError), side_effects.watch_call({}, shared):
        shared.visible.logical_not_()
        torch.manual_seed(2)
        raise RuntimeError
    assert (torch.initial_seed(), shared.restore()) == (1, [])
