"""Models: the attention of each of their layers, in each phase of their use, as workloads with a weight.

A preset is a TOML file in `presets`; a Hugging Face configuration (config.json) is read into the same form. Nothing
here needs torch, a network, or a model's weights.
"""

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from attnbench.plugins import unknown
from attnbench.workloads.sweep import AXES, make
from attnbench.workloads.workload import Workload

FOLDER = Path(__file__).parent / "presets"
Phase = Literal["prefill", "decode", "training"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "training")
PREFILL_LENS, DECODE_LENS = (512, 2048, 8192), (1024, 8192, 32768)
DECODE_BATCHES = (1, 32)
LONGEST_TRAINED = 8192
RULES = ("count", "phases", "window", "chunk", "softcap", "decode")
"""What a layer's table may say besides axes of a workload."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a model that attend alike: how many, and what differs from plain attention.

    `window`, `chunk` and `softcap` are made into a mask that fits the phase; 0 is none. `axes` are values of axes of
    their workloads, `decode` others for that phase alone.
    """

    count: int
    phases: tuple[Phase, ...] = PHASES
    window: int = 0  # a query sees its own place and so many less one before it
    chunk: int = 0  # it sees its own chunk of so many
    softcap: int = 0
    axes: dict[str, Any] = {}
    decode: dict[str, Any] = {}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model: where its shapes are from, and its layers.

    A decoder is prefilled, decodes and is trained at the usual lengths up to its context; an encoder has lengths of
    its own in each layer, and one pass over all of its tokens is its prefill.
    """

    name: str
    summary: str
    source: str
    kind: Literal["decoder", "encoder"]
    context: int
    layers: tuple[Layer, ...]
    dtype: str = "bfloat16"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Those that some layer has a part in; an encoder decodes only where its layers say so."""
        named = [phase for phase in PHASES if any(phase in layer.phases for layer in self.layers)]
        is_said = any(layer.phases != PHASES for layer in self.layers)
        return tuple(phase for phase in named if phase != "decode" or self.kind == "decoder" or is_said)


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """The attention of a whole model at one point: workloads, by their ids, and how many layers each stands for.

    Likewise of a service, whose calls a file has (flashinfer_trace.py): how many calls each stands for.
    """

    label: str
    counts: dict[str, int]


def names() -> list[str]:
    """The presets."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def preset(name: str) -> Model:
    """The preset of that name.

    Raises:
        ValueError: there is none.
    """
    if name not in names():
        raise ValueError(unknown("model", name, names(), "; or give the path of a config.json"))
    given = msgspec.toml.decode((FOLDER / f"{name}.toml").read_bytes())
    layers = [
        {rule: value for rule, value in table.items() if rule in RULES}
        | {"axes": {axis: value for axis, value in table.items() if axis not in RULES}}
        for table in given.pop("layers")
    ]
    return msgspec.convert({"name": name, **given, "layers": layers}, Model)


def points(model: Model, phase: Phase) -> list[dict[str, Any]]:
    """Batch sizes and lengths at which a model is usually looked at in that phase."""
    if model.kind == "encoder":
        return [{}]
    if phase == "prefill":
        lengths = [length for length in PREFILL_LENS if length <= model.context] or [model.context]
        return [{"seq_len": length} for length in lengths]
    if phase == "training":
        return [{"seq_len": min(model.context, LONGEST_TRAINED)}]
    caches = [length for length in DECODE_LENS if length <= model.context] or [model.context]
    return [{"batch_size": each, "seq_len": 1, "kv_len": cache} for each in DECODE_BATCHES for cache in caches]


def mixes(model: Model, phase: str, settings: Mapping[str, list[str]]) -> tuple[tuple[Workload, ...], tuple[Mix, ...]]:
    """The workloads of a model in a phase, each once, and how they make up the model at each of its points.

    Settings, axis -> values as they were typed, take the place of what the model has: every combination is a point.

    Raises:
        ValueError: the model has no such phase, or a value that is not allowed.
    """
    if phase not in model.phases:
        raise ValueError(f"{model.name} has no phase {phase}: choose among {', '.join(model.phases)}")
    found: dict[str, Workload] = {}
    made: dict[str, Mix] = {}
    for point, setting in itertools.product(points(model, phase), combinations(settings)):
        counts: dict[str, int] = {}
        for layer in model.layers:
            if phase in layer.phases:
                workload = _workload(model, layer, phase, point, setting)
                found.setdefault(workload.id, workload)
                counts[workload.id] = counts.get(workload.id, 0) + layer.count
        label = _label(phase, [found[each] for each in counts])
        made.setdefault(json.dumps(counts), Mix(label=label, counts=counts))
    return tuple(found.values()), tuple(made.values())


def combinations(settings: Mapping[str, list[str]]) -> Iterator[dict[str, str]]:
    """Each combination of one value of every axis."""
    for values in itertools.product(*settings.values()):
        yield dict(zip(settings, values, strict=True))


def _workload(model: Model, layer: Layer, phase: str, point: Mapping[str, Any], setting: Mapping[str, str]) -> Workload:
    """The workload of a layer at a point."""
    direction = "forward_backward" if phase == "training" else "inference"
    axes: dict[str, Any] = {"dtype": model.dtype, "direction": direction, **point, **layer.axes}
    if phase == "decode":
        axes |= layer.decode
    axes |= setting
    lengths = make({axis: axes[axis] for axis in ("seq_len", "kv_len") if axis in axes})
    if "mask" not in axes and model.kind == "decoder":
        axes["mask"] = _mask(layer, lengths.seq_len, lengths.kv_len)
    return make(axes)


def _mask(layer: Layer, query_len: int, key_len: int) -> str:
    """What a decoder's queries see of their cache; a window or chunk that holds all hides nothing."""
    is_short = layer.window >= key_len or not layer.window
    if query_len == key_len:
        parts = ["causal"] if is_short else [f"sliding_window({layer.window})"]
        parts += [f"chunks({layer.chunk})"] if 0 < layer.chunk < key_len else []
    else:
        parts = [] if is_short else [f"sliding_window_bottom_right({layer.window})"]
        parts += ["causal_bottom_right"] if is_short and query_len > 1 else []
        parts += [f"chunks_bottom_right({layer.chunk})"] if 0 < layer.chunk < key_len else []
    parts += [f"softcap({layer.softcap})"] if layer.softcap else []
    return "+".join(parts) or "none"


def _label(phase: str, workloads: list[Workload]) -> str:
    """A point in words: phase, batch and lengths, those of the longest layer."""
    longest = max(workloads, key=lambda each: each.batch_size * each.seq_len * each.kv_len)
    lengths = f"T={longest.seq_len}" + (f" S={longest.kv_len}" if longest.kv_len != longest.seq_len else "")
    return f"{phase} B={longest.batch_size} {lengths}"


def summarised(model: Model) -> str:
    """How many layers attend, and with which shapes H/G/K."""
    shapes = []
    for layer in model.layers:
        plain = {axis: value for axis, value in layer.axes.items() if axis in AXES and not axis.endswith("_len")}
        shape = make({**plain, "mask": "none"})
        shapes.append((layer.count, f"{shape.num_heads}/{shape.num_kv_heads}/{shape.head_dim}"))
    counted = {text: sum(count for count, other in shapes if other == text) for _, text in shapes}
    return ", ".join(f"{count} x {text}" for text, count in counted.items())
