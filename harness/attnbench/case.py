"""A case: one implementation that is built for one workload, with its inputs on the device, ready to be called.

Inputs and weights are drawn in float64 on the CPU from the workload's seed, so they are equal on every machine.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.autograd.graph import increment_version

from attnbench.contract import BoundMask, Implementation, Weights
from attnbench.contract.outside import Bound, training
from attnbench.contract.pages import rounded
from attnbench.devices import Device, containers, device
from attnbench.devices.recording import Footprint, Recording
from attnbench.workloads.batch import SAME
from attnbench.workloads.workload import Workload

LEAST_DROPOUT, MOST_DROPOUT = 0.005, 0.995
"""Dropout outside this range cannot be checked: too few of the sampled weights are dropped, or too few are kept."""
PART = 2**22  # numbers in each part of a large tensor; one thread draws a part
QKV = ("query", "key", "value")
GIVEN = (*QKV, "x", "context")
"""Inputs that are arguments of a call. The mask carries all other inputs, such as sinks."""
REENTRANT = "CheckpointFunctionBackward"
"""Name of the graph node of torch.utils.checkpoint with use_reentrant=True."""
TORCH_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The input tensors of a call, by name and in order, and the module's weights in the form that all modules share.

    Scope `attention`: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V). Scope `module`: x (B, T, D) and, in
    cross-attention, context (B, S, D). In either scope, the other inputs of the workload follow: sinks (H,), and the
    tensors of learned biases. B is batch rows, H query heads, G key/value heads, T queries, S keys, K and V head
    widths, and D the embedding width.
    """

    tensors: dict[str, Tensor]
    weights: Weights

    def map(self, change: Callable[[Tensor], Tensor]) -> "Inputs":
        """Return inputs and weights with `change` applied to each tensor."""
        tensors = {name: change(tensor) for name, tensor in self.tensors.items()}
        return Inputs(tensors=tensors, weights=self.weights.map(change))


class NoBackwardError(RuntimeError):
    """An output has no autograd graph, and therefore no gradients."""

    def __init__(self) -> None:
        super().__init__("it has no backward pass: add --set direction=inference")


def pull_back(
    output: Tensor, leaves: Sequence[Tensor], grad_output: Tensor, *, retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Compute the gradient of each leaf from the gradient of the output, which has the output's shape.

    The result is None for a leaf that does not affect the output. If the graph has reentrant checkpointing, which does
    not support `torch.autograd.grad`, `output.backward` stores the gradients in the leaves, and this function moves
    them from there to the result.

    Raises:
        NoBackwardError: the output has no graph.
    """
    if not output.requires_grad:
        raise NoBackwardError
    if not is_reentrant(output):
        return torch.autograd.grad(output, leaves, grad_output, retain_graph=retain_graph, allow_unused=True)
    for leaf in leaves:
        leaf.grad = None
    output.backward(grad_output, retain_graph=retain_graph)
    found = tuple(leaf.grad for leaf in leaves)
    for leaf in leaves:
        leaf.grad = None
    return found


def pull_back_twice(
    output: Tensor, leaves: Sequence[Tensor], grad_output: Tensor, along: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute second gradients: for each leaf, the gradient of s, the sum of all first gradients times `along`.

    `along` has one tensor for each leaf, in the leaf's shape. The result is None for a leaf that does not affect s.

    Raises:
        NoBackwardError: the first gradients have no graph.
    """
    first = torch.autograd.grad(output, leaves, grad_output, create_graph=True, allow_unused=True)
    made = [(one, each) for one, each in zip(first, along, strict=True) if one is not None and one.requires_grad]  # type: ignore[redundant-expr] # unused
    if not made:
        raise NoBackwardError
    total = torch.stack([(one * each).sum() for one, each in made]).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True)


def is_reentrant(output: Tensor) -> bool:
    """Return whether the graph of an output has a node of reentrant checkpointing."""
    nodes, seen = [output.grad_fn], {output.grad_fn}
    for node in nodes:
        if node is not None:
            if node.name() == REENTRANT:
                return True
            following = [each for each, _ in node.next_functions if each not in seen]
            seen.update(following)
            nodes += following
    return False


def generator(*seeds: int) -> Generator:
    """Return a random generator on the CPU, seeded by these integers."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % 2**63
    return Generator().manual_seed(mixed)


def normal_values(draws: Generator, *shape: int) -> Tensor:
    """Draw independent standard normal values of this shape in float64, the same for any number of threads.

    torch draws in one thread, at about 10 ns per number, so a large tensor is drawn in parts, on all processors.
    """
    if math.prod(shape) <= PART:
        return torch.randn(*shape, generator=draws, dtype=torch.float64)
    drawn = torch.empty(shape, dtype=torch.float64)
    parts = drawn.view(-1).split(PART)
    seeds = torch.randint(2**62, (len(parts),), generator=draws).tolist()

    def fill(part: Tensor, seed: int) -> None:
        part.normal_(generator=Generator().manual_seed(seed))

    with ThreadPoolExecutor(containers.processors()) as pool:
        for _ in pool.map(fill, parts, seeds):
            pass
    return drawn


def draw_weights(workload: Workload) -> Weights:
    """Draw normal float64 weights with variance 1 / fan-in, and the workload's biases, from the workload's seed."""
    draws = generator(workload.seed, 1)
    width = workload.embed_dim if workload.scope == "module" else 1  # unused in scope attention
    tensors = {}
    for name, shape in Weights.shapes(workload, width).items():
        fan_in = shape[1] if name == "out" else width
        tensors[name] = torch.randn(*shape, generator=draws, dtype=torch.float64) / math.sqrt(fan_in)
    return Weights(**tensors).biased(workload.biased)  # all biases are drawn, so that values do not depend on `biased`


def draw_normal(workload: Workload, seed: int) -> Inputs:
    """Draw standard normal float64 inputs from the workload's seed and `seed`; add the workload's weights."""
    draws = generator(workload.seed, 2, seed)
    batch, heads, groups = workload.batch_size, workload.num_heads, workload.num_kv_heads

    normal = partial(normal_values, draws)
    if workload.scope == "module":
        tensors = {"x": normal(batch, workload.seq_len, workload.embed_dim)}
        if workload.kv_len != workload.seq_len:
            tensors["context"] = normal(batch, workload.kv_len, workload.embed_dim)
    else:
        tensors = {
            "query": normal(batch, heads, workload.seq_len, workload.head_dim),
            "key": normal(batch, groups, workload.kv_len, workload.head_dim),
            "value": normal(batch, groups, workload.kv_len, workload.value_dim),
        }
    drawn = Inputs(tensors=tensors | draw_operands(workload, draws), weights=draw_weights(workload))
    return laid_out(drawn, workload).map(torch.Tensor.contiguous)  # values are equal where the layout shares memory


def draw_operands(workload: Workload, draws: Generator) -> dict[str, Tensor]:
    """Draw the inputs in `workload.operands` by name, such as sinks: standard normal float64 values.

    log(S) is added to sinks, so that a sink weighs about as much as all S keys together.
    """
    drawn = {
        name: torch.randn(*shape, generator=draws, dtype=torch.float64) for name, shape in workload.operands.items()
    }
    if "sinks" in drawn:
        drawn["sinks"] += math.log(workload.kv_len)
    return drawn


def laid_out(inputs: Inputs, workload: Workload) -> Inputs:
    """Return the inputs in the workload's layout, without copying tensors that already have it.

    `transposed`: query, key and value are views of (B, T, H, K) tensors, as a projection yields them.
    `mixed`: the query is a view as above, the key is contiguous, and the value is a view of a (S, B, G, V) tensor.
    `expanded`: all heads share the key and value of head 0, with stride 0.
    `broadcast`: all batch rows share the key and value of batch row 0, with stride 0.
    `value_in_key`: a value is the first V numbers of its key, in the same memory.

    In a batch of requests, keys and values are first replaced by what the cache would return: they are equal in a
    prefix that the requests share, and rounded to the cache's dtype.
    """
    tensors = dict(inputs.tensors)
    if tensors and workload.cache is not None:
        tensors |= {name: rounded(tensors[name], name, workload.cache) for name in ("key", "value")}
    match workload.layout if tensors else "contiguous":  # weights alone have no layout
        case "transposed":
            tensors |= {name: tensors[name].transpose(1, 2).contiguous().transpose(1, 2) for name in QKV}
        case "mixed":
            tensors |= {"query": tensors["query"].transpose(1, 2).contiguous().transpose(1, 2)}
            tensors |= {"value": tensors["value"].permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)}
        case "value_in_key":
            tensors |= {"value": tensors["key"][..., : workload.value_dim]}
        case "expanded":
            tensors |= {name: tensors[name][:, :1].contiguous().expand_as(tensors[name]) for name in ("key", "value")}
        case "broadcast":
            tensors |= {name: tensors[name][:1].contiguous().expand_as(tensors[name]) for name in ("key", "value")}
    return replace(inputs, tensors=tensors)


def output_shape(workload: Workload) -> tuple[int, ...]:
    """Return the shape of an output: (B, H, T, V) in scope `attention`, (B, T, D) in scope `module`."""
    if workload.scope == "module":
        return (workload.batch_size, workload.seq_len, workload.embed_dim)
    return (workload.batch_size, workload.num_heads, workload.seq_len, workload.value_dim)


def grad_value(workload: Workload) -> float:
    """Return the number that fills the output's gradient in timed backward passes; this gradient has norm 1."""
    return 1 / math.sqrt(math.prod(output_shape(workload)))


def place(inputs: Inputs, workload: Workload) -> Inputs:
    """Cast float64 inputs to the workload's dtype, move them to its device and apply its layout."""
    dtype = TORCH_DTYPES[workload.dtype]
    where = device(workload.device).torch_device
    return laid_out(inputs.map(lambda tensor: tensor.to(device=where, dtype=dtype)), workload)


def copied(inputs: Inputs, workload: Workload) -> Inputs:
    """Copy the inputs and keep the workload's layout; `clone` alone loses strides of 0."""
    return laid_out(inputs.map(lambda tensor: tensor.clone()), workload)


def fill(tensor: Tensor, values: Tensor) -> None:
    """Write values of the same layout into a tensor in place, without raising its autograd version.

    In an expanded tensor, elements share memory; each shared number is written only once.
    """
    into = tensor.data
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            into, values = into.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    into.copy_(values)


def reason_against(implementation: Implementation, workload: Workload) -> str | None:
    """Return why this workload cannot be tried with this implementation on this machine; None if it can.

    A workload that attnbench cannot check is not tried either, because every timed call is checked first.
    """
    if reason := device(workload.device).missing():
        return reason
    if workload.dropout > 0:
        if workload.direction == "inference":
            return (
                "nothing is dropped in inference: "
                "set direction to forward, backward or forward_backward, or dropout to 0"
            )
        if not LEAST_DROPOUT <= workload.dropout <= MOST_DROPOUT:
            return f"dropout {workload.dropout:g} cannot be checked: give one from {LEAST_DROPOUT} to {MOST_DROPOUT}"
        if min(workload.kv_len, workload.value_dim) < 2:  # noqa: PLR2004 - with one, a weight and an output look the same
            return "dropout cannot be checked: give kv_len and value_dim of at least two keys and columns"
    if workload.cache_dtype != SAME:
        if not workload.page_size:
            return f"cache_dtype={workload.cache_dtype} needs a paged cache: add --set page_size=16"
        if not hasattr(torch, workload.cache_dtype):
            return f"this version of torch has no {workload.cache_dtype}: leave out cache_dtype"
    if workload.world_size > 1 and not implementation.distributes:
        return "it runs in one process: world_size above 1 is for implementations over several ranks, such as ring"
    if (reason := implementation.unsupported(workload)) or implementation.has_dropout or workload.dropout == 0:
        return reason
    return "it has no attention dropout; declare how to set it with adapt(..., dropout=lambda module, p: ...)"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module, its inputs (on the device, in the workload's dtype), and its mask."""

    workload: Workload
    module: nn.Module
    tensors: dict[str, Tensor]
    mask: BoundMask
    _bound: list[Bound] = field(default_factory=list, init=False)

    @property
    def device(self) -> Device:
        """The device on which the case computes."""
        return device(self.workload.device)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """The tensors that get gradients in a backward call, by name: inputs and, in scope `module`, parameters."""
        if self.workload.scope == "attention":
            return self.tensors
        return self.tensors | {f"parameter {name}": value for name, value in self.module.named_parameters()}

    def grad_mode(self) -> AbstractContextManager[Any]:
        """Return a context with the gradient mode for every call of this case: off in inference, otherwise on."""
        return torch.set_grad_enabled(self.workload.direction != "inference")

    def hand_over_operands(self) -> None:
        """Attach inputs other than a call's arguments, such as sinks, to the mask, where implementations find them."""
        num_arguments = len(QKV) if self.workload.scope == "attention" else 1 + ("context" in self.tensors)
        if len(self.tensors) > num_arguments:
            self.mask.inputs = {name: tensor for name, tensor in self.tensors.items() if name not in GIVEN}

    def output(self) -> Tensor:
        """Make one forward call; return (B, H, T, V) in scope `attention`, (B, T, D) in scope `module`."""
        result: Tensor
        self.hand_over_operands()
        if self.mask.is_training and not self.module.training:
            with training(self.module):
                return self.output()
        if self.workload.scope == "attention":
            attend: Callable[..., Tensor] = self.module.attend  # type: ignore[assignment] # `build` checked it
            result = attend(self.tensors["query"], self.tensors["key"], self.tensors["value"], self.mask)
        else:
            result = self.module(self.tensors["x"], self.tensors.get("context"), mask=self.mask)
        return result

    def bound(self) -> tuple[Callable[[], Any], list[Tensor]]:
        """Return a function that makes one forward call, and the leaves of its graph.

        In scope `attention`, a module with a method `bind` prepares its arguments here, outside of the timed call.
        """
        bind = getattr(self.module, "bind", None)
        if bind is None or self.workload.scope == "module":
            return self.output, list(self.leaves.values())
        self.hand_over_operands()
        bound: Bound = bind(self.tensors["query"], self.tensors["key"], self.tensors["value"], self.mask)
        self._bound.append(bound)
        return bound.call, bound.leaves

    def call(self) -> Callable[[], object]:
        """Return the function to time: a call in the workload's direction. For `backward`, the graph is built here."""
        return self.observed_call()[0]

    def observed_call(self) -> tuple[Callable[[], object], Callable[[Any], Mapping[str, Tensor | None]]]:
        """Return the function to time, and a function that converts its result to the output and gradients, by name.

        The names are `output` and `gradient of NAME`, as far as the direction computes them. The second function is
        called afterwards, since gradients of the inputs may need work that must not be timed.

        Raises:
            NoBackwardError: there is no graph for the direction's backward pass.
        """
        forward, leaves = self.bound()
        bound = self._bound[-1] if self._bound else None
        finish = (lambda output: output) if bound is None else bound.finish
        if self.workload.direction in {"inference", "forward"}:
            return forward, lambda output: {"output": finish(output)}
        with torch.enable_grad():
            kept = forward()
            answer = finish(kept)
        if not kept.requires_grad:
            raise NoBackwardError
        pull = pull_back if is_reentrant(kept) else partial(torch.autograd.grad, allow_unused=True)
        grad_output = torch.full_like(answer, grad_value(self.workload))
        if answer is not kept:
            (grad_output,) = torch.autograd.grad(answer, kept, grad_output)

        def named(made: Sequence[Tensor | None]) -> dict[str, Tensor | None]:
            if bound is not None:
                made = bound.gradients(made, list(self.tensors.values()))
            return dict(zip((f"gradient of {name}" for name in self.tensors), made, strict=False))

        if self.workload.direction == "backward":
            return lambda: pull(kept, leaves, grad_output, retain_graph=True), named

        def forward_and_backward() -> tuple[Tensor | None, ...]:
            output = forward()
            return output.detach(), *pull(output, leaves, grad_output)

        return forward_and_backward, lambda made: {"output": finish(made[0])} | named(made[1:])

    @contextmanager
    def holding(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Overwrite the inputs named in `values` in place during a `with` block, then restore their old contents."""
        kept = {name: self.tensors[name].detach().clone() for name in values}
        try:
            self._fill(values)
            yield
        finally:
            self._fill(kept)

    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, tensor in values.items():
            fill(self.tensors[name], tensor)
            if self.workload.direction != "backward":  # the graph, which was built before, would become invalid
                increment_version(self.tensors[name])
        for bound in self._bound:
            bound.refresh()

    @cached_property
    def first(self) -> int:
        """Bytes of device memory outside torch's allocator before the warm-up call; the first access makes this call.

        The warm-up call compiles kernels and caches masks.
        """
        before = self.device.outside_bytes()
        with self.grad_mode():
            self.call()()
        return before

    @cached_property
    def outside_bytes(self) -> int:
        """Bytes of device memory outside torch's allocator that the first calls still hold, such as kernel code."""
        before, _ = self.first, self.recording
        return max(0, self.device.outside_bytes() - before)

    @cached_property
    def recording(self) -> Recording:
        """The operators and memory of one call after a warm-up call; recorded on first access, then kept."""
        _ = self.first  # tensors that the warm-up call keeps are not counted
        with self.grad_mode():
            return self.device.record(self.call())

    @cached_property
    def footprint(self) -> Footprint:
        """The memory of one call, in bytes."""
        return self.recording.footprint(self.tensors.values())

    @cached_property
    def forward_footprint(self) -> Footprint:
        """The memory of one forward call, in bytes; equal to `footprint` if the direction has no backward pass."""
        if self.workload.direction in {"inference", "forward"}:
            return self.footprint
        with self.grad_mode():
            forward, _ = self.bound()
            forward()
            return self.device.record(forward).footprint(self.tensors.values())


def bind(workload: Workload) -> BoundMask:
    """Build the workload's mask at its sizes on its device; all cases of one workload may share it."""
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    where = device(workload.device).torch_device
    scale = workload.scale or None
    return BoundMask(
        workload.mask_rule,
        sizes,
        where,
        num_heads=workload.num_heads,
        scale=scale,
        world_size=workload.world_size,
        cache=workload.cache,
    )


def build(workload: Workload, implementation: Implementation, inputs: Inputs, mask: BoundMask | None = None) -> Case:
    """Build a case from `inputs`, a result of `place`; if `mask` is None, build the workload's mask, too.

    Raises:
        ValueError: in scope `attention`, the module has no `attend`.
    """
    module = implementation.build(inputs.weights).eval()
    if implementation.has_dropout:
        set_dropout(module, workload.dropout)
    if workload.scope == "attention" and not hasattr(module, "attend"):
        raise ValueError(f"{type(module).__name__} has no attend(query, key, value, mask): choose scope=module")
    needs_grad = workload.direction != "inference"
    for parameter in module.parameters():
        parameter.requires_grad_(needs_grad and workload.scope == "module")
    tensors = {name: tensor.detach().requires_grad_(needs_grad) for name, tensor in inputs.tensors.items()}
    return Case(workload=workload, module=module, tensors=tensors, mask=mask or bind(workload))


def set_dropout(module: nn.Module, share: float) -> None:
    """Set the dropout probability of a module, whose attribute `dropout` is a number or an `nn.Dropout`.

    An `nn.Dropout` is in training mode only if `share` is above 0.
    """
    layer = getattr(module, "dropout", None)
    if isinstance(layer, nn.Dropout):
        layer.p = share
        layer.train(share > 0)
    else:
        module.dropout = share  # type: ignore[assignment] # a plain number
