"""A candidate (code under test) in another process, called by the judge.

The judge draws inputs, computes the right answers and compares; it never imports the code under test. Both processes
exchange messages, and tensors as bytes in a shared file, so nothing that the candidate sends is executed.
"""

import math
import os
import tempfile
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from attnbench.case import GIVEN, output_shape
from attnbench.checking import calls, side_effects
from attnbench.checking.calls import Answer, Here, Instance
from attnbench.checking.memory import MASK_FORMS
from attnbench.contract import BoundMask, Implementation, Weights
from attnbench.devices import device
from attnbench.processes.messages import (
    FILES,
    Ask,
    Asked,
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

NUM_INPUTS = 32  # number of latest inputs to keep, so that an input that is sent again gets the same memory
GRADIENT, ALONG = "incoming gradient", "along "
MOST_AT_ONCE = 2**30  # bytes: Linux transfers less than 2 GiB in one system call, and macOS refuses more


class CandidateError(FailedError):
    """An error that a candidate raised in its process; raised here as a subclass named after the original class."""

    def __str__(self) -> str:
        return self.failed.said


class CandidateLostError(BaseException):
    """The candidate's process is gone. This is no Exception, so handlers of the candidate's errors do not catch it."""

    def __init__(self, failed: Failed) -> None:
        super().__init__(failed.message)
        self.failed = failed


class TensorFile:
    """A file through which two processes exchange tensors. Each `send` overwrites it, so receivers copy at once."""

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
        """Write the whole storages of all tensors to the file; return the headers of each group's tensors, by name."""
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
        while rest:
            count = os.pwrite(self._file, rest[:MOST_AT_ONCE], at)
            rest, at = rest[count:], at + count

    def read(self, place: TensorHeader) -> Tensor:
        """Return the bytes of a storage, uint8 (num_bytes,).

        Raises:
            ValueError: the file is too short.
        """
        held = torch.empty(place.num_bytes, dtype=torch.uint8)
        rest, at = held.numpy().data, place.at
        while rest:
            if not (count := os.preadv(self._file, [rest[:MOST_AT_ONCE]], at)):
                raise ValueError("a tensor was announced but not sent")
            rest, at = rest[count:], at + count
        return held

    def receive(self, place: TensorHeader, device: torch.device | str = "cpu") -> Tensor:
        """Return a copy of a sent tensor on `device`, with the layout of the original.

        Raises:
            ValueError: there is no such dtype, or the layout does not fit into the storage.
        """
        dtype = getattr(torch, place.dtype, None)
        if not isinstance(dtype, torch.dtype) or min(place.offset, place.num_bytes, *place.shape, *place.stride) < 0:
            raise ValueError("a tensor was announced in no allowed form")
        if 0 not in place.shape:
            last = place.offset + sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
            if (last + 1) * dtype.itemsize > place.num_bytes:
                raise ValueError("a tensor was announced that exceeds its storage")
        tensor = torch.empty(0, dtype=dtype, device=device)
        return tensor.set_(self.read(place).to(device).untyped_storage(), place.offset, place.shape, place.stride)


def bytes_of(tensor: Tensor) -> Tensor:
    """View the whole storage of a tensor as bytes, uint8 (N,)."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def compact(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor whose storage holds nothing else; views, as of a packed weight, are copied."""
    dense = tensor.contiguous()
    is_alone = dense.untyped_storage().nbytes() == dense.numel() * dense.itemsize
    return dense if is_alone else dense.clone()


@lru_cache(maxsize=8)
def _encoded(workload: Workload) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(workload))


@lru_cache(maxsize=8)
def _decoded(workload: bytes, device: str) -> Workload:
    return msgspec.structs.replace(msgspec.json.decode(workload, type=Workload), device=device)


class Remote:
    """The judge's end of the connection, which calls a candidate in another process."""

    def __init__(self, ask: Ask, cell: Target, prepared: Prepared) -> None:
        self._ask, self._cell, self._prepared = ask, cell, prepared
        self._exchange = TensorFile()
        self._numbers: weakref.WeakKeyDictionary[Instance, tuple[int, Weights]] = weakref.WeakKeyDictionary()
        self._num_modules = 0
        self._forgotten: list[int] = []
        self.is_approximate, self.has_cache = prepared.is_approximate, prepared.has_cache
        self.has_pack = False

    def unsupported(self, workload: Workload) -> str | None:
        """Return why the candidate does not support a workload; None if it does, or if only a call can show it."""
        is_longer = workload.scope == "module" and workload.kv_len != workload.seq_len
        return "it takes no context" if is_longer and not self._prepared.takes_context else None

    def call(self, call: calls.Call) -> Answer:
        """Make a call; see `calls.Caller`."""
        instance, mask = call.instance, call.mask
        number, sent = self._numbers.get(instance, (0, None))
        if not number:
            self._num_modules += 1
            number = self._num_modules
            weakref.finalize(instance, self._forgotten.append, number)
        given = {} if call.grad_output is None else {GRADIENT: call.grad_output}
        of_module = {} if sent is instance.weights else instance.weights.tensors()
        tensors, weights = self._exchange.send(call.tensors | given, of_module)
        reply = self._asked(
            Call,
            module=number,
            tensors=tensors,
            weights=weights,
            frozen=tuple(call.frozen),
            mode=call.mode,
            num_passes=call.num_passes,
            seed=call.seed,
            workload=_encoded(call.workload),
            rule=str(mask.rule),
            form=mask.form,
            scale=mask.scale,
            is_training=mask.is_training,
            chunks=mask.chunks,
            cache=mask.cache,
        )
        self._numbers[instance] = number, instance.weights
        self.has_pack = reply.has_pack
        made = self._received(reply, call)
        if (output := made.pop("output", None)) is None:
            raise calls.FormError("there is no output")
        calls.require_form(call.workload, output)
        if made:
            calls.require_gradients(call, made, has_pack=self.has_pack)
        return Answer(call=call, output=output, gradients=made, number=reply.number, overwritten=reply.overwritten)

    def pull_back(self, answer: Answer, grad_output: Tensor) -> dict[str, Tensor]:
        """Return the gradients of an earlier call; see `calls.Caller`."""
        made = self._pulled_back(answer, {GRADIENT: grad_output})
        if made:
            calls.require_gradients(answer.call, made, has_pack=self.has_pack)
        return made

    def pull_back_twice(self, answer: Answer, grad_output: Tensor, along: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the second derivatives of an earlier call; see `calls.Caller`."""
        of_along = {f"{ALONG}{name}": tensor for name, tensor in along.items()}
        return self._pulled_back(answer, {GRADIENT: grad_output} | of_along)

    def _pulled_back(self, answer: Answer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        reply = self._asked(Backward, call=answer.number, tensors=self._exchange.send(tensors)[0])
        return self._received(reply, answer.call)

    def _received(self, reply: Tensors, call: calls.Call) -> dict[str, Tensor]:
        """Return the tensors of a reply by name, on the device of the call's mask.

        Raises:
            FormError: a tensor is larger than the largest of the call's output, inputs and weights is in float64.
        """
        known = [*call.tensors.values(), *call.instance.weights.tensors().values()]
        most = 8 * max(math.prod(output_shape(call.workload)), *(tensor.numel() for tensor in known))
        if any(header.num_bytes > most for header in reply.tensors.values()):
            raise calls.FormError("a result is larger than any that the call can have")
        where = call.mask.device
        return {name: self._exchange.receive(header, where) for name, header in reply.tensors.items()}

    def _asked(self, kind: type[Asked], **fields: Any) -> Tensors:  # noqa: ANN401 - the fields of `kind`
        """Send a request to the candidate's process; return the reply.

        Raises:
            SideEffectError: the call changed shared state.
            CandidateError: the candidate raised an exception.
            CandidateLostError: the candidate's process is gone.
        """
        forget, self._forgotten[:] = tuple(self._forgotten), []
        request = kind(exchange=self._exchange.path, forget=forget, **fields)
        reply = self._ask("compute", Tensors, cell=self._cell, request=request)
        if isinstance(reply, Tensors):
            side_effects.require_faultless(reply.faults)
            return reply
        if not reply.raised:
            raise CandidateLostError(reply)
        raise type(reply.raised, (CandidateError,), {})(reply)


class Candidates:
    """The candidate's end of the connection: its modules, and the latest inputs."""

    _exchange: TensorFile  # the judge's file

    def __init__(self, on_step: Callable[[], object] = lambda: None) -> None:
        """Start without modules; `on_step` is called before each backward pass."""
        self._on_step = on_step
        self._here: Here | None = None
        self._instances: dict[int, Instance] = {}
        self._inputs: OrderedDict[tuple[str, TensorHeader], Tensor] = OrderedDict()
        self._opened = lru_cache(maxsize=1)(TensorFile)
        self._bound = cache(BoundMask)
        self._changed = cache(msgspec.structs.replace)  # of workloads

    def answer(self, request: Call | Backward, implementation: Implementation, workload: Workload) -> Tensors:
        """Carry out a request of the judge; exceptions of the candidate propagate."""
        self._exchange = self._opened(request.exchange)
        self._here = here = self._here or Here(implementation, self._on_step)
        for number in request.forget:
            self._instances.pop(number, None)
        try:
            if isinstance(request, Call):
                answer = here.call(self._as_call(request, implementation, workload))
                headers = self._sent({"output": answer.output} | answer.gradients)
                return Tensors(
                    tensors=headers,
                    number=answer.number,
                    overwritten=tuple(answer.overwritten),
                    has_pack=here.has_pack,
                )
            return Tensors(tensors=self._sent(self._pulled_back(request, here, workload)))
        except side_effects.SideEffectError as error:
            return Tensors(faults={error.rule: str(error)})

    def _sent(self, tensors: Mapping[str, Tensor]) -> dict[str, TensorHeader]:
        return self._exchange.send({name: compact(tensor) for name, tensor in tensors.items()})[0]

    def _pulled_back(self, request: Backward, here: Here, workload: Workload) -> dict[str, Tensor]:
        where = device(workload.device).torch_device
        sent = {name: self._exchange.receive(header, where) for name, header in request.tensors.items()}
        grad_output = sent.pop(GRADIENT)
        along = {name.removeprefix(ALONG): tensor for name, tensor in sent.items()}
        if along:
            return here.pull_back_twice_by(request.call, grad_output, along)
        return here.pull_back_by(request.call, grad_output)

    def _as_call(self, request: Call, implementation: Implementation, workload: Workload) -> calls.Call:
        """Build the requested call on the device of the cell's `workload`; the judge's tensors may be on the host.

        Raises:
            NotImplementedError: the implementation does not support the call's workload.
        """
        where = device(workload.device).torch_device
        if request.weights:
            weights = Weights(
                **{name: self._exchange.receive(header, where) for name, header in request.weights.items()}
            )
            self._instances.setdefault(request.module, Instance(weights)).weights = weights
        tensors = self._received(request, where)
        grad_output = tensors.pop(GRADIENT, None)
        there, cache = _decoded(bytes(request.workload), workload.device), request.cache
        rule = parse_mask(request.rule) if cache is None else rule_of(cache.batch, cache.window)
        mask = self._bound(
            rule,
            (there.batch_size, there.seq_len, there.kv_len),
            where,
            cache=cache,
            num_heads=there.num_heads,
            scale=request.scale,
            world_size=there.world_size,
        )
        mask.form, mask.change = request.form, MASK_FORMS.get(request.form, lambda form, _: form)
        mask.is_training, mask.chunks = request.is_training, request.chunks
        mask.inputs = {name: tensor for name, tensor in tensors.items() if name not in GIVEN}
        plain = there if cache else self._changed(there, mask=request.rule, layout="contiguous", dropout=0.0)
        if reason := implementation.unsupported(plain):  # rules and diagnoses use other sizes than the cell
            raise NotImplementedError(reason)
        return calls.Call(
            workload=there,
            instance=self._instances[request.module],
            tensors=tensors,
            mask=mask,
            mode=request.mode,
            grad_output=grad_output,
            num_passes=request.num_passes,
            frozen=request.frozen,
            seed=request.seed,
        )

    def _received(self, request: Call, where: str) -> dict[str, Tensor]:
        """Return the tensors of a call by name; a tensor that was sent before gets the same memory as before.

        Tensors that share memory in the judge's process also share it here. A tensor with several names is one tensor
        here. Two views of the same memory are two tensors, each with its own gradient.
        """
        received: dict[str, Tensor] = {}
        headers = {name: msgspec.structs.replace(header, at=0) for name, header in request.tensors.items()}
        for name, header in headers.items():
            others = [other for other in received if headers[other].memory == header.memory and header.num_bytes]
            if header.same_as != name:
                received[name] = received[header.same_as]
            elif others:
                storage = received[others[0]].untyped_storage()
                empty = torch.empty(0, dtype=getattr(torch, header.dtype), device=where)
                received[name] = empty.set_(storage, header.offset, header.shape, header.stride)
            elif name == GRADIENT:
                received[name] = self._exchange.receive(request.tensors[name], where)
            else:
                key = name, header
                if key in self._inputs:
                    held, sent = bytes_of(self._inputs[key]), self._exchange.read(request.tensors[name]).to(where)
                    if not torch.equal(held, sent):
                        held.copy_(sent)
                        increment_version(self._inputs[key])  # as if it were written in place
                    self._inputs.move_to_end(key)
                else:
                    self._inputs[key] = self._exchange.receive(request.tensors[name], where)
                received[name] = self._inputs[key]
        while len(self._inputs) > NUM_INPUTS:
            self._inputs.popitem(last=False)
        return received
