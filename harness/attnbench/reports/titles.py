"""Workloads in words: titles of groups, short labels of shapes, and lengths.

All are derived from the axes of workloads, so that new axes appear automatically.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import groupby
from typing import Any

import msgspec

from attnbench.analysis.comparisons import doubts, is_doubtful
from attnbench.analysis.results import Results
from attnbench.analysis.table import GROUP_AXES
from attnbench.storage.events import Plan
from attnbench.storage.records import BASE
from attnbench.units import sanitize_line
from attnbench.workloads.batch import NO_BATCH
from attnbench.workloads.workload import Workload, following

Axes = Mapping[str, Any]  # the value of every axis, as in `Workload.axes()`
SIZES = {"batch_size": "B", "num_heads": "H", "num_kv_heads": "G", "head_dim": "K", "value_dim": "V", "embed_dim": "D"}
SCOPES = {"attention": "attention only", "module": "whole module"}
LONG_MASK = 60  # most characters of a mask in a title, since some masks list many numbers
WORDS: dict[str, Callable[[Any], str]] = {
    "scope": lambda scope: SCOPES.get(scope, scope),
    "direction": lambda direction: str(direction).replace("_", " and "),
    "dtype": str,
    "mask": lambda mask: "no mask" if mask == "none" else sanitize_line(mask.replace("_", " "), limit=LONG_MASK),
    **{axis: f"{letter}={{}}".format for axis, letter in SIZES.items()},
    "device": lambda device: f"on {device}",
}
"""Formats of axes in titles, in the order of titles. All other axes are written as for --set: seed=3."""
ALWAYS = {"scope", "direction", "dtype", "mask", "batch_size", "num_heads", "head_dim"}
"""Axes that a title names even if they have their default value."""
OF_REQUESTS = {"mask", "batch_size"}  # axes whose values follow from a batch of requests
NAMED = (*WORDS, *(axis for axis in GROUP_AXES if axis not in WORDS))  # all axes but lengths, in the order of titles
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(Workload)}
SHORT = {"attention": "attention", "module": "module", "forward_backward": "fwd+bwd"}
"""Shorter words for labels, since a line of the screen has 80 columns."""


def word(axis: str, axes: Axes) -> str:
    """Format the value of one axis."""
    value = axes[axis]
    if axis in WORDS:
        return WORDS[axis](value)
    return f"{axis}={f'{value:g}' if isinstance(value, float) else value}"


def title(axes: Axes, leave_out: Collection[str] = ()) -> str:
    """Describe a workload without its lengths: "attention only, forward, float32, causal, B=1 H=8 K=64".

    It omits axes in `leave_out`, axes that follow from a batch of requests, and default values of axes not in ALWAYS.
    """
    defaults = DEFAULTS | following(axes)
    leave_out = {*leave_out, *(OF_REQUESTS if axes.get("batch", NO_BATCH) != NO_BATCH else ())}
    names = [axis for axis in NAMED if axis not in leave_out and (axis in ALWAYS or axes[axis] != defaults[axis])]
    parts = []
    for are_sizes, group in groupby(names, lambda axis: axis in SIZES):
        parts.append((" " if are_sizes else ", ").join(word(axis, axes) for axis in group))
    return ", ".join(parts)


def length(axes: Axes) -> str:
    """Format the query length, with the key length if the two differ: "512" or "1 x 512"."""
    same = axes["kv_len"] == axes["seq_len"]
    return str(axes["seq_len"]) if same else f"{axes['seq_len']} x {axes['kv_len']}"


def _usual(workloads: Sequence[Workload]) -> tuple[dict[str, object], set[str]]:
    """Return the most common value of each axis in GROUP_AXES (none is a length), and the set of axes that vary."""
    members = [workload.axes() for workload in workloads]
    values: dict[str, Counter[object]] = {}
    for axis in GROUP_AXES if members else ():
        values[axis] = Counter(axes[axis] for axes in members)
    usual: dict[str, object] = {axis: counts.most_common(1)[0][0] for axis, counts in values.items()}
    return usual, {axis for axis, counts in values.items() if len(counts) > 1}


def labels(workloads: Sequence[Workload]) -> dict[str, str]:
    """Return short labels by workload id: the mask if masks vary, and each value that is not its axis's most common."""
    usual, varying = _usual(workloads)
    ordered = sorted((axis for axis in NAMED if axis in varying), key=lambda axis: ("dtype", "mask", axis).index(axis))
    texts = {}
    for workload in workloads:
        axes = workload.axes()
        unusual = [axis for axis in ordered if axis == "mask" or axes[axis] != usual[axis]]
        texts[workload.id] = " ".join(SHORT.get(str(axes[axis])) or word(axis, axes) for axis in unusual)
    return texts


def shared(workloads: Sequence[Workload], place: str = "row") -> str:
    """Describe the most common values of the axes, without the mask if masks vary; `labels` name all other values.

    If values other than masks vary, the text ends with "unless a row says otherwise"; `place` is the word for "row".
    """
    usual, varying = _usual(workloads)
    text = title({**workloads[0].axes(), **usual}, leave_out=varying & {"mask"})
    return f"{text[:1].upper()}{text[1:]}{f', unless a {place} says otherwise' if varying - {'mask'} else ''}"


def names(results: Results) -> dict[str, str]:
    """Return the names of a run's workloads by id, made of label and length: "causal T=512"."""
    by_id = labels(results.plan.workloads)
    return {each.id: f"{by_id[each.id]} T={length(each.axes())}".strip() for each in results.plan.workloads}


def caveat(results: Results) -> str:
    """Return a prefix for titles of pictures, "UNFINISHED, DOUBTFUL: "; "" if the run is finished and not doubtful."""
    words = ["UNFINISHED"] * (results.elapsed_s is None)
    words += [f"DOUBTFUL{' IN PART' * (not is_doubtful(results))}"] * bool(doubts(results))
    return f"{', '.join(words)}: " if words else ""


def base(plan: Plan) -> str:
    """Return the name of the baseline of a run; if two states of the code are compared, "base"."""
    return sanitize_line(plan.baseline) if plan.sides is None else BASE
