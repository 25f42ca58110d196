"""Time the first call of an implementation in this process, and its first calls at another length, batch and dtype.

Inputs and mask are made beforehand, so that torch and the device are ready. The time of the first call includes the
import of the implementation's file, building, compiling, and the call, but not the harness's preparation of arguments.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

import msgspec

from attnbench.case import TORCH_DTYPES, Case, bind, build, draw_normal, place, reason_against
from attnbench.contract import Implementation
from attnbench.processes.messages import FirstCalls
from attnbench.storage.records import FIRST_OTHERS
from attnbench.workloads.batch import Request, written
from attnbench.workloads.workload import Workload

LONGER = 16  # tokens to add: kernels compiled for the first length do not fit, but the call takes hardly longer


def measure(
    workload: Workload,
    load: Callable[[], Implementation],
    settings: Mapping[str, str],
    on_step: Callable[[], object] = lambda: None,
    *,
    has_others: bool = True,
) -> FirstCalls:
    """Time the first call in this process and, if `has_others`, those that FIRST_OTHERS names, in seconds.

    `settings` are environment variables to set first; a value of "" unsets one. `load` imports the implementation.
    `on_step` is called before each first call. What the implementation does not support is left out.
    """
    for name, value in settings.items():
        os.environ.pop(name, None)
        if value:
            os.environ[name] = value
    inputs, mask = place(draw_normal(workload, 0), workload), bind(workload)
    on_step()
    start_s = time.perf_counter()
    candidate = load()
    case = build(workload, candidate, inputs, mask)
    first_s, others_s = _called(case, start_s), dict[str, float]()
    for metric, other in elsewhere(workload) if has_others else ():
        if reason_against(candidate, other) is None:
            on_step()
            with suppress(Exception):  # it may not support what it does not declare
                beside = _elsewhere(case, other)
                others_s[metric] = _called(beside, time.perf_counter())
    return FirstCalls(first_s=first_s, others_s=others_s)


def _elsewhere(case: Case, other: Workload) -> Case:
    """Return a case at another workload, with the module of `case`, which is converted to the other dtype in place."""
    drawn, needs_grad = place(draw_normal(other, 0), other).tensors, other.direction != "inference"
    tensors = {name: tensor.detach().requires_grad_(needs_grad) for name, tensor in drawn.items()}
    module = case.module.to(TORCH_DTYPES[other.dtype])
    return Case(workload=other, module=module, tensors=tensors, mask=bind(other))


def elsewhere(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Yield the metrics of FIRST_OTHERS, each with the workload at another length, batch or dtype, if allowed.

    The other length has LONGER (16) more keys and, unless there is a single query, as many more queries; in a batch,
    each request has them. The other batch has one more row or request. The other dtype, the last one because the module
    is converted to it, is bfloat16 or, from half precision, float32.
    """
    requests = workload.requests
    changes: dict[str, dict[str, object]] = {
        "length": {"seq_len": _longer(workload.seq_len), "kv_len": workload.kv_len + LONGER},
        "batch": {"batch_size": workload.batch_size + 1},
        "dtype": {"dtype": "float32" if workload.dtype in {"bfloat16", "float16"} else "bfloat16"},
    }
    if requests:
        longer = tuple(Request(_longer(each.new), each.total + LONGER) for each in requests)
        changes |= {"length": {"batch": written(longer)}, "batch": {"batch": written((*requests, requests[-1]))}}
    for metric, change in zip(FIRST_OTHERS, changes.values(), strict=True):
        try:
            yield metric, msgspec.structs.replace(workload, **change)
        except ValueError:
            continue


def _longer(num_queries: int) -> int:
    return num_queries + LONGER if num_queries > 1 else num_queries


def _called(case: Case, start_s: float) -> float:
    """Make one call, wait for the device, and return the seconds since `start_s`.

    The arguments are prepared in this time, too, because that may already call the implementation. They are prepared a
    second time afterwards, and the seconds of this are subtracted.
    """
    with case.grad_mode():
        case.call()()
        case.device.synchronize()
        end_s = time.perf_counter()
        case.call()
        case.device.synchronize()
    return max(0.0, end_s - start_s - (time.perf_counter() - end_s))
