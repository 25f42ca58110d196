"""Calls of the code under test as data, and `Here`, which makes them in this process.

The check builds a `Call`, hands it to a `Caller` and gets an `Answer`; it never sees a module. Callers are `Here`, for
code in the same process, and processes/remote.py, for code in another one, where `Here` makes the calls. Shapes as in
the contract.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from attnbench.case import (
    TORCH_DTYPES,
    Case,
    Inputs,
    bind,
    output_shape,
    pull_back,
    pull_back_twice,
    set_dropout,
)
from attnbench.checking import memory, side_effects
from attnbench.contract import BoundMask, Implementation, Weights
from attnbench.contract.functions import FunctionAttention
from attnbench.workloads.workload import Workload

NUM_CALLS = 4
"""Number of latest calls whose outputs and graphs are kept: several forward calls may precede their backward passes."""
WEIGHTS = "weights"
"""The name, in `Call.frozen`, of all parameters of the module."""
GRAD, NO_GRAD, INFERENCE = "grad", "no_grad", "inference"  # modes of a call: torch.enable_grad, no_grad, inference_mode


class FormError(ValueError):
    """A tensor has the wrong type, layout, shape or dtype; the message says which."""


@dataclass(eq=False)
class Instance:
    """One module of the implementation under test; the object itself identifies the module.

    If `weights` is replaced, the next call loads the new weights into the same module, in place.
    """

    weights: Weights


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of the code under test, at `workload`, on `tensors` by name (as in `Inputs`), under `mask`.

    Tensors that are the same object, or share memory, do so in the call, too. Calls with the same `instance` use
    one module. If `grad_output`, the output's gradient, is given, the answer has the gradients of all tensors and
    weights except those in `frozen`, from the last of `num_passes` backward passes. If `seed` is given, it becomes
    torch's random seed before the call.
    """

    workload: Workload
    instance: Instance
    tensors: dict[str, Tensor]
    mask: BoundMask
    mode: str = GRAD
    grad_output: Tensor | None = None
    num_passes: int = 1
    frozen: Collection[str] = ()
    seed: int | None = None

    def under(self, **of_mask: Any) -> "Call":  # noqa: ANN401 - any attribute
        """Return this call with a new mask of its workload; `of_mask` sets attributes of this BoundMask."""
        mask = bind(self.workload)
        vars(mask).update(of_mask)
        mask.change = memory.MASK_FORMS.get(mask.form, mask.change)
        return replace(self, mask=mask)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a call, and its gradients as "gradient of NAME"; they must not be changed.

    `number` identifies the call in the process that made it. `overwritten` contains the numbers of earlier calls whose
    outputs have changed since.
    """

    call: Call
    output: Tensor
    gradients: dict[str, Tensor]
    number: int
    overwritten: Collection[int] = ()


class Caller(Protocol):
    """Makes calls of one implementation; its exceptions propagate.

    `is_approximate` and `has_cache` are attributes of the implementation. `has_pack` says whether the latest module has
    a method `pack`, which maps canonical weights (`Weights`) to the module's parameters.
    """

    is_approximate: bool
    has_cache: bool
    has_pack: bool

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the implementation does not support a workload; None if it does, or if only a call can show it."""

    def call(self, call: Call) -> Answer:
        """Make a call.

        Raises:
            FormError: the output or a gradient has the wrong type, shape or dtype.
            SideEffectError: the call changed its inputs, the mask or a random seed.
        """

    def pull_back(self, answer: Answer, grad_output: Tensor) -> dict[str, Tensor]:
        """Return the gradients of one of the last NUM_CALLS calls, as in `Answer`; {} if the call built no graph.

        No call in another mode may use the same tensors or the same instance in between.

        Raises:
            FormError: a gradient has the wrong type.
            SideEffectError: the backward pass changed an input, the output's gradient, the mask or a random seed.
        """

    def pull_back_twice(self, answer: Answer, grad_output: Tensor, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return second derivatives of an earlier call by name: gradients of s, the sum of first gradients * `along`.

        `along` has one tensor for each differentiated input, in the shape of this input. Inputs that do not affect s
        are missing from the result.
        """


def call_on(inputs: Inputs, workload: Workload, *, mode: str = "", grad_output: Tensor | None = None) -> Call:
    """Build a call of a new module on these inputs, without copying them.

    The default `mode` is NO_GRAD if the workload's direction is inference, else GRAD.
    """
    alike = {id(tensor): tensor.detach() for tensor in inputs.tensors.values()}
    return Call(
        workload=workload,
        instance=Instance(inputs.weights),
        tensors={name: alike[id(tensor)] for name, tensor in inputs.tensors.items()},
        mask=bind(workload),
        mode=mode or (NO_GRAD if workload.direction == "inference" else GRAD),
        grad_output=grad_output,
    )


@dataclass
class _Called:
    """A call whose graph is kept: its output, a copy of it, and the inputs and parameters that get gradients."""

    call: Call
    module: nn.Module
    output: Tensor
    copy: Tensor
    inputs: dict[str, Tensor]
    parameters: dict[str, Tensor] | None  # None: the weights get no gradients


class Here:
    """Makes calls of an implementation in this process; `on_step` is called before each backward pass of a call."""

    def __init__(self, implementation: Implementation, on_step: Callable[[], object] = lambda: None) -> None:
        self.implementation, self.on_step = implementation, on_step
        self._modules: WeakKeyDictionary[Instance, tuple[nn.Module, Weights]] = WeakKeyDictionary()
        self._of_function: FunctionAttention | None = None  # the latest module, if it only calls a function
        self._calls: OrderedDict[int, _Called] = OrderedDict()
        self._numbers = itertools.count()
        self.is_approximate, self.has_cache = implementation.is_approximate, implementation.has_cache
        self.has_pack = False

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the implementation does not support a workload; None if it does."""
        return self.implementation.unsupported(workload)

    def call(self, call: Call) -> Answer:
        """Make a call; see `Caller`."""
        while len(self._calls) >= NUM_CALLS:
            self._calls.popitem(last=False)
        module = self._module(call)
        needs = {*call.tensors, WEIGHTS} - {*call.frozen} if call.mode == GRAD else set[str]()
        for name, tensor in call.tensors.items():
            tensor.requires_grad_(name in needs)
        has_weights = WEIGHTS in needs and call.workload.scope == "module"
        for parameter in module.parameters():
            parameter.requires_grad_(has_weights)
        case = Case(workload=call.workload, module=module, tensors=call.tensors, mask=call.mask)
        if call.seed is not None:
            torch.manual_seed(call.seed)
        with side_effects.watch_call(call.tensors, call.mask) as faults, _mode(call.mode):
            output = case.output()
        side_effects.require_faultless(faults)
        require_form(call.workload, output)
        if output.device != (where := next(iter(call.tensors.values())).device):
            raise FormError(f"the output is on {output.device}, and its inputs are on {where}")
        number, copy = next(self._numbers), output.detach().clone()
        overwritten = tuple(each for each, called in self._calls.items() if _is_overwritten(called))
        inputs = {name: tensor for name, tensor in call.tensors.items() if name in needs}
        parameters = dict[str, Tensor](module.named_parameters()) if has_weights else None
        self._calls[number] = _Called(call, module, output, copy, inputs, parameters)
        gradients = dict[str, Tensor]()
        if call.grad_output is not None:
            for left in reversed(range(call.num_passes)):
                self.on_step()
                gradients = self.pull_back_by(number, call.grad_output, retain_graph=left > 0)
        return Answer(call=call, output=copy, gradients=gradients, number=number, overwritten=overwritten)

    def pull_back(self, answer: Answer, grad_output: Tensor) -> dict[str, Tensor]:
        """Return the gradients of an earlier call; see `Caller`."""
        return self.pull_back_by(answer.number, grad_output)

    def pull_back_by(self, number: int, grad_output: Tensor, *, retain_graph: bool = True) -> dict[str, Tensor]:
        """Return the gradients of an earlier call by its number; see `Caller.pull_back`."""
        called = self._calls[number]
        if not called.output.requires_grad:
            return {}
        given, parameters = called.call.tensors | {"gradient": grad_output}, called.parameters or {}
        leaves = [*called.inputs.values(), *parameters.values()]
        with side_effects.watch_call(given, called.call.mask, name="backward pass") as faults:
            pulled = pull_back(called.output, leaves, grad_output, retain_graph=retain_graph)
        side_effects.require_faultless(faults)
        made = [torch.zeros_like(leaf) if each is None else each for leaf, each in zip(leaves, pulled, strict=True)]
        found = dict(zip(called.inputs, made, strict=False))
        of_parameters = dict(zip(parameters, made[len(found) :], strict=True))
        for name, gradient in (found | of_parameters).items():
            require_plain(f"gradient of {name}", gradient)
        if called.parameters is not None and hasattr(called.module, "pack"):
            found |= canonical_gradients(called.module, called.call.instance.weights, of_parameters)
        return {f"gradient of {name}": gradient for name, gradient in found.items()}

    def pull_back_twice(self, answer: Answer, grad_output: Tensor, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the second derivatives of an earlier call; see `Caller`."""
        return self.pull_back_twice_by(answer.number, grad_output, along)

    def pull_back_twice_by(self, number: int, grad_output: Tensor, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the second derivatives of an earlier call by its number; see `Caller.pull_back_twice`."""
        called = self._calls[number]
        leaves = [called.inputs[name] for name in along]
        made = pull_back_twice(called.output, leaves, grad_output, [*along.values()])
        return {name: each.detach() for name, each in zip(along, made, strict=True) if each is not None}

    def _module(self, call: Call) -> nn.Module:
        """Return the module of a call's instance, built at first use, with the instance's current weights.

        In scope `attention` a function needs no weights, and its module keeps nothing, so all its calls use one module.

        Raises:
            ValueError: in scope `attention`, the module has no `attend`.
        """
        instance, workload = call.instance, call.workload
        module, loaded = self._modules.get(instance, (None, None))
        if workload.scope == "attention" and self._of_function is not None:
            module = self._of_function
        elif module is None or loaded is not instance.weights:
            with side_effects.watch_call({}):  # restores the random state: a constructor is allowed to set a seed
                if module is None:
                    module = self.implementation.build(instance.weights).eval()
                else:
                    with torch.no_grad():
                        module.load_state_dict(module.pack(instance.weights), strict=False)  # type: ignore[operator]
            self._modules[instance] = module, instance.weights
            self._of_function = module if isinstance(module, FunctionAttention) else None
            self.has_pack = hasattr(module, "pack")
        if workload.scope == "attention" and not hasattr(module, "attend"):
            raise ValueError(f"{type(module).__name__} has no attend(query, key, value, mask): choose scope=module")
        if self.implementation.has_dropout:
            set_dropout(module, workload.dropout)
        return module


def caller_of(candidate: Implementation | Caller) -> Caller:
    """Return the caller of an implementation in this process; return any other caller unchanged."""
    return Here(candidate) if isinstance(candidate, Implementation) else candidate


def _mode(name: str) -> AbstractContextManager[Any]:
    return torch.inference_mode() if name == INFERENCE else torch.set_grad_enabled(name == GRAD)


def _is_overwritten(called: _Called) -> bool:
    """Return whether a later call changed the output of a call; False if the output shares memory with an input.

    If it did, the kept copy is replaced by the changed output, so that one change counts once.
    """
    now = called.output.detach()
    if now.untyped_storage().data_ptr() in {each.untyped_storage().data_ptr() for each in called.call.tensors.values()}:
        return False
    is_changed = not torch.equal(side_effects.as_bytes(now), side_effects.as_bytes(called.copy))
    if is_changed:
        called.copy = now.clone()
    return is_changed


def canonical_gradients(module: nn.Module, weights: Weights, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert gradients of a module's parameters (`given`) to gradients of the canonical `weights`, as `NAME weights`.

    The module's method `pack` maps weights to parameters. It is linear, so autograd applies its transpose. The gradient
    of a weight that no parameter contains is 0.

    Raises:
        ValueError: `pack` does not name every parameter, so some gradient would go unchecked.
    """
    with torch.enable_grad():
        watched = weights.filled().map(lambda tensor: tensor.detach().clone().requires_grad_())
        packed: dict[str, Tensor] = module.pack(watched)  # type: ignore[operator]
        if unnamed := set(given) - set(packed):
            raise ValueError(f"pack names no {', '.join(sorted(unnamed))}: give it every parameter")
        canonical = watched.tensors()
        reached = {name: each for name, each in given.items() if packed[name].requires_grad}  # depends on some weight
        made = [torch.zeros_like(each) for each in canonical.values()]
        if reached:
            ways = [packed[name] for name in reached]
            options = {"allow_unused": True, "materialize_grads": True}
            made = list(torch.autograd.grad(ways, [*canonical.values()], [*reached.values()], **options))
    return dict(zip((f"{name} weights" for name in canonical), made, strict=True))


def require_gradients(call: Call, gradients: Mapping[str, Tensor], *, has_pack: bool) -> None:
    """Require a gradient of each input and weight that needs one, in the shape and dtype of that input or weight.

    Raises:
        FormError: a gradient is missing, or has another shape or dtype.
    """
    needed = {name: tensor for name, tensor in call.tensors.items() if name not in call.frozen}
    if has_pack and call.workload.scope == "module" and WEIGHTS not in call.frozen:
        needed |= {f"{name} weights": tensor for name, tensor in call.instance.weights.tensors().items()}
    for name, tensor in needed.items():
        gradient = gradients.get(f"gradient of {name}")
        if gradient is None or (gradient.shape, gradient.dtype) != (tensor.shape, tensor.dtype):
            raise FormError(f"the gradient of {name} is missing, or has another shape or dtype")


def require_form(workload: Workload, output: Tensor) -> None:
    """Raise FormError if the output has the wrong type, shape or dtype."""
    require_plain("output", output)
    expected = output_shape(workload)
    if tuple(output.shape) != expected:
        raise FormError(f"the output has shape {tuple(output.shape)}, not {expected}")
    if output.dtype != TORCH_DTYPES[workload.dtype]:
        raise FormError(f"the output has dtype {output.dtype}, not {workload.dtype}")


def require_plain(name: str, tensor: object) -> None:
    """Raise FormError unless `tensor` is dense and exactly a torch.Tensor; a subclass might delay its computation."""
    if type(tensor) is not Tensor:
        kind = type(tensor)
        raise FormError(f"the {name} is a {kind.__module__}.{kind.__qualname__}; it must be exactly a torch.Tensor")
    if tensor.layout is not torch.strided:
        raise FormError(f"the {name} has the layout {tensor.layout}; it must be dense (torch.strided)")
