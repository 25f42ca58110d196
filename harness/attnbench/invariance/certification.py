"""Certificates of invariance: each implementation at each shape in a process of its own."""

from collections.abc import Callable

import msgspec

from attnbench.invariance.events import AnyEvent, Asked, Certificate, Failed, LawTried, Priced
from attnbench.plugins import name_of
from attnbench.processes.lines import Ended, lines
from attnbench.workloads.workload import Workload

MODULE = "attnbench.invariance.process"
DECIDE = ("device", "dtype", "num_heads", "num_kv_heads", "head_dim", "value_dim", "kv_len", "scale", "sinks")
"""Axes of a workload that decide what is tried: the laws vary the others."""
LONGEST = 1024
"""Of a longer cache, so many keys: the laws vary what is computed with them, not their number."""


def shapes(workloads: tuple[Workload, ...]) -> list[Workload]:
    """The shapes of a plan, each once."""
    found: dict[tuple[object, ...], Workload] = {}
    for workload in workloads:
        short = {"kv_len": min(workload.kv_len, LONGEST), "seq_len": min(workload.kv_len, LONGEST)}
        plain = {"mask": "causal", "layout": "contiguous", "scope": "attention", "batch_size": 1, "dropout": 0.0}
        more = {"direction": "inference", "embed_dim": 0}
        shape = msgspec.structs.replace(workload, **(short | plain | more))
        found.setdefault(tuple(getattr(shape, axis) for axis in DECIDE), shape)
    return list(found.values())


def certify(asked: Asked, timeout_s: float, say: Callable[[AnyEvent], object]) -> Certificate:
    """Put every law to the test, and take the price."""
    events, ended = list[AnyEvent](), Ended()
    for event in lines(MODULE, asked, AnyEvent, ended, lambda _: timeout_s + asked.budget_s):
        say(event)
        events.append(event)
    failed = [event.reason for event in events if isinstance(event, Failed)]
    return Certificate(
        implementation=name_of(asked.spec),
        workload=asked.workload,
        seed=asked.seed,
        laws=tuple(event for event in events if isinstance(event, LawTried)),
        prices=tuple(event for event in events if isinstance(event, Priced)),
        failed=ended.reason or (failed or [""])[0],
    )
