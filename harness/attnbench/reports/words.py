"""Workloads in words: titles of groups and panels, derived from the axes, so that a new one is shown, too."""

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from attnbench.analysis.cached import once
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES, rows, varying
from attnbench.storage.events import Plan
from attnbench.units import plain
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    import pandas as pd

Axes = Mapping[str, Any]
"""The value of every axis: a row of the table, or `Workload.axes()`."""
LEADING: dict[str, Callable[[Any], str]] = {
    "scope": lambda scope: {"attention": "attention only", "module": "whole module"}.get(scope, scope),
    "direction": lambda direction: str(direction).replace("_", " and "),
    "dtype": str,
    "mask": lambda mask: "no mask" if mask == "none" else str(mask).replace("_", " "),
}
SIZES = {
    "batch_size": "B",
    "num_heads": "H",
    "num_kv_heads": "G",
    "head_dim": "K",
    "value_dim": "V",
    "embed_dim": "D",
}
BIASES = {
    "all": "all biases",
    "qkv": "biases of query, key and value alone",
    "out": "a bias of the output alone",
    "none": "no biases",
}
TRAILING: dict[str, Callable[[Any], str]] = {
    "bias": lambda bias: BIASES.get(bias, bias),
    "dropout": lambda dropout: f"dropout {dropout:g}" if dropout else "no dropout",
    "device": lambda device: f"on {device}",
    "num_threads": lambda number: f"{number} thread{'s' * (number > 1)}" if number else "a thread for each core",
    "seed": lambda seed: f"seed {seed}",
    "layout": lambda layout: f"{layout} in memory",
    "float32_matmul_precision": lambda precision: f"{precision} precision of float32 products",
}
ALWAYS = {*LEADING, "batch_size", "num_heads", "head_dim"}
"""Axes that every title names."""
WORDED = (*LEADING, *SIZES, *TRAILING)
OTHERS = tuple(axis for axis in GROUP_AXES if axis not in WORDED)
"""Axes without words of their own: shown as axis=value."""
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Workload)}


def title(axes: Axes, varying: Collection[str] = ()) -> str:
    """A workload less its lengths: "attention only, forward, float32, causal, B=1 H=8 K=64".

    Left out are axes that follow from others or hold their default. One without words of its own is also shown where
    it is among `varying`.
    """
    return _join({axis: _word(axis, axes) for axis in (*WORDED, *OTHERS) if _is_shown(axis, axes, varying)})


@once
def titles(results: Results) -> dict[str, str]:
    """By id, the title of each workload of a run: two that differ in more than length have two titles."""
    axes = {workload.id: workload.axes() for workload in results.plan.workloads}
    differ = {axis for axis in OTHERS if len({each[axis] for each in axes.values()}) > 1}
    return {workload: title(each, differ) for workload, each in axes.items()}


def length(axes: Axes) -> str:
    """The query length, and the key length where it differs: "512" or "1 x 512"."""
    same = axes["kv_len"] == axes["seq_len"]
    return str(axes["seq_len"]) if same else f"{axes['seq_len']} x {axes['kv_len']}"


def shared(cells: "pd.DataFrame") -> str:
    """What all the cells have in common, in words."""
    first, differ = rows(cells.iloc[:1])[0], varying(cells)
    return _join(
        {axis: _word(axis, first) for axis in (*WORDED, *OTHERS) if axis not in differ and _is_shown(axis, first)}
    )


def apart(cells: "pd.DataFrame", differ: Collection[str]) -> str:
    """What sets one panel apart from others that differ in those axes: "causal · H=8"."""
    first = rows(cells.iloc[:1])[0]
    return " · ".join(_word(axis, first) for axis in (*WORDED, *OTHERS) if axis in differ)


def base(plan: Plan) -> str:
    """What the ratios of a run are to."""
    return plain(plan.baseline) if plan.sides is None else "the base"


def _word(axis: str, axes: Axes) -> str:
    value = axes[axis]
    if axis in SIZES:
        return f"{SIZES[axis]}={value}"
    if axis in OTHERS:
        return f"{axis}={f'{value:g}' if isinstance(value, float) else value}"
    return (LEADING | TRAILING)[axis](value)


def _is_shown(axis: str, axes: Axes, varying: Collection[str] = ()) -> bool:
    if axis in ALWAYS or (axis in OTHERS and axis in varying):
        return True
    follows = {
        "num_kv_heads": axes["num_heads"],
        "value_dim": axes["head_dim"],
        "embed_dim": axes["num_heads"] * axes["head_dim"],
    }
    return bool(axes[axis] != follows.get(axis, DEFAULTS[axis]))


def _join(texts: Mapping[str, str]) -> str:
    leading = [word for axis, word in texts.items() if axis in LEADING]
    sizes = " ".join(word for axis, word in texts.items() if axis in SIZES)
    trailing = [word for axis, word in texts.items() if axis not in LEADING and axis not in SIZES]
    return ", ".join(part for part in (*leading, sizes, *trailing) if part)
