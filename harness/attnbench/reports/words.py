"""Workloads in words: titles of tables and panels, and text from outside made fit for one line."""

from collections.abc import Iterable

from attnbench.storage.events import Plan
from attnbench.workloads.workload import Workload

SCOPES = {"attention": "attention only", "module": "whole module"}
DIRECTIONS = {"forward_backward": "forward and backward"}
BIASES = {
    "all": "all biases",
    "qkv": "biases of query, key and value alone",
    "out": "a bias of the output alone",
    "none": "no biases",
}
LENGTHS = ("seq_len", "kv_len")
_SIZES = {"batch_size", "num_heads", "num_kv_heads", "head_dim", "value_dim", "embed_dim"}


def words(workload: Workload) -> dict[str, str]:
    """Each axis but the lengths, in words, in the order of a title."""
    threads = f"{workload.num_threads} threads" if workload.num_threads > 1 else "1 thread"
    return {
        "scope": SCOPES[workload.scope],
        "direction": DIRECTIONS.get(workload.direction, workload.direction),
        "bias": BIASES[workload.bias],
        "dtype": workload.dtype,
        "mask": "no mask" if workload.mask == "none" else workload.mask.replace("_", " "),
        "batch_size": f"B={workload.batch_size}",
        "num_heads": f"H={workload.num_heads}",
        "num_kv_heads": f"G={workload.num_kv_heads}",
        "head_dim": f"K={workload.head_dim}",
        "value_dim": f"V={workload.value_dim}",
        "embed_dim": f"D={workload.embed_dim}",
        "dropout": f"dropout {workload.dropout:g}" if workload.dropout else "no dropout",
        "device": f"on {workload.device}",
        "num_threads": threads if workload.num_threads else "a thread for each core",
        "seed": f"seed {workload.seed}",
        "layout": f"{workload.layout} in memory",
        "float32_matmul_precision": f"{workload.float32_matmul_precision} precision of float32 products",
    }


def title(workload: Workload) -> str:
    """A workload less its lengths: "attention only, forward, float32, causal, B=1 H=8 K=64"."""
    return _join({axis: word for axis, word in words(workload).items() if axis not in _usual(workload)})


def length(workload: Workload) -> str:
    """The query length, and the key length where it differs: "512" or "1 x 512"."""
    same = workload.kv_len == workload.seq_len
    return str(workload.seq_len) if same else f"{workload.seq_len} x {workload.kv_len}"


def shared(workloads: Iterable[Workload]) -> str:
    """What all the workloads have in common, in words."""
    told = list(workloads)
    varying = varying_axes(told)
    first = told[0]
    kept = {axis: word for axis, word in words(first).items() if axis not in varying | _usual(first)}
    return _join(kept)


def varying(workload: Workload, axes: Iterable[str]) -> str:
    """The words of those axes only, for one panel among several."""
    return " · ".join(word for axis, word in words(workload).items() if axis in set(axes))


def varying_axes(workloads: Iterable[Workload]) -> set[str]:
    """The axes, lengths apart, on which the workloads differ."""
    told = [words(workload) for workload in workloads]
    return {axis for axis in told[0] if len({found[axis] for found in told}) > 1} if told else set()


def plain(text: str, limit: int = 0) -> str:
    """Text from outside on one line without control or direction characters, cut at `limit` characters if given."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if not limit or len(line) <= limit else line[: limit - 3].rstrip() + "..."


def base(plan: Plan) -> str:
    """What the ratios of a run are to."""
    return plain(plan.baseline) if plan.sides is None else "the base"


def _usual(workload: Workload) -> set[str]:
    """The axes that a title leaves out: they follow from others or hold their default."""
    holds = {
        "num_kv_heads": workload.num_kv_heads == workload.num_heads,
        "value_dim": workload.value_dim == workload.head_dim,
        "embed_dim": workload.embed_dim == workload.num_heads * workload.head_dim,
        "bias": workload.bias == "all",
        "dropout": workload.dropout == 0.0,
        "device": workload.device == Workload().device,
        "num_threads": workload.num_threads == 0,
        "seed": workload.seed == 0,
        "layout": workload.layout == "contiguous",
        "float32_matmul_precision": workload.float32_matmul_precision == "highest",
    }
    return {axis for axis, is_usual in holds.items() if is_usual}


def _join(told: dict[str, str]) -> str:
    sizes = " ".join(word for axis, word in told.items() if axis in _SIZES)
    others = [word for axis, word in told.items() if axis not in _SIZES]
    leading = [word for word in others if word in {told.get(axis) for axis in ("scope", "direction", "dtype", "mask")}]
    trailing = [word for word in others if word not in leading]
    return ", ".join(part for part in (*leading, sizes, *trailing) if part)
