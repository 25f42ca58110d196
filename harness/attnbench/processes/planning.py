"""From what was typed to a plan: sweep, settings, implementations and limits, checked before any work begins."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from attnbench import plugins
from attnbench.devices import device, names
from attnbench.storage.events import Plan
from attnbench.storage.records import FALSE_SHARE
from attnbench.workloads import flashinfer_trace, huggingface, models, sweep
from attnbench.workloads.flashinfer_trace import Line
from attnbench.workloads.models import Mix
from attnbench.workloads.sweep import SMALLEST_EFFECT

LIMITS = "quick"
"""The sweep whose limits hold where the workloads are a file's."""
EXACT_CALL_LIMIT_S = 2.0
"""A sweep leaves out what takes longer than its own limit; who asks for exact workloads wants to have them."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What was typed; None where nothing was, and the sweep decides."""

    sweep: str
    settings: Sequence[str] = ()
    model: str = ""  # a preset, or a config.json: its workloads, and of the sweep only its limits
    phase: str = "prefill"
    is_exact: bool = False  # the settings stand alone: of the sweep only its limits hold
    implementations: Sequence[str] = ()
    baseline: str = "sdpa"
    budget_s: float | None = None
    call_limit_s: float | None = None
    timeout_s: float = 60.0
    memory_limit_bytes: int = 0
    num_rounds: int | None = None
    smallest_effect: float | None = None
    false_share: float = FALSE_SHARE
    seed: int = 0
    cache: str = "warm"
    allocator: str | None = None
    metrics: Sequence[str] | None = None
    isolation: str = "process"


def plan(selection: Selection, *, with_baseline: bool = True) -> Plan:
    """The plan of a run. The baseline takes part even where it was not named, since ratios need it.

    Raises:
        ValueError: whatever was given that is not possible; the message says what is allowed.
    """
    file = Path(selection.sweep)
    is_traced = file.suffix == flashinfer_trace.SUFFIX
    chosen = sweep.load(LIMITS if is_traced else selection.sweep)
    settings = sweep.parse_settings(selection.settings)
    here = (name for name in names() if device(name).seems_present())  # what the device `all` stands for
    present = tuple(sorted(here, key=lambda name: not device(name).is_host))  # the host first
    is_exact = is_traced or (bool(selection.model or settings) and selection.is_exact)
    mixes: tuple[Mix, ...] = ()
    traced: dict[str, tuple[Line, ...]] = {}
    model = huggingface.load(selection.model) if selection.model else None
    if model is not None:
        workloads, mixes = models.mixes(model, selection.phase, {"device": [present[-1]]} | settings)
    elif is_traced:
        workloads, mixes, traced = flashinfer_trace.load(file, {"device": [present[-1]]} | settings)
    else:
        workloads = (sweep.alone if is_exact else sweep.workloads)(chosen, settings, present)
    for named in dict.fromkeys(workload.device for workload in workloads):
        device(named)  # raises where there is no such device
    left_out = {} if is_exact else sweep.left_out(chosen, settings, present)
    plugins.check_specs([*chosen.leave_out, *left_out])
    has_ranks = any(workload.world_size > 1 for workload in workloads)
    alone_here = () if has_ranks else plugins.distributing()
    usual = [name for name in plugins.implementation_names() if name not in {*chosen.leave_out, *alone_here}]
    specs = list(dict.fromkeys(selection.implementations or chosen.implementations or usual))
    if with_baseline and selection.baseline not in map(plugins.name_of, specs):
        specs.append(selection.baseline)
    plugins.check_specs(specs)
    alone = tuple(
        plugins.name_of(spec) for spec in specs if selection.isolation == "process" and plugins.is_foreign(spec)
    )
    metrics = tuple(chosen.metrics if selection.metrics is None else selection.metrics)
    known = plugins.plugs("attnbench.metrics", "METRIC")
    for metric in metrics:
        if metric not in known:
            raise ValueError(plugins.unknown("metric", metric, known))
    call_limit_s = max(chosen.call_limit_s, EXACT_CALL_LIMIT_S) if is_exact else chosen.call_limit_s
    smallest_effect = SMALLEST_EFFECT if is_exact else chosen.smallest_effect
    return Plan(
        sweep=f"{model.name}-{selection.phase}" if model else "set" if is_exact and not is_traced else file.stem,
        workloads=workloads,
        implementations=tuple(specs),
        baseline=plugins.name_of(selection.baseline),
        metrics=metrics,
        budget_s=chosen.budget_s if selection.budget_s is None else selection.budget_s,
        call_limit_s=call_limit_s if selection.call_limit_s is None else selection.call_limit_s,
        timeout_s=selection.timeout_s,
        memory_limit_bytes=selection.memory_limit_bytes,
        num_blocks=chosen.num_blocks,
        visit_s=chosen.visit_s,
        num_epochs=chosen.num_epochs,
        num_rounds=chosen.num_rounds if selection.num_rounds is None else selection.num_rounds,
        smallest_effect=smallest_effect if selection.smallest_effect is None else selection.smallest_effect,
        false_share=selection.false_share,
        seed=selection.seed,
        cache=selection.cache,
        allocator=selection.allocator or ("retain" if alone else chosen.allocator),  # heaps differ, and so may times
        digests={spec: plugins.digest(spec) for spec in specs},
        alone=alone,
        model="" if model is None else model.name,
        mixes=mixes,
        traced=traced,
        left_out={} if selection.implementations else {name: ids for name, ids in left_out.items() if name in specs},
    )
