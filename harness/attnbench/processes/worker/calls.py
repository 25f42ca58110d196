"""Time a case as one graph of its launches. Source: `triton.testing.do_bench_cudagraph`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnbench.checking.case import TORCH_DTYPES, Case
from attnbench.devices import CaptureError
from attnbench.processes.worker.attempts import OutOfReachError
from attnbench.storage.records import Status

ROUNDINGS = 8
"""Allowed distance between replay and call, in roundings of the largest number: kernels may sum in another order."""
OTHER = -0.5
"""Factor for the inputs that tests whether a replay uses new values."""
Call = Callable[[], object]


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
