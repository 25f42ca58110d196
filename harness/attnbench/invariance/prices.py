"""The price of invariance: the times of prefill and decoding compared with the baseline's."""

from collections.abc import Callable, Iterator

import torch

from attnbench.checking.case import build, draw_normal, place, reason_against
from attnbench.contract import Implementation
from attnbench.devices import device
from attnbench.invariance.laws import Subject
from attnbench.invariance.records import Price
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Arm
from attnbench.timing.functions import FunctionComparison
from attnbench.workloads.workload import Workload

DECODED = 8
"""Sequences that decode together."""


def prices(subject: Subject, baseline: Implementation, budget_s: float) -> Iterator[Price]:
    """The price of each phase that both implementations support."""
    length, here = subject.shape.kv_len, device(subject.shape.device)
    phases = {
        "prefill": subject.at(seq_len=length, kv_len=length, mask="causal"),
        "decode": subject.at(batch_size=DECODED, seq_len=1, kv_len=length, mask="none"),
    }
    for phase, workload in phases.items():
        if reason_against(subject.implementation, workload) or reason_against(baseline, workload):
            continue
        calls = {"it": _call(subject.implementation, workload), "baseline": _call(baseline, workload)}
        with torch.no_grad():
            compared = FunctionComparison(
                calls,
                "baseline",
                clock=here.clock,
                seed=subject.seed,
                gauge_work=here.interference_probe(torch.get_num_threads()),
            )
            compared.run(budget_s / len(phases))
        judged = compared.judgements["it"]
        seconds = median_estimate(compared.samples[Arm(implementation="it")]).point
        yield Price(
            phase=phase,
            seconds=seconds,
            ratio=judged.ratio,
            low=judged.low,
            high=judged.high,
            verdict=str(judged.verdict),
        )


def _call(implementation: Implementation, workload: Workload) -> Callable[[], object]:
    return build(workload, implementation, place(draw_normal(workload, 0), workload)).call()
