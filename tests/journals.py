"""A made-up but lifelike run, written through the real journal, with every case that a report must handle."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from attnbench.analysis.results import Results, read
from attnbench.storage.events import (
    SCHEMA,
    ArmSamples,
    CeilingsMeasured,
    CellChecked,
    CellFailed,
    CellMeasured,
    CellProfiled,
    Event,
    Plan,
    RunFinished,
    RunStarted,
    VisitFinished,
    WorkerStarted,
)
from attnbench.storage.journal import Journal
from attnbench.storage.records import (
    COPY,
    MATMUL,
    PROBE,
    Agreement,
    Arm,
    Ceilings,
    CeilingSample,
    Environment,
    Measurement,
    Operator,
    Operators,
    ProbeResult,
    Sample,
    Status,
    TensorError,
)
from attnbench.workloads.counts import dense_flops
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

EVIL = "=cmd|'<script>alert(1)</script>`$x_{1}` --> *a* [b](http://c.example)\x1b[31m"
REASON = "needs <b>a GPU</b> | see `docs`\nand $\\alpha$"
SPEEDS = {  # time at T=512 in seconds, growth exponent, share of the score matrix held at the peak
    "naive_loop": (60e-3, 2.0, 0.0),
    "module_list": (4.1e-3, 1.7, 0.4),
    "fused": (2.6e-3, 1.8, 2.0),
    "einsum": (2.62e-3, 1.8, 2.0),
    "bmm": (2.58e-3, 1.8, 2.0),
    "chunked": (3.0e-3, 1.75, 0.0),
    "sdpa": (1.3e-3, 1.6, 0.0),
    "sdpa_math": (2.7e-3, 1.8, 3.0),
    "sdpa_flash": (1.31e-3, 1.6, 0.0),
    "torch_mha": (3.3e-3, 1.7, 2.0),
    EVIL: (1.9e-3, 1.65, 1.0),
}
BASELINE = "sdpa"
Times = tuple[float, Callable[[Workload, str], float]]
"""The slowdown of all implementations but the baseline, and a function that gives the true seconds of a call."""
ENVIRONMENT = Environment(
    cpu="Example CPU @ 2.00GHz",
    cpu_capability="AVX2",
    native_dtypes=(),
    num_physical_cores=2,
    num_logical_cores=4,
    memory_bytes=8 * 2**30,
    system="Linux x86_64",
    python="3.11.9",
    versions={"torch": "2.13.0", "numpy": "2.3.0", "attnbench": "0.1.0"},
    num_threads=2,
    load=0.2,
)


def ceilings(workload: Workload, matmul: float = 1.2e12, copy: float = 8e10, crowding: float = 0.0) -> Ceilings:
    """Build ceilings from three rounds at these rates; a copy larger than the caches reaches a third of `copy`."""
    device, dtype, num_threads = workload.place
    samples = [
        CeilingSample(kind, dtype, size, amount, amount / rate, 1, number)
        for number in range(3)
        for kind, size, amount, rate in (
            (MATMUL, 1024, 2 * 1024**3, matmul),
            (COPY, 2**18, 2**19, copy),
            (COPY, 2**26, 2**27, copy / 3),
        )
    ]
    return Ceilings(device=device, dtype=dtype, num_threads=num_threads, samples=tuple(samples), crowding=crowding)


def workloads(**axes: tuple[int | str, ...]) -> tuple[Workload, ...]:
    """Build a workload for each combination of the values of these axes; the last axis varies fastest."""
    found: list[dict[str, int | str]] = [{}]
    for axis, values in axes.items():
        found = [{**point, axis: value} for point in found for value in values]
    return tuple(Workload(**point) for point in found)  # type: ignore[arg-type]


def planned(points: tuple[Workload, ...], names: tuple[str, ...], **fields: Any) -> Plan:
    """Plan a run of these implementations with the baseline `sdpa`; `fields` replace the usual settings."""
    usual: dict[str, Any] = {"sweep": "example", "baseline": BASELINE, "metrics": ("latency",), "budget_s": 0.0}
    usual |= {"call_limit_s": 10.0, "timeout_s": 60.0, "num_blocks": 4}
    return Plan(workloads=points, implementations=names, **(usual | fields))


USUAL = workloads(scope=("attention", "module"), mask=("none", "causal"), seq_len=(128, 512, 2048))


def write(
    folder: Path,
    points: tuple[Workload, ...] = USUAL,
    names: tuple[str, ...] = tuple(SPEEDS),
    *,
    num_epochs: int = 16,
    num_visits: int = 1,
    is_finished: bool = True,
    slowdown: float = 1.0,
    seed: int = 7,
    time: str = "2025-11-02T10:00:00+00:00",
    commit: str = "1a2b3c4",
    environment: Environment = ENVIRONMENT,
    levels: dict[str, float] | None = None,
    time_of: Callable[[Workload, str], float] | None = None,
    smallest_effect: float = SMALLEST_EFFECT,
) -> Results:
    """Write the run's journal into `folder` and read it back; `slowdown` multiplies all times but the baseline's.

    `levels` are arguments of `ceilings`; with {} the journal has no ceilings, as older journals.

    Each workload is visited `num_visits` times in each epoch (process); `time_of` replaces the true times of `seconds`.
    """
    fields = {"metrics": ("latency", "peak_memory"), "budget_s": 60.0, "call_limit_s": 5.0, "timeout_s": 30.0}
    plan = planned(points, names, smallest_effect=smallest_effect, **fields)
    with Journal(folder) as journal:
        journal.append(RunStarted(schema=SCHEMA, run=folder.name, time=time, commit=commit, plan=plan))
        journal.append(WorkerStarted(time=time, environment=environment))
        for workload in {point.place: point for point in points}.values() if levels != {} else ():
            journal.append(CeilingsMeasured(ceilings=ceilings(workload, **(levels or {}))))
        for event in _events(plan, (slowdown, time_of or seconds), (num_epochs, num_visits), seed):
            journal.append(event)
        if is_finished:
            journal.append(RunFinished(time="2025-11-02T10:02:00+00:00", elapsed_s=119.0))
    return read(folder)


def status(workload: Workload, name: str) -> tuple[Status, str, bool]:
    """Return status, message, and whether it was predicted, for a cell of the made-up run."""
    if name == "liar":
        return Status.disagrees, "the output holds values that are not finite", False
    if name == "naive_loop" and workload.seq_len >= 2048:
        return Status.timeout, "one call is predicted to last 9.6 s, over the limit of 5 s", True
    if name == "torch_mha" and workload.scope == "attention":
        return Status.unsupported, REASON, False
    if name == "module_list" and workload.mask == "causal" and workload.scope == "module":
        return Status.disagrees, "your output equals the causal mask off by one; first differs at masked scores", False
    if name == "sdpa_math" and workload.mask == "causal" and workload.seq_len >= 2048:
        return Status.crashed, "the worker was killed by signal 9", False
    return Status.ok, "", False


def seconds(workload: Workload, name: str) -> float:
    base, growth, _ = SPEEDS.get(name, (2e-3, 1.8, 1.0))
    scope = 1.3 if workload.scope == "module" else 1.0
    causal = 0.65 if workload.mask == "causal" and name in {"sdpa", "sdpa_flash", "chunked"} else 1.0
    return base * scope * causal * (workload.seq_len * workload.kv_len / 512**2) ** (growth / 2)


QUICK = (
    *workloads(mask=("none", "causal"), direction=("inference",), seq_len=(64, 128, 256, 512, 1024)),
    *workloads(mask=("causal",), direction=("forward_backward",), seq_len=(128, 512)),
    *workloads(scope=("module",), direction=("inference",), seq_len=(128, 512)),
    *workloads(dtype=("bfloat16", "float16"), direction=("inference",), seq_len=(512,)),
    *workloads(batch_size=(4,), mask=("padding",), direction=("inference",), seq_len=(512,)),
)
"""Shapes of a quick sweep."""
QUICK_NAMES = ("naive_loop", "fused", "einsum", "bmm", "chunked", "sdpa", "sdpa_math", "sdpa_flash", "torch_mha")


def quick_times(workload: Workload, name: str) -> float:
    """Return the seconds on a processor without half precision: there, and at short lengths, textbook forms win."""
    time_s = seconds(workload, name)
    if name in {"fused", "einsum", "bmm"}:
        time_s *= 0.27 if workload.dtype != "float32" else (0.42 if workload.seq_len <= 128 else 1.0)
    return 3.0 * time_s * (3.0 if workload.direction == "forward_backward" else 1.0)


def quick(folder: Path, **options: Any) -> Results:
    """Write a quick sweep from a quiet machine: 15 shapes, nine implementations, all right."""
    return write(folder, QUICK, QUICK_NAMES, time_of=quick_times, smallest_effect=0.075, **options)


def _events(plan: Plan, times: Times, sizes: tuple[int, int], seed: int) -> Iterator[Event]:
    rng = np.random.default_rng(seed)
    for workload in plan.workloads:
        for name in plan.implementations:
            found, message, is_predicted = status(workload, name)
            agreement = _agreement(workload, name, found, rng) if found in {Status.ok, Status.disagrees} else None
            checked = Status.ok if found is Status.crashed else found
            yield CellChecked(
                workload=workload.id,
                implementation=name,
                status=checked,
                message=message if checked is found else "",
                is_predicted=is_predicted,
                agreement=agreement,
                executed_flops=None if name.startswith("sdpa") else dense_flops(workload),
            )
    num_epochs, num_visits = sizes
    for epoch in range(num_epochs):
        for visit in range(epoch * num_visits, (epoch + 1) * num_visits):
            for workload in plan.workloads:
                yield _visit(plan, workload, (epoch, visit), times, rng)
    live = ((w, name) for w in plan.workloads for name in plan.implementations)
    for workload, name in live:
        if status(workload, name)[0] in {Status.ok, Status.crashed}:
            seen = operators(name, seconds(workload, name))
            yield CellProfiled(workload=workload.id, implementation=name, operators=seen)
    for workload in plan.workloads:
        for name in plan.implementations:
            found, message, _ = status(workload, name)
            if found is Status.crashed:
                yield CellFailed(workload=workload.id, implementation=name, status=found, message=message)
            elif found is Status.ok:
                yield _memory(workload, name)


def operators(name: str, call_s: float) -> Operators:
    """List the operators: one kernel without a score matrix, or the steps of the textbook form with one."""
    if not SPEEDS.get(name, (0, 0, 1.0))[2]:
        kernel = Operator(name="aten::_scaled_dot_product_flash_attention_for_cpu", num_calls=1, self_s=call_s)
        return Operators(calls=(kernel,), observed="flash")
    shares = {"aten::bmm": (2, 0.5), "aten::_softmax": (1, 0.3), "aten::copy_": (3, 0.2)}
    calls = tuple(Operator(name=op, num_calls=n, self_s=share * call_s) for op, (n, share) in shares.items())
    return Operators(calls=calls)


def _visit(
    plan: Plan, workload: Workload, place: tuple[int, int], times: Times, rng: np.random.Generator
) -> VisitFinished:
    slowdown, time_of = times
    live = [name for name in plan.implementations if status(workload, name)[0] in {Status.ok, Status.crashed}]
    measured = [Arm(implementation=name) for name in live]
    arms = [*measured, PROBE]
    samples: dict[Arm, list[Sample]] = {arm: [] for arm in arms}
    of_visit = rng.normal(0, 0.03)
    of_arm = {arm: rng.normal(0, 0.002) for arm in arms}
    for block in range(plan.num_blocks):
        of_block = of_visit + rng.normal(0, 0.02)
        for slot, number in enumerate(rng.permutation(len(arms))):
            arm = arms[number]
            name = arm.implementation
            truth = 30e-6 if arm == PROBE else time_of(workload, name) * (1.0 if name == plan.baseline else slowdown)
            value = truth * float(np.exp(of_block + of_arm[arm] + rng.normal(0, 0.004)))
            faults = 65536 if workload.seq_len >= 2048 and SPEEDS.get(name, (0, 0, 0))[2] >= 2 else 0
            sample = Sample(value=value, epoch=place[0], visit=place[1], block=block, slot=slot, num_faults=faults)
            samples[arm].append(sample)
    return VisitFinished(
        workload=workload.id,
        epoch=place[0],
        visit=place[1],
        arms=tuple(ArmSamples(arm=arm, samples=tuple(taken)) for arm, taken in samples.items()),
        called_s=sum(sample.value for taken in samples.values() for sample in taken),
    )


def _memory(workload: Workload, name: str) -> CellMeasured:
    output = workload.batch_size * workload.num_heads * workload.seq_len * workload.value_dim * 4
    scores = workload.batch_size * workload.num_heads * workload.seq_len * workload.kv_len * 4
    peak = output + SPEEDS.get(name, (0, 0, 1.0))[2] * scores
    measurement = Measurement(metric="peak_memory", unit="bytes", samples=(Sample(value=peak),))
    return CellMeasured(workload=workload.id, implementation=name, measurement=measurement)


def _agreement(workload: Workload, name: str, found: Status, rng: np.random.Generator) -> Agreement:
    allowed = {"float32": 2e-6, "bfloat16": 1.6e-2}.get(workload.dtype, 2e-3)
    largest = 40.0 if found is Status.disagrees else 0.9

    def tensor(label: str) -> TensorError:
        error = None if name == "liar" else allowed * float(rng.uniform(0.05, largest))
        actual = None if error is None else 0.5 + error
        return TensorError(tensor=label, error=error, allowed=allowed, worst=(0, 0, 1), expected=0.5, actual=actual)

    probes = tuple(
        ProbeResult(probe=probe, tensors=tuple(map(tensor, tensors)))
        for probe, tensors in (("normal", ("output",)), ("needles", ("output", "grad_query")))
    )
    return Agreement(probes=probes, diagnosis="off by one" if largest > 1 else "")
