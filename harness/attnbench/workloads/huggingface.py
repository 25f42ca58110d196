"""Read the attention layers of a model from its Hugging Face config.json, without weights or a network.

A configuration omits its architecture's defaults. The package transformers, if installed, fills them in; without it, a
missing value is an error, and the message advises installing it.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from attnbench.workloads.models import Layer, Model, names, preset
from attnbench.workloads.workload import DTYPES

# Each tuple has the names of one fact in configurations; the first one present counts. LATENT has four facts instead.
HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads", "attention_heads")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num")
HEAD_DIMS = ("head_dim", "d_kv", "attention_head_dim")
CONTEXTS = ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx")
LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
USUAL_CONTEXT = 2048  # context length in tokens of a configuration that names none
ENCODERS = {
    *("albert", "bert", "camembert", "clip_vision_model", "deberta", "deberta-v2", "deit", "dinov2", "distilbert"),
    *("electra", "esm", "hubert", "modernbert", "mpnet", "roberta", "siglip_vision_model", "vit", "vit_mae"),
    *("wav2vec2", "xlm-roberta"),
}
"""Model types with bidirectional attention."""
WITH_SINKS = {"gpt_oss"}  # model types with learned sinks
FULL, WINDOWED, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


def load(name_or_file: str) -> Model:
    """Load the preset of that name, or the model of a config.json, given as its path or its folder's path.

    Raises:
        ValueError: there is no such preset, the file cannot be read, or its model is not supported (see `described`).
    """
    path = Path(name_or_file)
    if path.suffix != ".json" and (not path.is_dir() or name_or_file in names()):
        return preset(name_or_file)
    file = path / "config.json" if path.is_dir() else path
    try:
        given = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise ValueError(f"cannot read the configuration {file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file} is not a model's config.json: {error}") from None
    name = file.parent.name if file.name == "config.json" and file.parent.name else file.stem
    return described(_completed(given), name, str(file))


def _completed(given: dict[str, Any]) -> dict[str, Any]:
    """Fill in the defaults of the model's architecture, if the package transformers knows this architecture."""
    if find_spec("transformers") is None or "model_type" not in given:
        return given
    from transformers import CONFIG_MAPPING

    if given["model_type"] not in CONFIG_MAPPING:
        return given
    try:
        made = CONFIG_MAPPING[given["model_type"]](**given).to_dict()
    except Exception:  # noqa: BLE001 - the file is used as it is
        return given
    return {**made, **{field: value for field, value in given.items() if not isinstance(value, dict)}}


def described(config: Mapping[str, Any], name: str, source: str) -> Model:
    """Return the model that the contents of a config.json describe; `source` is the file's name for messages.

    Raises:
        ValueError: it is an encoder with a decoder, has layers of an unknown kind, or lacks fields; the message names
            the fields that may give the missing fact.
    """
    nested = next((config[field] for field in NESTED if isinstance(config.get(field), Mapping)), None)
    if nested is not None and _first(config, HEADS) is None:
        return described({**nested, "architectures": config.get("architectures")}, name, source)
    kind = config.get("model_type", "of no model_type")
    heads, width = _first(config, HEADS), _first(config, WIDTHS)
    head_dim = _first(config, HEAD_DIMS) or (width // heads if heads and width else None)
    is_latent = all(config.get(field) for field in LATENT)
    missing = [] if heads else [f"heads ({', '.join(HEADS)})"]
    missing += [] if head_dim or is_latent else [f"head width ({', '.join([*HEAD_DIMS, *WIDTHS])})"]
    if missing or heads is None:
        hint = "; pip install transformers fills in what a file leaves out" if find_spec("transformers") is None else ""
        raise ValueError(f"{source} ({kind}) has no {' and no '.join(missing)}: none of these fields is there{hint}")
    if config.get("is_encoder_decoder"):
        raise ValueError(f"{source} ({kind}) is an encoder with a decoder: only presets have these, such as t5-small")
    is_encoder = not is_latent and _is_encoder(config)
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "").removeprefix("torch.")
    layers = [_latent(config, heads)] if is_latent else _plain(config, heads, head_dim, is_encoder)
    return Model(
        name=name,
        summary=f"{kind} as {source} describes it",
        source=source,
        kind="encoder" if is_encoder else "decoder",
        context=_context(config),
        layers=tuple(layers),
        dtype=dtype if dtype in DTYPES else "bfloat16",
    )


def _plain(config: Mapping[str, Any], heads: int, head_dim: int | None, is_encoder: bool) -> list[Layer]:  # noqa: FBT001 - a private helper
    """Return a Layer for each kind of layer in the model: full, windowed or chunked."""
    is_shared = config.get("multi_query") and not config.get("new_decoder_architecture")
    shared = 1 if is_shared else _first(config, KV_HEADS) or heads
    axes: dict[str, Any] = {"num_heads": heads, "num_kv_heads": shared, "head_dim": head_dim}
    if scalar := config.get("query_pre_attn_scalar"):
        axes["scale"] = scalar**-0.5
    if config.get("attention_multiplier"):
        axes["scale"] = config["attention_multiplier"]
    axes |= {"sinks": "learned"} if config.get("model_type") in WITH_SINKS else {}
    axes |= {"seq_len": _context(config)} if is_encoder else {}
    softcap = int(config.get("attn_logit_softcapping") or 0)
    layers = []
    for kind in _kinds(config):
        local = _local(config, kind, is_encoder=is_encoder)
        layers.append(Layer(softcap=softcap, axes=axes | local.pop("axes", {}), **local))
    return layers


def _latent(config: Mapping[str, Any], heads: int) -> Layer:
    """Return a layer of DeepSeek's latent attention: keys have a rotary part, and in decoding contain the value."""
    latent, plain, rotary, value_dim = (int(config[field]) for field in LATENT)
    width = plain + rotary
    axes = {"num_heads": heads, "head_dim": width, "value_dim": value_dim, "scale": width**-0.5}
    decode = {"num_kv_heads": 1, "head_dim": latent + rotary, "value_dim": latent, "layout": "value_in_key"}
    return Layer(axes=axes, decode=decode)


def _first(config: Mapping[str, Any], fields: Sequence[str]) -> int | None:
    """Return the value of the first of `fields` that has a whole number above 0; None if none has."""
    values = (config.get(field) for field in fields)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def _is_encoder(config: Mapping[str, Any]) -> bool:
    if config.get("is_decoder"):
        return False
    architectures = config.get("architectures") or []
    named = any(word in each for each in architectures for word in ("MaskedLM", "ImageClassification"))
    return bool(named or config.get("model_type") in ENCODERS)


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """Return the distinct kinds of the model's layers."""
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and kinds:
        return [*dict.fromkeys(kinds)]
    has_window = bool(config.get("sliding_window")) and config.get("use_sliding_window", True)
    every = config.get("sliding_window_pattern") or config.get("global_attn_every_n_layers")
    if has_window and isinstance(every, int) and every > 1:
        return [WINDOWED, FULL]
    return [WINDOWED if has_window else FULL]


def _local(config: Mapping[str, Any], kind: str, *, is_encoder: bool) -> dict[str, Any]:
    """Return the fields of a Layer that describe which keys are visible in a kind of layer."""
    if kind == FULL:
        return {}
    if kind == CHUNKED:
        return {"chunk": int(config.get("attention_chunk_size") or 0)}
    if kind == WINDOWED:
        window = int(config.get("sliding_window") or 0)
        if is_encoder:
            side = int(config.get("local_attention") or 2 * window) // 2
            return {"axes": {"mask": f"window({side},{side})"}}
        return {"window": window}
    raise ValueError(f"layers of kind {kind} cannot be measured, only {FULL}, {WINDOWED} and {CHUNKED}")


def _context(config: Mapping[str, Any]) -> int:
    if (named := _first(config, CONTEXTS)) is not None:
        return named
    image, patch = config.get("image_size"), config.get("patch_size")
    if isinstance(image, int) and isinstance(patch, int):
        return (image // patch) ** 2 + 1
    return USUAL_CONTEXT
