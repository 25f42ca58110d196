"""A check of invariance in a process of its own: `python -m ... ASKED FILE`; a line for each law, then the price."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import torch

from attnbench.checking.case import build, draw_normal, place, reason_against
from attnbench.contract.loading import implementation
from attnbench.devices import environment
from attnbench.invariance.events import AnyEvent, Asked, Failed, Priced
from attnbench.invariance.laws import Subject, tried
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Arm
from attnbench.timing.functions import FunctionComparison
from attnbench.workloads.workload import Workload

DECODED = 8
"""Sequences that decode together, where the price is taken."""


def main() -> None:
    """Try every law, then take the price."""
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    place_of = Path(sys.argv[2])

    def say(event: AnyEvent) -> None:
        with place_of.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    torch.set_num_threads(asked.workload.num_threads or environment.physical_cores())
    try:
        subject = Subject(implementation(asked.spec), asked.workload, asked.seed)
    except Exception as error:  # noqa: BLE001 - somebody's code
        say(Failed(reason=f"it cannot be loaded: {type(error).__name__}: {error}"))
        return
    for law in tried(subject):
        say(law)
    for priced in prices(asked, subject):
        say(priced)


def prices(asked: Asked, subject: Subject) -> Iterator[Priced]:
    """The time of prefill and of decoding, next to the baseline's."""
    length = asked.workload.kv_len
    phases = {
        "prefill": subject.at(seq_len=length, kv_len=length, mask="causal"),
        "decode": subject.at(batch_size=DECODED, seq_len=1, kv_len=length, mask="none"),
    }
    baseline = implementation(asked.baseline)
    for phase, workload in phases.items():
        if reason_against(subject.implementation, workload) or reason_against(baseline, workload):
            continue
        calls = {"it": _call(subject, workload), "baseline": _call(Subject(baseline, workload, 0), workload)}
        with torch.no_grad():
            compared = FunctionComparison(calls, "baseline", seed=asked.seed)
            compared.run(asked.budget_s / len(phases))
        judged = compared.judgements["it"]
        seconds = median_estimate(compared.samples[Arm(implementation="it")]).point
        yield Priced(
            phase=phase,
            seconds=seconds,
            ratio=judged.ratio,
            low=judged.low,
            high=judged.high,
            verdict=str(judged.verdict),
        )


def _call(subject: Subject, workload: Workload) -> Callable[[], object]:
    return build(workload, subject.implementation, place(draw_normal(workload, 0), workload)).call()


if __name__ == "__main__":
    main()
