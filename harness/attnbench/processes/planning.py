"""From what was typed to a plan: sweep, settings, implementations and limits, checked before any work begins."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from attnbench import plugins
from attnbench.devices import device, names
from attnbench.processes.declared import Axes, Declared, declared, suited, together
from attnbench.statistics.choice import CHOOSING_PROCESSES
from attnbench.statistics.crossover import ladder
from attnbench.storage.events import Ladder, Plan
from attnbench.storage.records import EMPTY_ROWS, FALSE_SHARE, HIDDEN_NAN
from attnbench.workloads import flashinfer_trace, huggingface, models, policy, sweep
from attnbench.workloads.flashinfer_trace import Line
from attnbench.workloads.models import Mix
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

LIMITS = "quick"
"""The sweep whose limits hold where the workloads are a file's."""
EXACT_CALL_LIMIT_S = 2.0
"""A sweep leaves out what takes longer than its own limit; who asks for exact workloads wants to have them."""
MOST_TRIED = 6
"""Of all implementations, so many are checked and timed to find the fastest: those with the least predicted time."""
MOST_LADDERS = 4
"""Of more workloads, nobody asks from which length on the answer changes: there is no time to find out."""
REACH = 16
"""A change is looked for from so many times shorter to so many times longer."""
LENGTH = "length"
"""The axis of a ladder whose lengths of query and key grow together."""
WAYS = {
    LENGTH: (16, 16384),
    "seq_len": (16, 16384),
    "kv_len": (16, 65536),
    "num_heads": (1, 128),
    "batch_size": (1, 128),
    "head_dim": (8, 256),
}
"""Axes along which two may change places, and from where to where they are searched if nothing else is said."""


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
    launch: str = "eager"
    pace: str = "burst"
    allocator: str | None = None
    metrics: Sequence[str] | None = None
    isolation: str = "process"
    rejects: Sequence[str] = ()
    declarations: Mapping[str, Declared] | None = None  # by spec, where they have been asked for already


def rejected(*, empty_rows: str, hidden_nan: str) -> tuple[str, ...]:
    """Those of REJECTABLE that a check is asked to reject.

    Raises:
        ValueError: there is no such choice.
    """
    choices_of = {"empty_rows": ("any", "zero"), "hidden_nan": ("note", "reject")}
    for name, value in (("empty_rows", empty_rows), ("hidden_nan", hidden_nan)):
        if value not in (choices := choices_of[name]):
            raise ValueError(f"{name}={value} is not allowed: it is one of {', '.join(choices)}")
    return (EMPTY_ROWS,) * (empty_rows == "zero") + (HIDDEN_NAN,) * (hidden_nan == "reject")


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
        found = device(named)  # raises where there is no such device
        if selection.launch == "graph" and not found.has_graphs:
            raise ValueError(f"{named} has no graphs of launches: give --launch eager, or --set device=cuda")
    left_out = {} if is_exact else sweep.left_out(chosen, settings, present)
    plugins.check_specs([*chosen.leave_out, *left_out])
    has_ranks = any(workload.world_size > 1 for workload in workloads)
    without = {*chosen.leave_out, *(() if has_ranks else plugins.DISTRIBUTING)}
    without |= set() if policy.default_path() else {policy.ITSELF}
    usual = [name for name in plugins.implementation_names() if name not in without]
    typed = list(dict.fromkeys(selection.implementations or chosen.implementations or usual))
    specs = plugins.labelled(typed)
    baseline = plugins.name_of(dict(zip(typed, specs, strict=True)).get(selection.baseline, selection.baseline))
    if with_baseline and baseline not in map(plugins.name_of, specs):
        specs.append(selection.baseline)
    plugins.check_specs(specs)
    left_out = {} if selection.implementations else {name: ids for name, ids in left_out.items() if name in specs}
    if not (model or is_traced):
        declarations = declared(specs) if selection.declarations is None else selection.declarations
        workloads, left_out = _suited(workloads, specs, declarations, settings, left_out, is_alike=with_baseline)
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
        baseline=baseline,
        metrics=metrics,
        budget_s=chosen.budget_s if selection.budget_s is None else selection.budget_s,
        call_limit_s=call_limit_s if selection.call_limit_s is None else selection.call_limit_s,
        timeout_s=selection.timeout_s,
        memory_limit_bytes=selection.memory_limit_bytes,
        num_blocks=chosen.num_blocks,
        visit_s=chosen.visit_s,
        num_rounds=chosen.num_rounds if selection.num_rounds is None else selection.num_rounds,
        smallest_effect=smallest_effect if selection.smallest_effect is None else selection.smallest_effect,
        false_share=selection.false_share,
        seed=selection.seed,
        cache=selection.cache,
        launch=selection.launch,
        pace=selection.pace,
        allocator=selection.allocator or ("retain" if alone else chosen.allocator),  # heaps differ, and so may times
        digests={spec: policy.digest(spec) for spec in specs},
        alone=alone,
        model="" if model is None else model.name,
        mixes=mixes,
        traced=traced,
        left_out=left_out,
        rejects=tuple(selection.rejects),
    )


def _suited(  # noqa: PLR0913 - workloads, and what decides about them
    workloads: tuple[Workload, ...],
    specs: Sequence[str],
    declarations: Mapping[str, Declared],
    settings: Mapping[str, Sequence[str]],
    left_out: dict[str, tuple[str, ...]],
    *,
    is_alike: bool,
) -> tuple[tuple[Workload, ...], dict[str, tuple[str, ...]]]:
    """The workloads with the axes that implementations have built in, where no setting names them.

    With `is_alike` all have the same, to be compared; else each has its own, and the others' are left out.
    """

    def unset(axes: Axes) -> Axes:
        return {axis: value for axis, value in axes.items() if axis not in settings}

    if is_alike:
        axes = unset(together(declarations))
        return (suited(workloads, axes), left_out) if axes else (workloads, left_out)
    own = {
        spec: suited(workloads, unset(declarations[spec].built_in)) if spec in declarations else workloads
        for spec in specs
    }
    every = {workload.id: workload for each in own.values() for workload in each}
    out = {plugins.name_of(spec): set(every) - {each.id for each in own[spec]} for spec in specs}
    named = {
        name: tuple(each for each in every if each in {*ids, *left_out.get(name, ())}) for name, ids in out.items()
    }
    return tuple(every.values()), {name: ids for name, ids in named.items() if ids}


def plan_to_choose(selection: Selection, *, searches: bool = True) -> Plan:
    """The plan of a run that finds the fastest implementation of each workload.

    With `searches`, and where workloads are few, also from which length on somebody else is the fastest.

    Raises:
        ValueError: as of `plan`.
    """
    planned = plan(selection)
    asked = {each.id for each in planned.workloads}
    ladders, made = [], dict[str, Workload]()
    for base in planned.workloads if searches and len(asked) <= MOST_LADDERS else ():
        length, (least, most) = base.longest, WAYS[LENGTH]
        shorter, longer = max(least, length // REACH), max(length, min(most, length * REACH))
        values = sorted({*_way(min(shorter, length), length), *_way(length, longer)})
        steps = [base if value == length else base.at_length(value) for value in values]
        made |= {each.id: each for each in steps}
        ladders.append(Ladder(axis=LENGTH, values=tuple(values), workloads=_ids(steps), base=base.id))
    unasked = {key: each for key, each in made.items() if key not in asked}
    return msgspec.structs.replace(
        planned,
        workloads=(*planned.workloads, *unasked.values()),
        unasked=tuple(unasked),
        stages=("shortlist", "check", "metrics", "choose", *(["search"] if ladders else [])),
        ladders=tuple(ladders),
        shortlist=MOST_TRIED,
        num_rounds=CHOOSING_PROCESSES,
    )


def plan_to_search(selection: Selection, axis: str = LENGTH, low: int = 0, high: int = 0) -> Plan:
    """The plan of a run that finds where each two of the named implementations change places along an axis.

    `low` and `high` bound the way; 0: as `WAYS` says.

    Raises:
        ValueError: fewer than two were named, an axis that is no way up, or as of `plan`.
    """
    names = list(dict.fromkeys(map(plugins.name_of, selection.implementations)))
    if len(names) < 2:  # noqa: PLR2004 - two change places
        given = f"{names[0]} alone" if names else "nobody"
        raise ValueError(
            f"{given} cannot change places: give two implementations, as in attnbench fastest fused sdpa --along length"
        )
    if axis not in WAYS:
        raise ValueError(plugins.unknown("axis", axis, WAYS))
    planned, (least, most) = plan(selection), WAYS[axis]
    values = ladder(low or least, high or most, 8 if axis == "head_dim" else 1)
    ladders: list[Ladder] = []
    made: dict[str, Workload] = {}
    for base in planned.workloads:
        steps = [base.at_length(value) if axis == LENGTH else _with(base, axis, value) for value in values]
        made |= {each.id: each for each in steps}
        ladders.append(
            Ladder(axis=axis, values=tuple(values), workloads=_ids(steps), pairs=tuple(combinations(names, 2)))
        )
    return msgspec.structs.replace(
        planned,
        workloads=tuple(made.values()),
        unasked=tuple(made),
        stages=("search",),
        ladders=tuple(dict.fromkeys(ladders)),
    )


def _way(low: int, high: int) -> list[int]:
    return ladder(low, high) if low < high else [low]


def _ids(workloads: Iterable[Workload]) -> tuple[str, ...]:
    return tuple(each.id for each in workloads)


def _with(base: Workload, axis: str, value: int) -> Workload:
    """A workload with another value of an axis; of what followed from it, so much follows again.

    Raises:
        ValueError: there is no such workload.
    """
    changed = {axis: value}
    if axis == "num_heads":
        changed["num_kv_heads"] = max(1, value * base.num_kv_heads // base.num_heads)
    if axis == "head_dim" and base.value_dim == base.head_dim:
        changed["value_dim"] = value
    return msgspec.structs.replace(base, embed_dim=0, **changed)
