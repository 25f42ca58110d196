"""A sweep: a TOML file of axes and values, which expands to workloads; `--set axis=value,value` adapts it."""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from attnbench.plugins import require_known
from attnbench.workloads.covering import cover
from attnbench.workloads.workload import CHOICES, Workload

FOLDER = Path(__file__).parent / "sweeps"
AXES = {field.name: field for field in msgspec.structs.fields(Workload)}
MAX_WORKLOADS = 100_000
LEAVE_OUT = "leave_out"
COVER = "cover"
PAIRS = "pairs"
Values = dict[str, list[Any]]  # axes, or names of tables of axes, with their values
SMALLEST_EFFECT = 0.02
"""Default of `Sweep.smallest_effect`: smaller relative differences between times never count as faster or slower."""


class Sweep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a sweep file. Each table of `grid` is a product of its axes; an axis has one value or a list.

    If the values of several axes belong together, they form a list of tables under any other name, as in
    `lengths = [{ seq_len = 1, kv_len = 131 }, { seq_len = 67 }]`. With `cover = "pairs"` a grid is not the whole
    product but a few combinations that contain every pair of values of two axes. `leave_out` in a grid lists
    implementations that take part in that grid only if the user names them.
    """

    summary: str
    grid: list[dict[str, Any]]
    alone: dict[str, Any] = {}  # values of axes that `--set` does not name, if the command has no `--sweep`
    budget_s: float = 60.0  # wall time of a run
    call_limit_s: float = 2.0  # an implementation is skipped on a workload if its predicted call is longer
    metrics: tuple[str, ...] = ("latency", "peak_memory")
    implementations: tuple[str, ...] = ()  # empty: all
    baseline: str = "sdpa"  # the implementation that others are compared with
    leave_out: tuple[str, ...] = ()  # implementations that take part only if the user names them
    why_left_out: dict[str, str] = {}  # by the name of an implementation in a `leave_out`: the reason in a few words
    allocator: Literal["system", "steady", "retain"] = "system"
    num_rounds: int = 4  # fewest fresh processes that time each workload, even if all its verdicts are decided
    of_pages: str = ""  # name of another sweep for implementations that read pages, if this one has no pages
    smallest_effect: float = SMALLEST_EFFECT  # smaller relative differences do not count: 0.02 is 2 %


def names() -> list[str]:
    """Return the names of the bundled sweeps, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def load(name_or_file: str) -> Sweep:
    """Load the sweep of that name, or the sweep in that TOML file.

    Raises:
        ValueError: no such sweep, unreadable TOML, or an unknown key.
    """
    path = Path(name_or_file)
    if path.suffix != ".toml":
        require_known("sweep", [name_or_file], names(), "; or give a path to a .toml file")
        path = FOLDER / f"{name_or_file}.toml"
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Sweep)
    except OSError as error:
        known = f"name a .toml file, or choose among {', '.join(names())}"
        raise ValueError(f"cannot read the sweep {path}: {error.strerror}; {known}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        keys = f"put axes into a [[grid]] table; other keys are {', '.join(Sweep.__struct_fields__)}"
        raise ValueError(f"the sweep {path} is not readable: {error}; {keys}") from None


def parse_settings(settings: Iterable[str]) -> dict[str, list[str]]:
    """Parse `axis=value,value` texts into axis -> values; commas inside parentheses belong to the value.

    Raises:
        ValueError: a text without =, without a value, or with an unknown axis.
    """
    parsed: dict[str, list[str]] = {}
    for setting in settings:
        axis, equals, values = setting.partition("=")
        if not equals or not values.strip():
            raise ValueError(f"--set {setting} is not readable: write it as --set axis=value,value")
        require_known("axis", [axis.strip()], AXES)
        parsed[axis.strip()] = [value.strip() for value in re.split(r",(?![^(]*\))", values)]
    return parsed


def alone(sweep: Sweep, settings: Mapping[str, list[str]], devices: tuple[str, ...]) -> tuple[Workload, ...]:
    """Return the workloads that `--set` alone defines, in order; other axes are as in `sweep.alone`, or have defaults.

    `devices` are those of the machine. The last one is used if neither the settings nor `sweep.alone` name a device.

    Raises:
        ValueError: see `workloads`; or a value has no effect with the other values.
    """
    of_batch = {"direction": "inference"} if {"batch", "page_size"} & settings.keys() else {}  # no gradients
    values = _values({"device": devices[-1], **sweep.alone, **of_batch, **settings}, devices)
    found = _products([values])
    typed = [(axis, value) for axis in CHOICES if axis in settings for value in values[axis]]
    for axis, value in typed:
        if all(getattr(workload, axis) != value for workload in found):
            others = ", ".join(f"{name}={getattr(found[0], name)}" for name in ("scope", "num_kv_heads", "batch_size"))
            raise ValueError(f"{axis}={value} has no effect with {others}: set another value of one of these")
    return found


def workloads(sweep: Sweep, settings: Mapping[str, list[str]], devices: tuple[str, ...]) -> tuple[Workload, ...]:
    """Return the distinct workloads of the sweep that match the settings, in order.

    A setting of the device, or of an axis that no grid names, replaces the axis's values; other settings select among
    the values in the grids. The device `all` means `devices`.

    Raises:
        ValueError: an unknown axis, a value or combination that is not allowed or not in the sweep, or no workload.
    """
    named = {axis for grid in sweep.grid for axis in _axes_of(grid)} - {"device"}
    made = _products([values for _, values in _grids(sweep, settings, devices)])
    for axis in (axis for axis in settings if axis in named):
        values = _values({axis: settings[axis]}, devices)[axis]
        kept = [workload for workload in made if _has_one_of(workload, axis, values)]
        for value in values:
            if not any(_has(workload, axis, value) for workload in kept):
                make({axis: value})  # raises if no workload at all could have it
                has = ", ".join(dict.fromkeys(str(getattr(workload, axis)) for workload in made))
                advice = "leave out --sweep to run exactly what is set"
                raise ValueError(f"the sweep has no {axis}={value} here, only {has}: {advice}")
        made = tuple(kept)
    return made


def _has_one_of(workload: Workload, axis: str, values: Iterable[object]) -> bool:
    return any(_has(workload, axis, value) for value in values)


def left_out(sweep: Sweep, settings: Mapping[str, list[str]], devices: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return, for each implementation in a `leave_out`, the ids of the workloads in which it does not take part.

    From a workload in several grids, it is left out only if all of these grids leave it out.

    Raises:
        ValueError: see `workloads`; or a `leave_out` is not a list of names.
    """
    grids = [(grid.get(LEAVE_OUT, []), _products([values])) for grid, values in _grids(sweep, settings, devices)]
    for names, _ in grids:
        if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            example = f'give a list of names, as in {LEAVE_OUT} = ["flex"]'
            raise ValueError(f"{LEAVE_OUT} = {names} is not allowed: {example}")
    found: dict[str, tuple[str, ...]] = {}
    for name in sorted({name for names, _ in grids for name in names}):
        kept = {workload for names, made in grids if name not in names for workload in made}
        out = [workload.id for names, made in grids if name in names for workload in made if workload not in kept]
        found[name] = tuple(dict.fromkeys(out))
    return found


def _grids(
    sweep: Sweep, settings: Mapping[str, list[str]], devices: tuple[str, ...]
) -> list[tuple[dict[str, Any], Values]]:
    """Return each grid with the values of its axes, plus the settings of axes that no grid names.

    In a grid with `cover = "pairs"`, one axis COVER, whose values are combinations, replaces all axes but the device.
    """
    named = {axis for grid in sweep.grid for axis in _axes_of(grid)} - {"device"}
    more = {axis: values for axis, values in settings.items() if axis not in named}
    grids = []
    for grid in sweep.grid:
        axes = {axis: value for axis, value in grid.items() if axis not in {LEAVE_OUT, COVER}}
        if grid.get(COVER, PAIRS) != PAIRS:
            raise ValueError(f'{COVER} = {grid[COVER]} is not allowed: give "{PAIRS}", or leave it out')
        if COVER in grid:
            covered = {axis: value for axis, value in axes.items() if axis != "device"}
            device = {axis: value for axis, value in axes.items() if axis == "device"}
            axes = device | {COVER: cover(_values(covered, devices), _is_kept)}
        grids.append((grid, _values(axes | more, devices)))
    return grids


def _axes_of(grid: Mapping[str, Any]) -> set[str]:
    """Return the axes that a grid names, including those in its tables."""
    tables = [table for values in grid.values() if isinstance(values, list) for table in values]
    inner = {axis for table in tables if isinstance(table, dict) for axis in table}
    return {axis for axis in grid if axis in AXES} | inner


def _flat(combination: Mapping[str, Any]) -> dict[str, Any]:
    """Return the combination with its tables replaced by their axes."""
    flat: dict[str, Any] = {}
    for axis, value in combination.items():
        flat |= _flat(value) if isinstance(value, dict) else {axis: value}
    return flat


def _is_kept(combination: Mapping[str, Any]) -> bool:
    """Return whether `make` accepts these values and changes none of them."""
    try:
        workload = make(_flat(combination))
    except ValueError:
        return False
    return all(getattr(workload, axis) == value for axis, value in _flat(combination).items())


def _has(workload: Workload, axis: str, value: Any) -> bool:  # noqa: ANN401 - as the user typed it
    """Return whether a workload has that value of an axis; false if it cannot have the value."""
    try:
        return make(workload.axes() | {axis: value}) == workload
    except ValueError:
        return False


def _products(grids: list[Values]) -> tuple[Workload, ...]:
    """Return the distinct workloads of all grids."""
    counts = [math.prod(map(len, values.values())) for values in grids]  # before any is created: there may be 10^9
    if sum(counts) > MAX_WORKLOADS:
        largest = grids[counts.index(max(counts))]
        factors = " x ".join(f"{len(values)} of {axis}" for axis, values in largest.items() if len(values) > 1)
        most = f"at most {MAX_WORKLOADS} are allowed"
        raise ValueError(f"the sweep has {sum(counts)} workloads ({factors}), and {most}: give fewer values")
    made: dict[str, Workload] = {}
    for values in grids:
        for combination in itertools.product(*values.values()):
            workload = make(_flat(dict(zip(values, combination, strict=True))))
            made.setdefault(workload.id, workload)
    if not made:
        raise ValueError("the sweep has no workloads: give it at least one [[grid]] with values")
    return tuple(made.values())


def _values(grid: Mapping[str, Any], devices: tuple[str, ...]) -> Values:
    """Return the distinct values of each axis of a grid, with the device `all` replaced by `devices`."""
    values = {axis: value if isinstance(value, list) else [value] for axis, value in grid.items()}
    require_known("axis", [axis for axis, each in values.items() if not _are_combinations(each)], AXES)
    if "device" in values:
        values["device"] = [each for given in values["device"] for each in (devices if given == "all" else [given])]
    return {axis: _distinct(given) for axis, given in values.items()}


def _are_combinations(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


def _distinct(values: Iterable[Any]) -> list[Any]:
    return list({str(value): value for value in values}.values())


def make(axes: Mapping[str, Any]) -> Workload:
    """Create one workload from axis values, which may be texts.

    Raises:
        ValueError: an unknown axis, a value of the wrong type, or a value or combination that is not allowed.
    """
    require_known("axis", axes, AXES)
    converted = {}
    for axis, value in axes.items():
        try:
            converted[axis] = msgspec.convert(value, AXES[axis].type, strict=False)
        except msgspec.ValidationError:
            kind = {int: "a whole number", float: "a number", str: "a word"}[AXES[axis].type]
            raise ValueError(f"{axis}={value} is not allowed: {axis} is {kind}") from None
    return Workload(**converted)
