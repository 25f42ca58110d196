"""Checks outside of a run, each in a worker: certificates of invariance, and attention inside a model."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec

from attnbench.invariance.records import Certificate
from attnbench.models.records import Judged, ModelBuilt, ModelSpec, StepsTimed, StepTime
from attnbench.plugins import name_of
from attnbench.processes import messages
from attnbench.processes.worker_client import Template, WorkerProcess, worker_template
from attnbench.storage.events import Plan
from attnbench.storage.records import Arm
from attnbench.workloads.workload import Workload

DECIDE = ("device", "dtype", "num_heads", "num_kv_heads", "head_dim", "value_dim", "kv_len", "scale", "sinks")
"""Axes of a workload that a certificate depends on: the laws vary the others."""
LONGEST = 1024
"""Largest number of keys of a certificate's shape: the laws vary the rest of the call, not their number."""


@contextmanager
def worker(timeout_s: float, preloaded: str = "", template: Template | None = None) -> Iterator[WorkerProcess]:
    """A worker process that is not started yet; inside the context it can be restarted after a loss.

    It is forked from `template`, or from a temporary one.
    """
    with ExitStack() as exits:
        if template is None:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="attnbench-")))
            template = exits.enter_context(
                closing(worker_template(folder / "worker.log", {messages.PRELOADED: preloaded}))
            )
        yield exits.enter_context(closing(WorkerProcess(template, timeout_s)))


def shapes(workloads: tuple[Workload, ...]) -> list[Workload]:
    """The shapes of a plan that need certificates, each once."""
    shapes: dict[tuple[object, ...], Workload] = {}
    for workload in workloads:
        short = {"kv_len": min(workload.kv_len, LONGEST), "seq_len": min(workload.kv_len, LONGEST)}
        plain = {"mask": "causal", "layout": "contiguous", "scope": "attention", "batch_size": 1, "dropout": 0.0}
        more = {"direction": "inference", "embed_dim": 0}
        shape = msgspec.structs.replace(workload, **(short | plain | more))
        shapes.setdefault(tuple(getattr(shape, axis) for axis in DECIDE), shape)
    return list(shapes.values())


def certify(plan: Plan, spec: str, shape: Workload) -> Certificate:
    """Test every law of invariance."""
    name, seed = name_of(spec), plan.seed
    request = messages.Certify(workload=shape, arm=Arm(implementation=name), spec=spec, seed=seed)
    with worker(plan.timeout_s) as process:
        process.start()
        reply = process.ask(request)
    if isinstance(reply, Certificate):
        return reply
    assert isinstance(reply, messages.Failed)
    return Certificate(implementation=name, workload=shape, seed=seed, failed=reply.message)


class ModelOutcome(msgspec.Struct, kw_only=True):
    """All findings of a check inside a model."""

    built: ModelBuilt | None = None
    judged: dict[str, Judged] = {}
    timed: tuple[StepTime, ...] = ()
    trouble: str = ""  # why nothing was timed although something agreed


def check_in_model(
    spec: ModelSpec, attentions: tuple[str, ...], *, budget_s: float, timeout_s: float, note: Callable[[str], object]
) -> ModelOutcome:
    """Judge every attention in the model, then spend `budget_s` on timing those that agree.

    An attention that crashes or hangs the process affects only itself: the model is rebuilt for the others.

    Raises:
        ValueError: there is no model for the configuration, or it cannot be built.
    """
    outcome = ModelOutcome()
    with worker(timeout_s, "transformers.modeling_utils") as process:

        def build() -> None:
            if process.is_running:
                return
            note("building")
            process.start()
            reply = process.ask(messages.BuildModel(spec=spec))
            if isinstance(reply, messages.Failed):
                message = f"the model cannot be built: {reply.message}" if reply.is_lost else reply.message
                raise ValueError(message)  # noqa: TRY004 - the configuration is wrong, and no type
            assert isinstance(reply, ModelBuilt)
            outcome.built = reply

        for attention in attentions:
            build()
            note(f"checking {attention}")
            reply = process.ask(messages.JudgeAttention(attention=attention))
            if isinstance(reply, messages.Failed):
                reply = Judged(attention=attention, reason=reply.message)
            assert isinstance(reply, Judged)
            outcome.judged[attention] = reply
        right = tuple(attention for attention in attentions if outcome.judged[attention].is_right)
        if len(right) > 1 and budget_s > 0:
            build()
            note("timing")
            process.timeout_s += budget_s
            reply = process.ask(messages.TimeSteps(attentions=right, budget_s=budget_s))
            if isinstance(reply, messages.Failed):
                outcome.trouble = reply.message
            else:
                assert isinstance(reply, StepsTimed)
                outcome.timed = reply.steps
    return outcome
