"""A case: one implementation built for one workload, with its inputs in place, ready to be called."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from harness import cuda
from harness.contract import BoundMask, Implementation
from harness.footprint import Footprint, footprint
from harness.inputs import Inputs
from harness.records import Workload

TORCH_DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


def output_shape(workload: Workload) -> tuple[int, ...]:
    """Scope `attention`: (B, H, T, V); scope `module`: (B, T, D)."""
    if workload.scope == "module":
        return (workload.batch_size, workload.seq_len, workload.embed_dim)
    return (workload.batch_size, workload.num_heads, workload.seq_len, workload.value_dim)


def place(inputs: Inputs, workload: Workload) -> Inputs:
    """The float64 inputs cast to the workload's dtype and moved to its device."""
    dtype = TORCH_DTYPES[workload.dtype]
    return inputs.map(lambda tensor: tensor.to(device=workload.device, dtype=dtype))


def reason_against(implementation: Implementation, workload: Workload) -> str | None:
    """Why this workload cannot be tried with this implementation, or None.

    What the harness itself cannot check yet is refused here, since what is not checked is not timed.
    """
    if workload.device.startswith("cuda") and not cuda.has_device(workload.device):
        return f"this machine has no device {workload.device}"
    if workload.dropout > 0:
        return "attention dropout cannot be checked yet, and what is not checked is not timed"
    rule = workload.mask_rule
    if rule.changes_scores:
        return f"mask {rule.name} changes scores, which no implementation takes yet"
    return implementation.unsupported(workload)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A module, its inputs on the device in the workload's dtype, and its mask.

    `leaves` are the tensors whose gradients a backward call computes: the inputs by name, then the parameters.
    """

    workload: Workload
    module: nn.Module
    tensors: dict[str, Tensor]
    mask: BoundMask

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Inputs and, in scope `module`, parameters, by name."""
        if self.workload.scope == "attention":
            return self.tensors
        return self.tensors | {f"parameter {name}": value for name, value in self.module.named_parameters()}

    @property
    def needs_grad(self) -> bool:
        """Whether the direction records a graph."""
        return self.workload.direction != "inference"

    def grad_mode(self) -> AbstractContextManager[Any]:
        """The gradient mode in which every call of this case is made."""
        return torch.set_grad_enabled(self.needs_grad)

    def output(self) -> Tensor:
        """One forward call. Scope `attention`: (B, H, T, V); scope `module`: (B, T, D)."""
        result: Tensor
        if self.workload.scope == "attention":
            attend: Callable[..., Tensor] = self.module.attend  # type: ignore[assignment] # reason_against saw to it
            result = attend(self.tensors["query"], self.tensors["key"], self.tensors["value"], self.mask)
        else:
            result = self.module(self.tensors["x"], self.tensors.get("context"), mask=self.mask)
        return result

    def call(self) -> Callable[[], object]:
        """What a timer calls: the workload's direction, without arguments; the graph for `backward` is built here."""
        if self.workload.direction in {"inference", "forward"}:
            return self.output
        leaves = list(self.leaves.values())
        with torch.enable_grad():
            kept = self.output()
        grad_output = torch.ones_like(kept) / kept.numel() ** 0.5
        if self.workload.direction == "backward":
            return lambda: torch.autograd.grad(kept, leaves, grad_output, retain_graph=True, allow_unused=True)
        return lambda: torch.autograd.grad(self.output(), leaves, grad_output, allow_unused=True)

    @cached_property
    def footprint(self) -> Footprint:
        """The memory of one call; read in one pass, at first use, for every metric that tells a part of it."""
        return self._footprint(self.call())

    @cached_property
    def forward_footprint(self) -> Footprint:
        """The memory of one forward call: the same, where the direction has no backward pass."""
        is_forward = self.workload.direction in {"inference", "forward"}
        return self.footprint if is_forward else self._footprint(self.output)

    def _footprint(self, call: Callable[[], object]) -> Footprint:
        with self.grad_mode():
            call()  # kept tensors, such as the dense mask, are made by a first call
            return footprint(call, self.workload.device, self.tensors.values())


def bind(workload: Workload) -> BoundMask:
    """The workload's mask at its sizes on its device; cases of one workload may share it."""
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    return BoundMask(workload.mask_rule, sizes, workload.device)


def build(workload: Workload, implementation: Implementation, inputs: Inputs, mask: BoundMask | None = None) -> Case:
    """A case on `inputs`, which `place` has put where the workload says, under `mask` or one of its own.

    Raises:
        ValueError: the module that was built has no `attend`, in scope `attention`.
    """
    module = implementation.build(inputs.weights).eval()
    if workload.scope == "attention" and not hasattr(module, "attend"):
        raise ValueError(f"{type(module).__name__} has no attend(query, key, value, mask), which scope attention times")
    needs_grad = workload.direction != "inference"
    for parameter in module.parameters():
        parameter.requires_grad_(needs_grad and workload.scope == "module")
    tensors = {name: tensor.detach().requires_grad_(needs_grad) for name, tensor in inputs.tensors.items()}
    return Case(workload=workload, module=module, tensors=tensors, mask=mask or bind(workload))


def canonical_gradients(module: nn.Module, inputs: Inputs, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients of the packed parameters, as gradients of the canonical weights; {} for a module without `pack`.

    `pack` is linear, so its transpose, applied by automatic differentiation, is the way back.

    Raises:
        ValueError: `pack` does not name every parameter, so that some gradient would go unchecked.
    """
    pack, pack_out = getattr(module, "pack", None), getattr(module, "pack_out", None)
    if pack is None or pack_out is None:
        return {}
    with torch.enable_grad():
        weights = inputs.weights.map(lambda tensor: tensor.detach().requires_grad_())
        packed = pack(weights) | pack_out(weights)
        if unnamed := set(gradients) - set(packed):
            raise ValueError(f"pack names no {', '.join(sorted(unnamed))}: give it every parameter")
        canonical = weights.tensors()
        back = torch.autograd.grad(
            [packed[name] for name in gradients], list(canonical.values()), list(gradients.values()), allow_unused=True
        )
    found: dict[str, Tensor | None] = dict(zip(canonical, back, strict=True))
    return {f"{name} weights": tensor for name, tensor in found.items() if tensor is not None}
