"""Build timed calls of a case: launches one by one or as a graph, on one set of inputs or on copies in turn.

Source: `triton.testing.do_bench_cudagraph`, for graphs; https://github.com/NVIDIA/cutlass, for inputs in turn in place
of a flush (its profiler's `--workspace-count`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from attnbench.checking.case import TORCH_DTYPES, Case, Inputs, copied
from attnbench.devices import CaptureError, device
from attnbench.processes.worker.attempts import OutOfReachError
from attnbench.storage.events import SHARE_OF_FREE
from attnbench.storage.records import Status
from attnbench.units import show
from attnbench.workloads.workload import Workload

TIMES_CACHE = 2
"""Data read between two calls on one copy of the inputs, in sizes of the largest cache."""
MOST_COPIES = 1024
ROUNDINGS = 8
"""Allowed distance between replay and call, in roundings of the largest number: kernels may sum in another order."""
OTHER = -0.5
"""Factor for the inputs that tests whether a replay uses new values."""
Call = Callable[[], object]


class Rotation:
    """Copies of a workload's inputs; each call takes the next one, regardless of its arm."""

    def __init__(self, workload: Workload, inputs: Inputs, on_step: Callable[[], object] = lambda: None) -> None:
        """Make enough copies to exceed the device's largest cache; `on_step` is called before each.

        Raises:
            OutOfReachError: the copies do not fit into memory, or would be more than MOST_COPIES.
        """
        here = device(workload.device)
        storages = {tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in inputs.tensors.values()}
        size, cache = sum(storages.values()), here.cache_bytes()
        number = 1 + math.ceil(TIMES_CACHE * cache / size)
        free = here.free_bytes()
        if number > MOST_COPIES or (number - 1) * size > SHARE_OF_FREE * free:
            wanted = f"{number:,} copies of {show(size, 'bytes')} exceed a cache of {show(cache, 'bytes')}"
            most = f"at most {MOST_COPIES:,} are allowed, and {show(free, 'bytes')} are free: give --conditions cold"
            raise OutOfReachError(Status.unsupported, f"its inputs cannot rotate: {wanted}; {most}")
        self.inputs = [inputs]
        for _ in range(number - 1):
            on_step()
            self.inputs.append(copied(inputs, workload))
        self._order = itertools.cycle(range(number))

    def cases(self, case: Case) -> list[Case]:
        """The case on each of the copies."""
        needs_grad = case.workload.direction != "inference"
        copies = [{name: each.detach() for name, each in inputs.tensors.items()} for inputs in self.inputs[1:]]
        return [
            case,
            *(replace(case, tensors={n: t.requires_grad_(needs_grad) for n, t in copy.items()}) for copy in copies),
        ]

    def through(self, calls: Sequence[Call]) -> Call:
        """A call that runs the next of `calls` each time; they are in the order of the copies."""

        def call() -> object:
            return calls[next(self._order)]()

        return call


def replayed(case: Case) -> Call:
    """The case's call as one graph of its launches, after verifying that its replay computes the same.

    Raises:
        CaptureError: it cannot be recorded, or its replay differs from the call.
        OutOfReachError: its answers are random, so that they cannot be compared.
    """
    if case.workload.dropout > 0:
        reason = "each replay of its graph drops others than the call, so that they cannot be compared: set dropout=0"
        raise OutOfReachError(Status.unsupported, reason)
    replay = case.device.captured(case.call)
    require_replay(case, replay)
    return replay


def require_replay(case: Case, replay: Call) -> None:
    """Put other values into the inputs, and compare replay and call.

    Raises:
        CaptureError: they differ: part of the call is not in the graph.
    """
    call, dtype = case.call(), TORCH_DTYPES[case.workload.dtype]
    names = [name for name in ("query", "value", "x") if name in case.tensors and case.tensors[name].dtype is dtype]
    with case.holding({name: OTHER * case.tensors[name].detach() for name in names}):
        seen = [None if each is None else each.detach().clone() for each in _tensors(replay())]  # both may share memory
        expected = _tensors(call())
        if len(seen) != len(expected) or not all(map(_is_close, seen, expected)):
            raise CaptureError(
                "a replay of its CUDA graph computes something else than the call: some of its work is outside of the "
                "graph, on the host or kept from before"
            )


def _tensors(result: object) -> list[Tensor | None]:
    return [*result] if isinstance(result, tuple | list) else [result]  # type: ignore[list-item] # a case's results


def _is_close(seen: Tensor | None, expected: Tensor | None) -> bool:
    if seen is None or expected is None:
        return seen is expected
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return False
    largest = expected.abs().nan_to_num(nan=0.0, posinf=0.0).amax().item() if expected.numel() else 0.0
    allowed = ROUNDINGS * torch.finfo(expected.dtype).eps * largest
    return torch.allclose(seen, expected, rtol=0.0, atol=allowed, equal_nan=True)
