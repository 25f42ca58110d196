"""Models: the attention of each layer, in each phase (prefill, decode, training), as workloads.

A preset is a TOML file in `presets`; a Hugging Face configuration (config.json) is read into the same form. This needs
neither torch nor a network nor the model's weights.
"""

import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from attnbench.plugins import require_known
from attnbench.workloads.sweep import AXES, make
from attnbench.workloads.workload import Workload

FOLDER = Path(__file__).parent / "presets"
Phase = Literal["prefill", "decode", "training"]
PHASES: tuple[Phase, ...] = ("prefill", "decode", "training")
PREFILL_LENS, DECODE_LENS = (512, 2048, 8192), (1024, 8192, 32768)  # in tokens: prompts, and keys in the cache
DECODE_BATCHES = (1, 32)
LONGEST_TRAINED = 8192  # tokens
RULES = ("count", "phases", "window", "chunk", "softcap", "decode")
"""Keys of a layer's table that are not axes of a workload."""


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a model that have the same attention, described by how it differs from plain attention.

    `window`, `chunk` and `softcap` become a mask that fits the phase; 0 means none. `axes` has values of the
    workloads' axes; in the phase decode, the values in `decode` take precedence.
    """

    count: int = 1  # number of such layers in a preset, shown by `attnbench list models`
    phases: tuple[Phase, ...] = PHASES
    window: int = 0  # a query sees its own position and the window - 1 positions before it
    chunk: int = 0  # a query sees its own chunk of this length
    softcap: int = 0
    axes: dict[str, Any] = {}
    decode: dict[str, Any] = {}


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model: the source of its shapes, and its layers.

    A decoder is measured in prefill, decoding and training, at those of PREFILL_LENS, DECODE_LENS and LONGEST_TRAINED
    that its context allows (or at its context if none fits). For an encoder, each layer sets its own lengths; prefill
    is one pass over all tokens.
    """

    name: str
    summary: str
    source: str
    kind: Literal["decoder", "encoder"]
    context: int  # longest supported length, in tokens
    layers: tuple[Layer, ...]
    dtype: str = "bfloat16"

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases of all layers together, but not decode for an encoder whose layers all have the default phases."""
        known = {phase for layer in self.layers for phase in layer.phases}
        named = [phase for phase in PHASES if phase in known]
        is_said = any(layer.phases != PHASES for layer in self.layers)
        return tuple(phase for phase in named if phase != "decode" or self.kind == "decoder" or is_said)


def names() -> list[str]:
    """Return the names of the presets, sorted."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def preset(name: str) -> Model:
    """Load the preset of that name.

    Raises:
        ValueError: no preset has that name.
    """
    require_known("model", [name], names(), "; or give the path of a config.json")
    given = msgspec.toml.decode((FOLDER / f"{name}.toml").read_bytes())
    layers = []
    for table in given.pop("layers"):
        rules = {rule: value for rule, value in table.items() if rule in RULES}
        axes = {axis: value for axis, value in table.items() if axis not in RULES}
        layers.append(rules | {"axes": axes})
    return msgspec.convert({"name": name, **given, "layers": layers}, Model)


def points(model: Model, phase: Phase) -> list[dict[str, Any]]:
    """Return the usual batch sizes and lengths of a model in a phase, as values of axes; [{}] for an encoder.

    The layers of an encoder set their own lengths.
    """
    if model.kind == "encoder":
        return [{}]
    if phase == "prefill":
        lengths = [length for length in PREFILL_LENS if length <= model.context] or [model.context]
        return [{"seq_len": length} for length in lengths]
    if phase == "training":
        return [{"seq_len": min(model.context, LONGEST_TRAINED)}]
    caches = [length for length in DECODE_LENS if length <= model.context] or [model.context]
    return [{"batch_size": each, "seq_len": 1, "kv_len": cache} for each in DECODE_BATCHES for cache in caches]


def workloads(model: Model, phase: str, settings: Mapping[str, list[str]]) -> tuple[Workload, ...]:
    """Return the distinct workloads of a model in a phase.

    `settings` (axis -> values as texts) override the model's values; all combinations of their values are used.

    Raises:
        ValueError: the model has no such phase, or a value is not allowed.
    """
    if phase not in model.phases:
        raise ValueError(f"{model.name} has no phase {phase}: choose among {', '.join(model.phases)}")
    layers = [layer for layer in model.layers if phase in layer.phases]
    chosen = [dict(zip(settings, values, strict=True)) for values in itertools.product(*settings.values())]
    every = itertools.product(points(model, phase), chosen, layers)
    made = (_workload(model, layer, phase, point, setting) for point, setting, layer in every)
    return tuple({workload.id: workload for workload in made}.values())


def _workload(model: Model, layer: Layer, phase: str, point: Mapping[str, Any], setting: Mapping[str, str]) -> Workload:
    direction = "forward_backward" if phase == "training" else "inference"
    axes: dict[str, Any] = {"dtype": model.dtype, "direction": direction, **point, **layer.axes}
    if phase == "decode":
        axes |= layer.decode
    axes |= setting
    if {"batch", "page_size"} & setting.keys():
        return _of_requests(model, layer, axes)
    lengths = make({axis: axes[axis] for axis in ("seq_len", "kv_len") if axis in axes})
    if "mask" not in axes and model.kind == "decoder":
        axes["mask"] = _mask(layer, lengths.seq_len, lengths.kv_len)
    return make(axes)


def _of_requests(model: Model, layer: Layer, axes: Mapping[str, Any]) -> Workload:
    """Return the workload of a layer over a batch of requests, which is causal by itself.

    Raises:
        ValueError: the layer's attention is not that of a batch of requests; the message says why.
    """
    rules = {"is an encoder": model.kind == "encoder", "has a softcap": layer.softcap, "has chunks": layer.chunk}
    rules["has a mask of its own"] = "mask" in layer.axes
    refusal = f"{model.name} cannot have a batch of requests: "
    way_out = "; leave out batch and page_size, or choose another model (attnbench list models)"
    if refused := [words for words, is_there in rules.items() if is_there]:
        raise ValueError(f"{refusal}a batch is causal, with a window at most, and this model {refused[0]}{way_out}")
    try:
        plain = make({"mask": "none", **axes})
        window = f"sliding_window({layer.window})" if 0 < layer.window < plain.longest else "none"
        return make({"mask": window, **axes})
    except ValueError as error:
        raise ValueError(f"{refusal}{error}{way_out}") from None


def _mask(layer: Layer, query_len: int, key_len: int) -> str:
    """Return the mask of a decoder's queries; a window or chunk that is at least as long as the keys is left out."""
    end, parts = "" if query_len == key_len else "_bottom_right", list[str]()
    if 0 < layer.window < key_len:
        parts.append(f"sliding_window{end}({layer.window})")
    elif query_len == key_len or query_len > 1:  # a single query at the end sees all keys
        parts.append(f"causal{end}")
    parts += [f"chunks{end}({layer.chunk})"] if 0 < layer.chunk < key_len else []
    parts += [f"softcap({layer.softcap})"] if layer.softcap else []
    return "+".join(parts) or "none"


def summarised(model: Model) -> str:
    """Summarise the attention layers of a model: the number of layers of each shape H/G/K, as in "16 x 32/8/64"."""
    counted = Counter[str]()
    for layer in model.layers:
        plain = {axis: value for axis, value in layer.axes.items() if axis in AXES and not axis.endswith("_len")}
        shape = make({**plain, "mask": "none"})
        counted[f"{shape.num_heads}/{shape.num_kv_heads}/{shape.head_dim}"] += layer.count
    return ", ".join(f"{count} x {text}" for text, count in counted.items())
