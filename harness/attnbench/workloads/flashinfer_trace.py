"""flashinfer-trace files: read a service's recorded calls as workloads.

A line is a call: `{"definition", "workload": {"uuid", "axes", "inputs"}, ...}`, or the workload alone, in which case
the file is named after the definition. A definition's name contains the shapes of one kind of attention.
Source: https://github.com/flashinfer-ai/flashinfer-bench, docs/flashinfer-trace and docs/op-types.
"""

import itertools
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from attnbench.workloads.models import Mix, combinations
from attnbench.workloads.sweep import make
from attnbench.workloads.workload import Workload

SUFFIX = ".jsonl"
DTYPE = "bfloat16"
"""The dtype of query, key and value in all these definitions; the lines do not state it."""
DEFINITIONS = {
    "gqa_paged_decode": "h{H}_kv{G}_d{K}_ps{page}",
    "gqa_paged_prefill_causal": "h{H}_kv{G}_d{K}_ps{page}",
    "gqa_ragged_prefill_causal": "h{H}_kv{G}_d{K}",
    "mla_paged_decode": "h{H}_ckv{V}_kpe{rope}_ps{page}",
    "mla_paged_prefill_causal": "h{H}_ckv{V}_kpe{rope}_ps{page}",
    "mla_ragged_prefill_causal": "h{H}_qk{K}_vo{V}",
}
"""The supported kinds, with the sizes that follow in their names."""
UNABSORBED = 128
"""Width of DeepSeek's keys before their projection is absorbed, without the rotated part."""
MEAN_LENGTHS = "the lengths of a batch are all as their mean, since its indptr is not at hand"
IN_ONE_PIECE = "keys and values lie in one piece, not in pages"


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One call in this format: its sizes, and the origin of each input."""

    uuid: str
    axes: dict[str, int]
    inputs: dict[str, dict[str, Any]] = {}


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A call and the name of its definition."""

    definition: str
    workload: Call


def load(path: Path, settings: Mapping[str, list[str]]) -> tuple[tuple[Workload, ...], tuple[Mix, ...]]:
    """Load the distinct workloads of a file; and the counts of calls by id.

    Settings (axis -> values as typed) override the values in a line.

    Raises:
        ValueError: no such file, a line that is no workload, or an unknown definition.
    """
    lines = _lines(path)
    found: dict[str, Workload] = {}
    mixes: list[Mix] = []
    for setting in combinations(settings):
        counts: dict[str, int] = {}
        remarks: dict[str, None] = {}
        for number, line in lines:
            try:
                axes, given_up = read(line, path.resolve())
                workload = make(axes | setting)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
            found.setdefault(workload.id, workload)
            counts[workload.id] = counts.get(workload.id, 0) + 1
            remarks |= dict.fromkeys(given_up)
        chosen = [f"{axis}={setting[axis]}" for axis in settings if len(settings[axis]) > 1]
        mixes.append(Mix(label="; ".join([path.name, *chosen, *remarks]), counts=counts))
    return tuple(found.values()), tuple(mixes)


def _lines(path: Path) -> list[tuple[int, Line]]:
    try:
        texts = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise ValueError(f"cannot read the workloads in {path}: {reason}") from None
    lines = [(number, _line(text, path, number)) for number, text in enumerate(texts, 1) if text.strip()]
    if not lines:
        raise ValueError(f"{path} has no workloads: give a file with one in each line")
    return lines


def _line(text: str, path: Path, number: int) -> Line:
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(text, type=Line)
    with suppress(msgspec.DecodeError):
        return Line(definition=path.stem, workload=msgspec.json.decode(text, type=Call))
    like = '{"definition": "gqa_paged_decode_h32_kv8_d128_ps16", "workload": {"uuid": "...", "axes": {}, "inputs": {}}}'
    raise ValueError(f"{path}, line {number} is no workload of a flashinfer-trace: write it as {like}")


def read(line: Line, path: Path) -> tuple[dict[str, Any], list[str]]:
    """The axes of the workload that a line describes, and in words the parts of the line that they do not express.

    Tensors are searched for in the file's folder and in its parents.

    Raises:
        ValueError: the definition is unknown, or an axis is missing or is no number.
    """
    kind, shape = _definition(line.definition)
    num_heads, is_decode = shape["H"], kind.endswith("decode")
    is_absorbed = "rope" in shape
    width = shape["V"] + shape["rope"] if is_absorbed else shape["K"]
    axes = {
        "dtype": DTYPE,
        "direction": "inference",
        "num_heads": num_heads,
        "num_kv_heads": shape.get("G", 1 if is_absorbed else num_heads),
        "head_dim": width,
        "value_dim": shape.get("V", width),
        "layout": "value_in_key" if is_absorbed else "contiguous",
        "scale": _scale(line, width, (UNABSORBED + shape["rope"]) ** -0.5 if is_absorbed else 0.0),
    }
    lengths, remarks = _lengths(line, path, shape.get("page", 1), is_decode=is_decode)
    if "page" in shape:
        remarks.append(IN_ONE_PIECE)
    return axes | lengths, remarks


def _definition(name: str) -> tuple[str, dict[str, int]]:
    for kind, shape in DEFINITIONS.items():
        match = re.fullmatch(re.sub(r"{(\w+)}", r"(?P<\1>\\d+)", f"{kind}_{shape}"), name)
        if match is not None:
            return kind, {axis: int(number) for axis, number in match.groupdict().items()}
    known = ", ".join(f"{kind}_{shape}" for kind, shape in DEFINITIONS.items())
    raise ValueError(f"the definition {name} is not known: it is one of {known}")


def _scale(line: Line, width: int, usual: float) -> float:
    """The line's scale, or else the usual one; 0 if it equals 1 / sqrt(width) to within a rounding to float32."""
    value = line.workload.inputs.get("sm_scale", {}).get("value")
    scale = float(value) if isinstance(value, int | float) else usual
    return 0.0 if math.isclose(scale, width**-0.5, rel_tol=1e-6) else scale


def _lengths(line: Line, path: Path, page_size: int, *, is_decode: bool) -> tuple[dict[str, Any], list[str]]:
    """Batch size, lengths and mask, and notes if the lengths are means."""
    given = line.workload.axes

    def axis(*names: str) -> int:
        for name in names:
            if given.get(name, 0) > 0:
                return given[name]
        has = ", ".join(f"{name}={value}" for name, value in given.items())
        raise ValueError(f"its axes have no {' or '.join(names)} above 0, only {has}")

    num_rows = axis("batch_size") if "batch_size" in given else axis("len_indptr") - 1
    if not num_rows:
        raise ValueError("its len_indptr is 1, and there is nothing to compute: it is one more than the batch size")
    total_keys = axis("num_kv_indices", "total_kv") * page_size
    total_queries = num_rows if is_decode else axis("total_q")
    keys = _steps(line, path, "kv_indptr", num_rows)
    last = _numbers(line, path, "kv_last_page_len")
    if keys is not None:
        full = last is None or len(last) != num_rows
        keys = [
            n * page_size - (0 if full or last is None or not n else page_size - last[row])
            for row, n in enumerate(keys)
        ]
    queries = [1] * num_rows if is_decode else _steps(line, path, "qo_indptr", num_rows)
    if keys is not None and queries is not None:  # rows without keys or queries compute nothing
        kept = [(q, s) for q, s in zip(queries, keys, strict=True) if q and s]
        if kept and len({q for q, _ in kept}) == 1 and all(q <= s for q, s in kept):
            return _exact(kept[0][0], [s for _, s in kept]), []
    query_len = max(1, round(total_queries / num_rows))
    mean = max(query_len, round(total_keys / num_rows))
    return _exact(query_len, [mean] * num_rows), [MEAN_LENGTHS] if num_rows > 1 else []


def _exact(query_len: int, key_lens: list[int]) -> dict[str, Any]:
    longest = max(key_lens)
    is_ragged = len(set(key_lens)) > 1
    causal = "none" if query_len == 1 else "causal" if query_len == longest else "causal_bottom_right"
    mask = f"ragged({','.join(map(str, key_lens))})" if is_ragged else causal
    return {"batch_size": len(key_lens), "seq_len": query_len, "kv_len": longest, "mask": mask}


def _steps(line: Line, path: Path, name: str, num_rows: int) -> list[int] | None:
    ends = _numbers(line, path, name)
    if ends is None or len(ends) != num_rows + 1:
        return None
    return [after - before for before, after in itertools.pairwise(ends)]


def _numbers(line: Line, path: Path, name: str) -> list[int] | None:
    """The named tensor as numbers; None if its file, or the package that reads it, is missing."""
    given = line.workload.inputs.get(name, {})
    if given.get("type") != "safetensors":
        return None
    try:
        from safetensors import safe_open
    except ImportError:
        return None
    for folder in path.parents:
        file = folder / str(given.get("path"))
        if file.is_file():
            try:
                with safe_open(file, framework="np") as tensors:
                    return [int(each) for each in tensors.get_tensor(given["tensor_key"])]
            except Exception as error:  # noqa: BLE001 - it raises its own error class, not ValueError
                raise ValueError(f"{name} cannot be read from {file}: {error}") from None
    return None
