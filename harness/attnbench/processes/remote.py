"""A candidate (code under test) in another process, and the judge's stand-in for the candidate's module.

The judge draws inputs, computes the right answers and compares; it never imports the code under test. Both processes
exchange messages, and tensors as bytes in a shared file, so nothing that the candidate sends is executed. To the
checks, a stand-in behaves like a module in their own process: they see in-place changes of an input, a gradient or an
earlier output, and the candidate draws random numbers from the states of the judge's generators.
"""

import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import increment_version

from attnbench.case import GIVEN, Case, pull_back, pull_back_twice, set_dropout
from attnbench.checking import side_effects
from attnbench.checking.memory import MASK_FORMS
from attnbench.checking.reference import FormError, canonical_gradients, require_plain
from attnbench.contract import BoundMask, Implementation, Weights
from attnbench.devices import device
from attnbench.processes.messages import (
    FILES,
    Ask,
    Backward,
    Call,
    Failed,
    FailedError,
    Prepared,
    Target,
    TensorHeader,
    Tensors,
)
from attnbench.workloads.batch import rule_of
from attnbench.workloads.masks import parse_mask
from attnbench.workloads.workload import Workload

NUM_CALLS = 4
"""Number of latest calls whose outputs and graphs are kept: several forward calls may precede their backward calls."""
NUM_INPUTS = 32  # number of latest inputs that are kept, so that an input that is sent again gets the same memory
GRADIENT, ALONG, PARAMETER = "incoming gradient", "along ", "parameter "


class CandidateError(FailedError):
    """An error that a candidate raised in its process, raised here as a subclass with the original class's name."""

    def __str__(self) -> str:
        return self.failed.said


class CandidateLostError(BaseException):
    """The candidate's process is gone. This is no Exception, so handlers of the candidate's errors do not catch it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class TensorFile:
    """A file through which two processes exchange tensors. Each `send` overwrites it, so receivers copy it at once."""

    def __init__(self, path: str = "") -> None:
        """Open another process's file by its path; without a path, create a file."""
        if path:
            file, self.path = os.open(path, os.O_RDWR), path
        elif folder := os.environ.get(FILES):
            file, self.path = tempfile.mkstemp(dir=folder, prefix=f"{os.getpid()}-")  # the template removes it
        else:
            file = os.memfd_create("attnbench-tensors")
            self.path = f"/proc/{os.getpid()}/fd/{file}"
        self._file = file
        weakref.finalize(self, os.close, file)

    def send(self, *groups: Mapping[str, Tensor]) -> list[dict[str, TensorHeader]]:
        """Write the whole storages of all tensors; return for each group the headers of its tensors, by name."""
        places, at = list[dict[str, TensorHeader]](), 0
        for tensors in groups:
            places.append({})
            first = dict[int, str]()
            for name, tensor in tensors.items():
                held = bytes_of(tensor).cpu().numpy()
                self._write(held, at)
                places[-1][name] = TensorHeader(
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    stride=tensor.stride(),
                    offset=int(tensor.storage_offset()),
                    at=at,
                    num_bytes=held.size,
                    memory=tensor.untyped_storage().data_ptr(),
                    same_as=first.setdefault(id(tensor), name),
                )
                at += held.size
        return places

    def _write(self, held: npt.NDArray[np.uint8], at: int) -> None:
        rest = held.data
        while rest:  # the system writes at most 2 GiB at a time
            count = os.pwrite(self._file, rest, at)
            rest, at = rest[count:], at + count

    def read(self, place: TensorHeader) -> Tensor:
        """Return the bytes of a storage, uint8 (num_bytes,).

        Raises:
            ValueError: the file is too short.
        """
        held = torch.empty(place.num_bytes, dtype=torch.uint8)
        rest, at = held.numpy().data, place.at
        while rest:
            if not (count := os.preadv(self._file, [rest], at)):
                raise ValueError("a tensor was announced but not sent")
            rest, at = rest[count:], at + count
        return held

    def receive(self, place: TensorHeader, device: torch.device | str = "cpu") -> Tensor:
        """Return a copy of a sent tensor on `device`, with the layout of the original."""
        tensor = torch.empty(0, dtype=getattr(torch, place.dtype), device=device)
        return tensor.set_(self.read(place).to(device).untyped_storage(), place.offset, place.shape, place.stride)


def _contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def bytes_of(tensor: Tensor) -> Tensor:
    """View the whole storage of a tensor as bytes, uint8 (N,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def generators(name: str) -> list[Generator]:
    """Return the random generators for a candidate on the device `name`: the host's, and the device's if it has one."""
    index = torch.device(device(name).torch_device).index or 0
    return [torch.default_generator, *[*device(name).generators().values()][index : index + 1]]


def states_of(generators: Iterable[Generator]) -> tuple[bytes, ...]:
    """Return the state of each random generator, including its seed."""
    return tuple(each.get_state().numpy().tobytes() for each in generators)


def set_states(generators: Iterable[Generator], states: Iterable[bytes]) -> None:
    """Restore the state of each random generator."""
    for each, state in zip(generators, states, strict=True):
        each.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


def stand_in(remote: "Remote", prepared: Prepared) -> Implementation:
    """Create the implementation that the judge checks in place of the candidate in another process."""

    def unsupported(workload: Workload) -> str | None:
        is_longer = workload.scope == "module" and workload.kv_len != workload.seq_len
        return "it takes no context" if is_longer and not prepared.takes_context else None

    return Implementation(
        build=partial(remote.build, _Packs if prepared.has_pack else StandIn),
        source="another process",
        unsupported=unsupported,
        has_dropout=prepared.has_dropout,
        is_approximate=prepared.is_approximate,
        has_cache=prepared.has_cache,
    )


class Remote:
    """The judge's end of the connection, which builds stand-ins for a candidate's modules and sends their calls."""

    def __init__(self, ask: Ask, cell: Target) -> None:
        self._ask, self._cell = ask, cell
        self._exchange = TensorFile()
        self._generators = generators(cell.workload.device)
        self._states = tuple[bytes, ...]()  # the latest that both processes know
        self.num_modules = self.num_calls = 0
        self._outputs: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self.forgotten: list[int] = []

    def build(self, kind: "type[StandIn]", weights: Weights) -> nn.Module:
        """Build a stand-in for a module with `weights`; the candidate's process builds the module at its first call."""
        self.num_modules += 1
        module = kind(self, self.num_modules, weights)
        weakref.finalize(module, self.forgotten.append, self.num_modules)
        return module

    def call(self, stand_in: "StandIn", inputs: dict[str, Tensor], mask: BoundMask, *, needs: Iterable[str]) -> Tensor:
        """Make a forward call; return its output. `needs` names the inputs and weights that get a gradient."""
        self.num_calls += 1
        parameters = dict(stand_in.named_parameters())
        version = sum(each._version for each in parameters.values())  # noqa: SLF001 - counts changes in place
        parameters = {} if stand_in.sent_version == version else parameters
        stand_in.sent_version = version
        tensors, weights = self._exchange.send(inputs, parameters)
        reply = self._asked(
            Call,
            module=stand_in.number,
            call=self.num_calls,
            tensors=tensors,
            weights={name.removesuffix(" weights"): place for name, place in weights.items()},
            needs=tuple(needs),
            mask=str(mask.rule),
            sizes=mask.sizes,
            num_heads=mask.num_heads,
            scale=mask.scale,
            dropout=stand_in.dropout,
            mask_form=mask.form,
            world_size=mask.world_size,
            is_inference=mask.is_inference,
            is_training=mask.is_training,
            chunks=mask.chunks,
            cache=mask.cache,
        )
        self._see_changes(reply, inputs)
        output = self._exchange.receive(reply.tensors["output"], mask.device)
        self._outputs[self.num_calls] = output
        return output

    def backward(self, call: int, grad_output: Tensor, along: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return, by name, the gradients of a call or, with `along`, its second derivatives (case.pull_back_twice)."""
        tensors = {GRADIENT: grad_output} | {f"{ALONG}{name}": tensor for name, tensor in (along or {}).items()}
        reply = self._asked(Backward, call=call, tensors=self._exchange.send(tensors)[0])
        self._see_changes(reply, tensors)
        return {name: self._exchange.receive(place, grad_output.device) for name, place in reply.tensors.items()}

    def _see_changes(self, reply: Tensors, tensors: Mapping[str, Tensor]) -> None:
        """Raise an error if the reply names faults; repeat the candidate's in-place changes on the judge's tensors."""
        side_effects.require_faultless(reply.faults)
        for name, place in reply.changed.items():
            bytes_of(tensors[name]).copy_(self._exchange.read(place))
        for call, place in reply.changed_outputs.items():
            if (output := self._outputs.get(int(call))) is not None:
                output.data.copy_(self._exchange.receive(place))

    def _asked(self, kind: type[Backward], **fields: Any) -> Tensors:  # noqa: ANN401 - the fields of `kind`
        """Send a request to the candidate's process; return the reply.

        Raises:
            CandidateError: the candidate raised an exception.
            CandidateLostError: the candidate's process is gone.
        """
        forget, self.forgotten[:] = tuple(self.forgotten), []
        states = states_of(self._generators)
        random = () if states == self._states else states
        request = kind(exchange=self._exchange.path, forget=forget, random=random, **fields)
        reply = self._ask("compute", Tensors, cell=self._cell, request=request)
        self._states = states if isinstance(reply, Tensors) else ()
        if isinstance(reply, Tensors):
            if reply.random:
                set_states(self._generators, reply.random)
                self._states = reply.random
            return reply
        if not reply.raised:
            raise CandidateLostError(reply)
        raise type(reply.raised, (CandidateError,), {})(reply)


class StandIn(nn.Module):
    """A module whose calls are made in the candidate's process. Its parameters are the canonical weights."""

    def __init__(self, remote: Remote, number: int, weights: Weights) -> None:
        super().__init__()
        self.remote, self.number, self.dropout = remote, number, 0.0
        self.sent_version = -1  # the sum of the versions of the parameters when they were last sent
        for name, tensor in weights.tensors().items():
            self.register_parameter(f"{name} weights", nn.Parameter(tensor.detach(), requires_grad=False))

    def forward(self, x: Tensor, context: Tensor | None = None, *, mask: BoundMask) -> Tensor:
        """Call the module: tokens (B, T, D) and, in cross-attention, context (B, S, D) -> (B, T, D)."""
        return self.made_there({"x": x} if context is None else {"x": x, "context": context}, mask)

    def made_there(self, operands: dict[str, Tensor], mask: BoundMask) -> Tensor:
        """Make a call in the candidate's process; return its output."""
        inputs = {**operands, **mask.inputs}
        if not torch.is_grad_enabled():
            return self.remote.call(self, inputs, mask, needs=())
        output: Tensor = _RemoteCall.apply(self, mask, tuple(inputs), *inputs.values(), *self.parameters())  # type: ignore[no-untyped-call]
        return output

    def second_derivatives(self, output: Tensor, grad_output: Tensor, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the second derivatives of the call that returned `output`, by the names in `along`."""
        return self.remote.backward(output.grad_fn.call, grad_output, along)  # type: ignore[union-attr] # _RemoteCall

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Compute attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V)."""
        return self.made_there({"query": query, "key": key, "value": value}, mask)


class _Packs(StandIn):
    """A stand-in for a module with the method `pack`, which maps canonical weights to parameters."""

    def pack(self, weights: Weights) -> dict[str, Tensor]:
        """Return the canonical weights by the names of the stand-in's parameters, which are the same tensors."""
        return {f"{name} weights": tensor for name, tensor in weights.tensors().items()}


class _RemoteCall(torch.autograd.Function):
    """A call in the candidate's process, with its backward pass; a missing gradient is None."""

    @staticmethod
    def forward(ctx: Any, stand_in: StandIn, mask: BoundMask, inputs: tuple[str, ...], *tensors: Tensor) -> Tensor:  # noqa: ANN401
        """Make the call; `tensors` are the inputs, followed by the parameters."""
        ctx.names = (*inputs, *(name for name, _ in stand_in.named_parameters()))
        needs = [name for name, needed in zip(ctx.names, ctx.needs_input_grad[3:], strict=True) if needed]
        ctx.remote = stand_in.remote
        output = stand_in.remote.call(stand_in, dict(zip(inputs, tensors, strict=False)), mask, needs=needs)
        ctx.call = stand_in.remote.num_calls
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients of the arguments of `forward`, in their order."""
        gradients = ctx.remote.backward(ctx.call, grad_outputs[0])
        return None, None, None, *(gradients.get(name) for name in ctx.names)


@dataclass
class _Called:
    """A call whose graph is kept: its output, a copy of the output as sent, and the tensors that get gradients."""

    output: Tensor
    sent: Tensor
    leaves: dict[str, Tensor]
    module: int
    mask: BoundMask


class Candidates:
    """The candidate's end of the connection: its modules, and the inputs and results of their latest calls."""

    _exchange: TensorFile  # the judge's file
    _generators: list[Generator]  # the random generators of the request's device
    _states: tuple[bytes, ...]  # of the generators before the request

    def __init__(self) -> None:
        self._opened = lru_cache(maxsize=1)(TensorFile)
        self._modules: dict[int, tuple[nn.Module, Weights]] = {}
        self._inputs: OrderedDict[tuple[str, TensorHeader], Tensor] = OrderedDict()
        self._calls: OrderedDict[int, _Called] = OrderedDict()
        self._bound = cache(BoundMask)
        self._changed = cache(msgspec.structs.replace)  # of workloads

    def answer(self, request: Backward, implementation: Implementation, workload: Workload) -> Tensors:
        """Carry out a request of the judge; exceptions of the candidate propagate."""
        self._exchange = self._opened(request.exchange)
        for number in request.forget:
            self._modules.pop(number, None)
        self._generators = generators(workload.device)
        if request.random:
            set_states(self._generators, request.random)
        self._states = states_of(self._generators)
        return self._call(request, implementation, workload) if isinstance(request, Call) else self._backward(request)

    def _call(self, request: Call, implementation: Implementation, workload: Workload) -> Tensors:
        here = device(workload.device).torch_device
        if request.weights:
            sent = {name: self._exchange.receive(place, here) for name, place in request.weights.items()}
            weights = Weights(**sent)
            with side_effects.watch_call({}):  # restores the random state: a constructor is allowed to set a seed
                if request.module in self._modules:
                    module, _ = self._modules[request.module]
                    module.load_state_dict(module.pack(weights), strict=False)  # type: ignore[operator]
                else:
                    module = implementation.build(weights).eval()
                self._modules[request.module] = module, weights
        module, _ = self._modules[request.module]
        if implementation.has_dropout:
            set_dropout(module, request.dropout)
        tensors = self._received(request, here)  # the judge's tensors may be on the host
        for name, tensor in tensors.items():
            tensor.requires_grad_(name in request.needs)
        parameters = dict(module.named_parameters())
        has_weights = any(name not in tensors for name in request.needs)
        for parameter in parameters.values():
            parameter.requires_grad_(has_weights)
        named = {"num_heads": request.num_heads, "scale": request.scale, "world_size": request.world_size}
        cache = request.cache
        rule = parse_mask(request.mask) if cache is None else rule_of(cache.batch, cache.window)
        mask = self._bound(rule, request.sizes, here, cache=cache, **named)
        mask.form, mask.change = request.mask_form, MASK_FORMS.get(request.mask_form, lambda form, _: form)
        mask.is_training, mask.chunks = request.is_training, request.chunks
        mask.inputs = {name: tensor for name, tensor in tensors.items() if name not in GIVEN}
        scoped = self._changed(workload, scope="attention" if "query" in tensors else "module")
        sizes = dict(zip(("batch_size", "seq_len", "kv_len"), request.sizes, strict=True))
        if cache is None:
            there = self._changed(scoped, mask=request.mask, layout="contiguous", dropout=0.0, **sizes)
        else:
            there = self._changed(scoped, batch=cache.batch, shared_prefix=cache.shared_prefix)
        if reason := implementation.unsupported(there):  # rules and diagnoses use other sizes than the workload
            raise NotImplementedError(reason)
        mode = torch.inference_mode() if request.is_inference else torch.set_grad_enabled(bool(request.needs))
        with side_effects.watch_call({}, mask, inputs=tensors.values()) as seen, mode:
            output = Case(workload=scoped, module=module, tensors=tensors, mask=mask).output()
        require_plain("output", output)
        if output.device != (place := next(iter(tensors.values())).device):
            raise FormError(f"the output is on {output.device}, and its inputs are on {place}")
        leaves = {name: tensors[name] for name in request.needs if name in tensors}
        leaves = dict({id(tensor): (name, tensor) for name, tensor in leaves.items()}.values())  # each tensor once
        if has_weights:
            leaves |= {f"{PARAMETER}{name}": parameter for name, parameter in parameters.items()}
        copy = output.detach().clone()
        self._calls[request.call] = _Called(output, copy, leaves, request.module, mask)
        while len(self._calls) > NUM_CALLS:
            self._calls.popitem(last=False)
        return self._reply(request, tensors, {"output": copy}, seen)

    def _backward(self, request: Backward) -> Tensors:
        called = self._calls[request.call]
        module, weights = self._modules[called.module]
        grad_output = self._exchange.receive(request.tensors[GRADIENT], called.output.device)
        along = {
            name.removeprefix(ALONG): self._exchange.receive(place, called.output.device)
            for name, place in request.tensors.items()
            if name.startswith(ALONG)
        }
        if along:
            made = pull_back_twice(
                called.output, [called.leaves[name] for name in along], grad_output, [*along.values()]
            )
            second = {name: each for name, each in zip(along, made, strict=True) if each is not None}
            return self._reply(request, {GRADIENT: grad_output}, second, {})
        inputs = [grad_output, *called.leaves.values()]
        with side_effects.watch_call({}, called.mask, name="backward pass", inputs=inputs) as seen:
            gradients = pull_back(called.output, list(called.leaves.values()), grad_output, retain_graph=True)
        named, of_parameters = dict[str, Tensor | None](), dict[str, Tensor | None]()
        for name, gradient in zip(called.leaves, gradients, strict=True):
            if gradient is not None:
                require_plain(f"gradient of {name}", gradient)
            target = of_parameters if name.startswith(PARAMETER) else named
            target[name.removeprefix(PARAMETER)] = gradient
        if of_parameters:
            named |= canonical_gradients(module, weights, of_parameters)
        found = {name: each for name, each in named.items() if each is not None}
        return self._reply(request, {GRADIENT: grad_output}, found, seen)

    def _received(self, request: Call, here: str) -> dict[str, Tensor]:
        """Return the tensors of a call by name; a tensor that was sent before gets the same memory as before.

        Tensors that share memory in the judge's process also share it here. A tensor with several names is one tensor
        here. Two views of the same memory are two tensors, each with its own gradient.
        """
        received: dict[str, Tensor] = {}
        places = {name: msgspec.structs.replace(place, at=0) for name, place in request.tensors.items()}
        for name, place in places.items():
            others = [other for other in received if places[other].memory == place.memory and place.num_bytes]
            if place.same_as != name:
                received[name] = received[place.same_as]
            elif others:
                storage = received[others[0]].untyped_storage()
                empty = torch.empty(0, dtype=getattr(torch, place.dtype), device=here)
                received[name] = empty.set_(storage, place.offset, place.shape, place.stride)
            else:
                key = name, place
                if key in self._inputs:
                    held, sent = bytes_of(self._inputs[key]), self._exchange.read(request.tensors[name]).to(here)
                    if not torch.equal(held, sent):
                        held.copy_(sent)
                        increment_version(self._inputs[key])  # as if it were written in place
                    self._inputs.move_to_end(key)
                else:
                    self._inputs[key] = self._exchange.receive(request.tensors[name], here)
                received[name] = self._inputs[key]
        while len(self._inputs) > NUM_INPUTS:
            self._inputs.popitem(last=False)
        return received

    def _reply(
        self, request: Backward, given: Mapping[str, Tensor], made: dict[str, Tensor], faults: dict[str, str]
    ) -> Tensors:
        """Build a reply from the results, and from inputs and earlier outputs that were changed in place."""
        changed = {
            name: bytes_of(tensor).cpu()
            for name, tensor in given.items()
            if not torch.equal(bytes_of(tensor).cpu(), self._exchange.read(request.tensors[name]))
        }
        overwritten = {}
        inputs = {tensor.untyped_storage().data_ptr() for tensor in self._inputs.values()}
        for number, called in self._calls.items():
            now = called.output.detach()
            if now.untyped_storage().data_ptr() in inputs:  # a view of an input changes with that input
                continue
            if not torch.equal(bytes_of(now.contiguous()), bytes_of(called.sent.contiguous())):
                called.sent = overwritten[f"{number}"] = now.clone()
        groups = {"tensors": made, "changed": changed, "changed_outputs": overwritten}
        places = dict(zip(groups, self._exchange.send(*map(_contiguous, groups.values())), strict=True))
        states = states_of(self._generators)
        return Tensors(**places, faults=faults, random=() if states == self._states else states)
