"""Build plans from a sweep, settings, implementations and limits; check them before any work begins."""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from attnbench import plugins
from attnbench.devices import device, names
from attnbench.processes.messages import Declared
from attnbench.processes.one_off_tasks import declared
from attnbench.statistics.choice import CHOOSING_PROCESSES
from attnbench.statistics.crossover import ladder
from attnbench.storage.events import Ladder, Plan
from attnbench.storage.records import REJECTABLE
from attnbench.workloads import huggingface, models
from attnbench.workloads import sweep as sweeps
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import MASKS_BETWEEN, Workload

Axes: TypeAlias = Mapping[str, int | float | str]
EXACT_CALL_LIMIT_S = 2.0
"""Default of `Plan.call_limit_s` in seconds if settings define the workloads, unless the sweep's value is larger."""
TIMEOUT_S = 60.0  # default of `Plan.timeout_s`
LENGTH = "length"  # the axis of a ladder that changes the lengths of query and key together
SEARCH_RANGES = {
    LENGTH: (16, 16384),
    "seq_len": (16, 16384),
    "kv_len": (16, 65536),
    "num_heads": (1, 128),
    "batch_size": (1, 128),
    "head_dim": (8, 256),
}
"""Axes along which crossovers can be searched, with the default smallest and largest value of each."""
CONDITIONS = {
    "cache": ("warm", "cold"),
    "launch": ("eager", "graph"),
    "pace": ("burst", "sustained"),
    "allocator": ("system", "steady", "retain"),
    "isolation": ("process", "shared"),
}
"""The words of --conditions by the parameter of build_plan that they set; one parameter takes at most one word."""
MOST_SEEDS = 2**31  # seeds are drawn below this number


def draw_seed() -> int:
    """Draw a random seed, so that no code under test can predict its inputs."""
    return secrets.randbelow(MOST_SEEDS)


def condition_fields(text: str) -> dict[str, str]:
    """Return the parameters of build_plan that conditions set, as in "cold,steady".

    Raises:
        ValueError: a condition is unknown, or two exclude one another.
    """
    fields = {word: field for field, words in CONDITIONS.items() for word in words}
    chosen: dict[str, str] = {}
    for word in filter(None, map(str.strip, text.split(","))):
        plugins.require_known("condition", [word], fields)
        if (other := chosen.setdefault(fields[word], word)) != word:
            raise ValueError(f"the conditions {other} and {word} exclude one another: give one of them")
    return chosen


def rejected(names: Sequence[str]) -> tuple[str, ...]:
    """Return the behaviours that a check rejects, as a value of `Plan.rejects`; "all" stands for all of REJECTABLE.

    A text may list several names, separated by commas.

    Raises:
        ValueError: there is no such behaviour.
    """
    given = [each.strip() for name in ([names] if isinstance(names, str) else names) for each in name.split(",")]
    plugins.require_known("behaviour", given, [*REJECTABLE, "all"])
    return tuple(dict.fromkeys(REJECTABLE.values() if "all" in given else map(REJECTABLE.__getitem__, given)))


def build_plan(  # noqa: PLR0913 - a parameter for each choice
    sweep: str,
    *,
    settings: Sequence[str] = (),
    model: str = "",
    phase: str = "prefill",
    is_exact: bool = False,
    implementations: Sequence[str] = (),
    baseline: str = "",
    with_baseline: bool = True,
    metrics: Sequence[str] | None = None,
    isolation: str = "process",
    declarations: Mapping[str, Declared] | None = None,
    **fields: Any,  # noqa: ANN401 - fields of Plan have several types
) -> Plan:
    """Build the plan of a run. `fields` are further fields of Plan; None stands for the value of the sweep.

    If `is_exact` is set, the settings define the workloads, and the sweep only the limits; but settings that name
    only the device select workloads of the sweep. A `model` (a preset or a config.json) also defines the workloads.
    `declarations` maps specs to declarations; None: these are read from the files. `with_baseline` adds the baseline,
    which ratios need, if it is not named. `isolation="process"` gives each foreign implementation its own process.

    Raises:
        ValueError: a value is not possible; the message lists the allowed ones.
    """
    chosen = sweeps.load(sweep)
    parsed = sweeps.parse_settings(settings)
    present = _present_devices()
    stands_alone = bool(model or parsed.keys() - {"device"}) and is_exact
    source = huggingface.load(model) if model else None
    if source is not None:
        workloads = models.workloads(source, phase, {"device": [present[-1]]} | parsed)
    else:
        workloads = (sweeps.alone if stands_alone else sweeps.workloads)(chosen, parsed, present)
    _require_devices(workloads, needs_graphs=fields.get("launch") == "graph")
    left_out = {} if stands_alone else sweeps.left_out(chosen, parsed, present)
    plugins.check_specs([*chosen.leave_out, *left_out])
    typed = list(dict.fromkeys(implementations or chosen.implementations or _usual_implementations(chosen, workloads)))
    specs, baseline = _with_labels(typed, baseline or _usual_baseline(chosen, workloads), with_baseline=with_baseline)
    left_out = {} if implementations else {name: ids for name, ids in left_out.items() if name in specs}
    if not source:
        built_in = built_in_axes(declared(specs) if declarations is None else declarations, parsed)
        if with_baseline:
            workloads = _with_shared_axes(workloads, built_in)
        else:
            of_pages = () if stands_alone or not chosen.of_pages else _of_pages(chosen, parsed, present)
            workloads, left_out = _each_suited(workloads, specs, built_in, left_out, of_pages)
    metrics = tuple(chosen.metrics if metrics is None else metrics)
    plugins.require_known("metric", metrics, plugins.plugs("attnbench.metrics", "METRIC"))
    limits = _limits(chosen, is_timed=bool(metrics), stands_alone=stands_alone)
    return Plan(
        sweep=f"{source.name}-{phase}" if source else "set" if stands_alone else Path(sweep).stem,
        workloads=workloads,
        baseline=baseline,
        metrics=metrics,
        model="" if source is None else source.name,
        left_out=left_out,
        **_participants(specs, isolation),
        **(limits | {name: value for name, value in fields.items() if value is not None}),
    )


def _participants(specs: Sequence[str], isolation: str) -> dict[str, Any]:
    """Return the fields of a plan that describe its implementations."""
    foreign = tuple(plugins.name_of(spec) for spec in specs if plugins.is_foreign(spec))
    return {
        "implementations": tuple(specs),
        "digests": {spec: plugins.digest(spec) for spec in specs},
        "alone": foreign if isolation == "process" else (),
    }


def _present_devices() -> tuple[str, ...]:
    """Return the names of the devices that `device=all` includes: all that seem present, the host first."""
    here = (name for name in names() if device(name).seems_present())
    return tuple(sorted(here, key=lambda name: not device(name).is_host))


def _require_devices(workloads: Iterable[Workload], *, needs_graphs: bool) -> None:
    for name in dict.fromkeys(workload.device for workload in workloads):
        target = device(name)  # raises if there is no such device
        if needs_graphs and not target.has_graphs:
            raise ValueError(f"{name} has no graphs of launches: omit --conditions graph, or give --set device=cuda")


def _usual_baseline(chosen: sweeps.Sweep, workloads: Sequence[Workload]) -> str:
    """Return the sweep's baseline or, if all workloads are paged, a baseline that reads pages.

    The time of a dense baseline would not include gathering the keys from the pages.
    """
    is_paged = all(workload.page_size for workload in workloads)
    return "paged_gather" if is_paged and chosen.baseline not in plugins.READ_PAGES else chosen.baseline


def _usual_implementations(chosen: sweeps.Sweep, workloads: Sequence[Workload]) -> list[str]:
    """Return the bundled implementations that the sweep does not leave out.

    Implementations for several ranks, and implementations that read pages, are included only if a workload needs them.
    """
    without = {*chosen.leave_out}
    if not any(workload.world_size > 1 for workload in workloads):
        without |= {*plugins.DISTRIBUTING}
    if not any(workload.page_size for workload in workloads):
        without |= {*plugins.READ_PAGES}
    return [name for name in plugins.implementation_names() if name not in without]


def _with_labels(typed: Sequence[str], baseline: str, *, with_baseline: bool) -> tuple[list[str], str]:
    """Return the specs of a run and the name of the baseline; add a missing baseline at the end if `with_baseline`.

    Specs that would share a name get labels (`plugins.labelled`).
    """
    specs = plugins.labelled(typed)
    baseline_spec = dict(zip(typed, specs, strict=True)).get(baseline, baseline)
    name = plugins.name_of(baseline_spec)
    if with_baseline and name not in map(plugins.name_of, specs):
        specs.append(baseline)
    plugins.check_specs(specs)
    return specs, name


def _limits(chosen: sweeps.Sweep, *, is_timed: bool, stands_alone: bool) -> dict[str, Any]:
    """Return the fields of a plan that come from the sweep unless the user sets them."""
    return {
        "budget_s": chosen.budget_s if is_timed or not chosen.metrics else 0.0,  # a check times nothing
        "call_limit_s": max(chosen.call_limit_s, EXACT_CALL_LIMIT_S) if stands_alone else chosen.call_limit_s,
        "timeout_s": TIMEOUT_S,
        "num_rounds": chosen.num_rounds,
        "smallest_effect": SMALLEST_EFFECT if stands_alone else chosen.smallest_effect,
        "allocator": chosen.allocator,
    }


def built_in_axes(declarations: Mapping[str, Declared], parsed: Iterable[str]) -> dict[str, Axes]:
    """Return the fixed axis values that each implementation declares, by spec, without axes that the user has set."""
    typed = {*parsed}

    def not_typed(axes: Axes) -> Axes:
        return {axis: value for axis, value in axes.items() if axis not in typed}

    return {spec: not_typed(declared_by.built_in) for spec, declared_by in declarations.items()}


def merge_built_in_axes(built_in: Mapping[str, Axes]) -> Axes:
    """Merge the axis values that implementations declare as fixed (`built_in`, by spec), so that all share workloads.

    Raises:
        ValueError: two implementations declare different values of an axis.
    """
    axes: dict[str, int | float | str] = {}
    for spec, own in built_in.items():
        for axis, value in own.items():
            if axes.setdefault(axis, value) != value:
                first = next(each for each in built_in if axis in built_in[each])
                one, other = map(plugins.name_of, (first, spec))
                raise ValueError(
                    f"{one} has {axis}={axes[axis]} built in, and {other} has {axis}={value}: use a run for each"
                )
    return axes


def _with_shared_axes(workloads: tuple[Workload, ...], built_in: Mapping[str, Axes]) -> tuple[Workload, ...]:
    """Give all workloads the fixed axis values of all implementations, except a choice between several masks."""
    merged = merge_built_in_axes(built_in)
    axes = {axis: value for axis, value in merged.items() if MASKS_BETWEEN not in str(value)}
    return apply_axes(workloads, axes) if axes else workloads


def apply_axes(workloads: Iterable[Workload], axes: Axes) -> tuple[Workload, ...]:
    """Set axes on all workloads; drop duplicates, and workloads that do not allow the values.

    The axis `mask` may contain several masks, separated by MASKS_BETWEEN. A workload whose mask is among them keeps it;
    other workloads get one of them in turn.

    Raises:
        ValueError: no workload allows the values.
    """
    distinct: dict[str, Workload] = {}
    problem: ValueError | None = None
    text = str(axes.get("mask", ""))
    masks = list(filter(None, text.split(MASKS_BETWEEN))) or [""]
    is_choice = MASKS_BETWEEN in text
    others = {axis: value for axis, value in axes.items() if axis != "mask"} if is_choice else axes
    for number, workload in enumerate(workloads):
        is_own = {workload.mask, workload.mask_rule.name} & {*masks}
        first = number % len(masks)
        for mask in masks[first:] + masks[:first] if is_choice and not is_own else [workload.mask]:
            try:
                changed = msgspec.structs.replace(workload, mask=mask).with_axes(others)
            except ValueError as error:
                problem = error
            else:
                distinct.setdefault(changed.id, changed)
                break
    if not distinct and problem is not None:
        raise problem
    return tuple(distinct.values())


def _of_pages(chosen: sweeps.Sweep, parsed: Mapping[str, list[str]], devices: tuple[str, ...]) -> tuple[Workload, ...]:
    """Return the workloads for implementations that read pages, on the devices that the settings name."""
    settings = {axis: values for axis, values in parsed.items() if axis == "device"}
    return sweeps.workloads(sweeps.load(chosen.of_pages), settings, devices)


def _each_suited(
    workloads: tuple[Workload, ...],
    specs: Sequence[str],
    built_in: Mapping[str, Axes],
    left_out: dict[str, tuple[str, ...]],
    of_pages: tuple[Workload, ...] = (),
) -> tuple[tuple[Workload, ...], dict[str, tuple[str, ...]]]:
    """Return the workloads that any implementation needs and, by implementation, the ids of those that it leaves out.

    An implementation with fixed axis values (`built_in`) needs only the workloads with these values. One that reads
    pages needs only the workloads `of_pages`, if there are any. Each leaves out all other workloads, and its own in
    `left_out`.
    """
    by_spec = {spec: apply_axes(workloads, built_in[spec]) if spec in built_in else workloads for spec in specs}
    by_spec |= {spec: of_pages for spec in specs if of_pages and plugins.reads_pages(spec)}
    every = {workload.id: workload for each in by_spec.values() for workload in each}
    out: dict[str, tuple[str, ...]] = {}
    for spec in specs:
        name, ids = plugins.name_of(spec), {each.id for each in by_spec[spec]}
        out[name] = tuple(each for each in every if each not in ids or each in left_out.get(name, ()))
    return tuple(every.values()), {name: ids for name, ids in out.items() if ids}


def plan_to_choose(planned: Plan) -> Plan:
    """Turn a plan into the plan of a run that finds the fastest implementation of each of its workloads."""
    return msgspec.structs.replace(planned, stages=("check", "metrics", "choose"), num_rounds=CHOOSING_PROCESSES)


def plan_to_search(planned: Plan, specs: Iterable[str], axis: str = LENGTH, low: int = 0, high: int = 0) -> Plan:
    """Turn a plan into the plan of a run that searches for crossovers of all pairs of implementations along an axis.

    A crossover is a value of the axis at which the faster implementation of a pair changes. `low` and `high` are the
    smallest and largest value of the axis; 0: the default in `SEARCH_RANGES`.

    Raises:
        ValueError: fewer than two implementations are named, the axis is unknown, or `low` is not below `high`.
    """
    names = list(dict.fromkeys(map(plugins.name_of, specs)))
    if len(names) < 2:  # noqa: PLR2004 - a crossover is between two
        only = f"only {names[0]}" if names else "none"
        raise ValueError(
            f"crossovers need two implementations, and {only} is named: run attnbench fastest fused sdpa --along length"
        )
    plugins.require_known("axis", [axis], SEARCH_RANGES)
    least, most = SEARCH_RANGES[axis]
    values = ladder(low or least, high or most, 8 if axis == "head_dim" else 1)
    ladders: list[Ladder] = []
    workloads: dict[str, Workload] = {}
    for base in planned.workloads:
        steps = [base.at_length(value) if axis == LENGTH else _with(base, axis, value) for value in values]
        workloads |= {each.id: each for each in steps}
        ids = tuple(each.id for each in steps)
        ladders.append(Ladder(axis=axis, values=tuple(values), workloads=ids, pairs=tuple(combinations(names, 2))))
    return msgspec.structs.replace(
        planned,
        workloads=tuple(workloads.values()),
        unasked=tuple(workloads),
        stages=("search",),
        ladders=tuple(dict.fromkeys(ladders)),
    )


def _with(base: Workload, axis: str, value: int) -> Workload:
    """Set an axis of a workload; a new number of query heads keeps its ratio to the number of key/value heads."""
    more = {"num_kv_heads": max(1, value * base.num_kv_heads // base.num_heads)} if axis == "num_heads" else {}
    return base.with_axes({axis: value} | more)
