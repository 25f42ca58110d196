"""Tasks of a worker outside of a run: read declarations, test laws of invariance, and check attention in a model."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import msgspec

from attnbench import plugins
from attnbench.invariance.records import Certificate
from attnbench.models.records import Judged, ModelBuilt, ModelSpec, StepTime
from attnbench.processes.messages import Declared, Failed
from attnbench.processes.worker_client import START_TIMEOUT_S, ProcessClient, Template
from attnbench.storage.events import Plan
from attnbench.workloads.workload import Workload

DECIDE = ("device", "dtype", "num_heads", "num_kv_heads", "head_dim", "value_dim", "kv_len", "scale", "sinks")
"""Axes of a workload on which a certificate (the results of all laws of invariance for an implementation) depends; the
laws vary all other axes."""
LONGEST = 1024
"""Largest number of keys with which a certificate is tested; the certificate also covers workloads with more keys."""


@contextmanager
def worker(timeout_s: float, template: Template | None = None) -> Iterator[ProcessClient]:
    """Provide a client whose worker starts at the first request; after a loss, the next request starts another worker.

    Workers are forked from `template` or, without it, from a temporary one. `timeout_s` limits the seconds of a step.
    """
    with ExitStack() as exits:
        if template is None:
            folder = Path(exits.enter_context(tempfile.TemporaryDirectory(prefix="attnbench-")))
            template = exits.enter_context(closing(Template(folder / "worker.log")))
        yield exits.enter_context(closing(ProcessClient(template, timeout_s)))


def declared(specs: Iterable[str], template: Template | None = None) -> dict[str, Declared]:
    """Return the declarations (built-in axis values) of implementations, by spec; for `template` see `worker`.

    A file that does not import attnbench declares nothing and is not executed. A file that ends its process, or hangs,
    is left out, because the check will report the failure.
    """
    by_file: defaultdict[Path | None, list[str]] = defaultdict(list)
    for spec in specs:
        if "attnbench" in plugins.imported(spec):
            by_file[plugins.split(plugins.variant(spec)[0])[0]].append(spec)
    declarations: dict[str, Declared] = {}
    with worker(START_TIMEOUT_S, template) as process:
        for specs_of_file in by_file.values():
            process.start()
            for spec in specs_of_file:
                reply = process.ask("declare", Declared, spec=spec)
                if isinstance(reply, Declared):
                    declarations[spec] = reply
                elif reply.raised:
                    declarations[spec] = Declared(problem=reply.message)
    return declarations


def shapes(workloads: tuple[Workload, ...]) -> list[Workload]:
    """Return the distinct shapes at which laws of invariance are tested for a plan's workloads.

    The axes that the laws vary get fixed values, and lengths are cut to LONGEST. A batch of requests keeps all its
    values.
    """
    shapes: dict[tuple[object, ...], Workload] = {}
    for workload in workloads:
        if workload.requests:
            shapes.setdefault((workload.id,), workload)
            continue
        short = {"kv_len": min(workload.kv_len, LONGEST), "seq_len": min(workload.kv_len, LONGEST)}
        plain = {"mask": "causal", "layout": "contiguous", "scope": "attention", "batch_size": 1, "dropout": 0.0}
        more = {"direction": "inference", "embed_dim": 0}
        shape = msgspec.structs.replace(workload, **(short | plain | more))
        shapes.setdefault(tuple(getattr(shape, axis) for axis in DECIDE), shape)
    return list(shapes.values())


def certify(plan: Plan, spec: str, shape: Workload) -> Certificate:
    """Test every law of invariance on an implementation at one shape, in a fresh worker."""
    with worker(plan.timeout_s) as process:
        reply = process.ask("certify", Certificate, workload=shape, spec=spec, seed=plan.seed)
    if isinstance(reply, Failed):
        name = plugins.name_of(spec)
        return Certificate(implementation=name, workload=shape, seed=plan.seed, failed=reply.message)
    return reply


class ModelOutcome(msgspec.Struct, kw_only=True):
    """All findings of a check inside a model."""

    built: ModelBuilt
    judged: dict[str, Judged] = {}  # by attention
    timed: tuple[StepTime, ...] = ()  # of the attentions that agree; empty: not timed
    trouble: str = ""  # why timing failed; "" if it did not


def check_in_model(
    spec: ModelSpec, attentions: tuple[str, ...], *, budget_s: float, timeout_s: float, note: Callable[[str], object]
) -> ModelOutcome:
    """Judge attention implementations in the model; if at least two are right, time those for `budget_s` seconds.

    `note` is called with the name of each step before it begins; a step may take `timeout_s` seconds. If an
    implementation crashes or hangs the process, the model is built again for the remaining ones.

    Raises:
        ValueError: there is no model for the configuration, or it cannot be built.
    """
    with worker(timeout_s) as process:
        note("building")
        built = process.ask("build_model", ModelBuilt, model=spec)
        if isinstance(built, Failed):
            is_refused = built.raised == "ValueError"
            message = built.said if is_refused else f"the model cannot be built: {built.message}"
            raise ValueError(message)  # noqa: TRY004 - the configuration is wrong, not a type
        outcome = ModelOutcome(built=built)
        for attention in attentions:
            note(f"checking {attention}")
            judged = process.ask("judge_in_model", Judged, model=spec, attention=attention)
            if isinstance(judged, Failed):
                judged = Judged(attention=attention, reason=judged.message)
            outcome.judged[attention] = judged
        right = tuple(attention for attention in attentions if outcome.judged[attention].is_right)
        if len(right) > 1 and budget_s > 0:
            note("timing")
            process.timeout_s += budget_s
            timed = process.ask("time_in_model", tuple[StepTime, ...], model=spec, attentions=right, budget_s=budget_s)
            if isinstance(timed, Failed):
                outcome.trouble = timed.message
            else:
                outcome.timed = timed
    return outcome
