"""Check a function on captured inputs: `attnbench check FILE:NAME --replay tensors.pt`.

The file is a dictionary that torch.save wrote: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) and, if the
call had them, mask (boolean, True may attend, or numbers to add; broadcastable to (B, H, T, S)), scale, is_causal
(aligned at the start) and gradient (B, H, T, V), the incoming one. Strides are kept. The right answer is computed head
by head in float64.

`python -m attnbench.checking.replay` reads a `Request` from standard input and writes the function's answers into a
file: foreign code runs in that process alone, and the judge in another one.
"""

import math
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnbench.checking.tolerance import Tolerance, by_row
from attnbench.contract.declared import kind
from attnbench.contract.functions import Signature
from attnbench.contract.loading import implementation
from attnbench.contract.outside import repeat_heads
from attnbench.storage.records import Agreement, ProbeResult, RuleResult

PARTS = ("query", "key", "value")
ENTRIES = (*PARTS, "mask", "scale", "is_causal", "gradient")
MOVED = 2
"""Honest forms: on the inputs as they are, and moved by a rounding."""


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """The function to check, the file with its inputs, and the file for its answers."""

    spec: str
    file: str
    answers: str


def load(file: Path) -> dict[str, Any]:
    """Load captured inputs, without executing anything from the file.

    Raises:
        ValueError: it is not such a dictionary; the message lists the entries.
    """
    try:
        saved: Any = torch.load(file, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"--replay {file} cannot be loaded: {error}") from None
    names = set(saved) if isinstance(saved, dict) else set()
    if not set(PARTS) <= names <= set(ENTRIES):
        raise ValueError(f"--replay {file} holds {', '.join(sorted(map(str, names)))}: give {', '.join(ENTRIES)}")
    shapes = {name: tuple(getattr(saved[name], "shape", ())) for name in PARTS}
    is_fine = all(len(shape) == 4 for shape in shapes.values())  # noqa: PLR2004
    if is_fine:
        (batch, heads, _, width), key, value = shapes.values()
        is_fine = key[:3] == value[:3] and (batch, width) == (key[0], key[3]) and heads % key[1] == 0
    if not is_fine:
        text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"--replay {file} has {text}: give (B, H, T, K), (B, G, S, K) and (B, G, S, V)")
    captured: dict[str, Any] = saved
    return captured


def settings(saved: dict[str, Any]) -> list[str]:
    """The captured call as axes of a workload."""
    (batch, heads, length, width), (_, groups, keys, wide) = saved["query"].shape, saved["value"].shape
    axes: dict[str, object] = {
        "scope": "attention",
        "batch_size": batch,
        "num_heads": heads,
        "num_kv_heads": groups,
        "seq_len": length,
        "kv_len": keys,
        "head_dim": width,
        "value_dim": wide,
        "dtype": str(saved["query"].dtype).removeprefix("torch."),
        "device": saved["query"].device.type,
        "direction": "inference" if saved.get("gradient") is None else "forward_backward",
        "mask": "causal" if saved.get("is_causal") else "none",
        "embed_dim": heads * width,
    }
    return [f"{name}={value}" for name, value in axes.items()]


def visible(saved: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
    """The visible keys (None: all), and the numbers to add to scores (None: nothing), on the CPU."""
    length, keys = saved["query"].shape[2], saved["key"].shape[2]
    mask, added = saved.get("mask"), None
    mask = None if mask is None else mask.cpu()
    if mask is not None and mask.dtype != torch.bool:
        mask, added = mask > -math.inf, mask.double()
    if saved.get("is_causal"):
        below = torch.ones(length, keys, dtype=torch.bool).tril()
        mask = below if mask is None else mask & below
    return mask, added


def textbook(tensors: tuple[Tensor, ...], saved: dict[str, Any]) -> tuple[Tensor, float]:
    """Attention head by head in the tensors' dtype, and the largest score; a query that sees no key gets 0."""
    query, key, value = tensors[0], *(repeat_heads(each, tensors[0].shape[1]) for each in tensors[1:])
    scale = query.shape[-1] ** -0.5 if saved.get("scale") is None else saved["scale"]
    mask, added = visible(saved)
    shape = (*query.shape[:3], key.shape[2])
    outputs, largest = [], 0.0
    for row in range(shape[0]):
        heads = []
        for head in range(shape[1]):
            scores = query[row, head] @ key[row, head].T * scale
            if added is not None:
                scores = scores + added.expand(shape)[row, head].to(scores.dtype)
            if mask is not None:
                scores = scores.masked_fill(~mask.expand(shape)[row, head], -math.inf)
            empty = (scores == -math.inf).all(-1, keepdim=True)
            scores = scores.masked_fill(empty, 0.0)
            largest = max(largest, float(scores.detach().where(scores.isfinite(), 0.0).abs().max()))
            heads.append(scores.softmax(-1).masked_fill(empty, 0.0) @ value[row, head])
        outputs.append(torch.stack(heads))
    return torch.stack(outputs), largest


def answers(output: Tensor, leaves: tuple[Tensor, ...], gradient: Tensor | None) -> dict[str, Tensor]:
    """The output and, with an incoming gradient, those of query, key and value."""
    found = {"output": output.detach()}
    if gradient is not None:
        made = torch.autograd.grad(output, leaves, gradient.to(output), allow_unused=True, materialize_grads=True)
        found |= {f"gradient of {name}": each for name, each in zip(PARTS, made, strict=True)}
    return {name: each.detach().double().cpu() for name, each in found.items()}


def tolerances(saved: dict[str, Any]) -> list[Tolerance]:
    """The right answer of each tensor with its limits, from honest forms in the dtype of the inputs.

    Raises:
        ValueError: these fail or overflow.
    """
    gradient, dtype = saved.get("gradient"), saved["query"].dtype
    draws = torch.Generator().manual_seed(0)

    def by(tensors: Iterator[Tensor]) -> tuple[dict[str, Tensor], float]:
        leaves = tuple(each.cpu().requires_grad_(gradient is not None) for each in tensors)
        output, largest = textbook(leaves, saved)
        return answers(output, leaves, None if gradient is None else gradient.cpu()), largest

    def moved(tensor: Tensor, step: int) -> Tensor:
        share = torch.rand(tensor.shape, generator=draws, dtype=torch.float64) * 2 - 1
        return (tensor.detach().cpu().double() * (1 + step * torch.finfo(dtype).eps * share)).to(dtype)

    try:
        expected, largest = by(saved[name].detach().double() for name in PARTS)
        honest = [by(moved(saved[name], step) for name in PARTS)[0] for step in range(MOVED)]
    except RuntimeError as error:
        raise ValueError(f"--replay has no inputs of attention: {error}") from None
    query, keys = saved["query"], saved["key"].shape[2]
    is_half = torch.finfo(dtype).bits < 32  # noqa: PLR2004 - float32's
    wide = math.sqrt(max(query.shape[2], keys)) + (math.sqrt(query.shape[3]) + 2) * largest
    sizes = {name: float(each.abs().max()) for name, each in expected.items()}
    of_gradients = max((size for name, size in sizes.items() if name != "output"), default=0.0)
    limits = [
        Tolerance(
            name,
            right,
            [by_row(each[name] - right, -2) for each in honest],
            axis=-2,
            dtype=dtype,
            num_roundings=(1.0 if name == "output" else 2.0) if is_half else wide,
            scale=sizes[name] if name == "output" else of_gradients,
        )
        for name, right in expected.items()
    ]
    if not all(each.is_finite for each in limits):
        raise ValueError(f"--replay has inputs on which attention in {dtype} is not finite: no answer can be judged")
    return limits


def called(spec: str, saved: dict[str, Any]) -> dict[str, Tensor]:
    """The function's answers to the captured inputs, in float64 on the CPU.

    Raises:
        ValueError: it is not a function of query, key and value, or has no parameter for a captured entry.
        Exception: any error that it raises.
    """
    signature = getattr(implementation(spec).build, "signature", None)
    if not isinstance(signature, Signature):
        raise ValueError("--replay calls a function of query, key and value, and not a module")  # noqa: TRY004
    names, gradient = signature.names, saved.get("gradient")
    leaves = tuple(saved[name].detach().requires_grad_(gradient is not None) for name in PARTS)
    passed: dict[str, Any] = {}
    for entry in ("mask", "scale", "is_causal"):
        entry_value = saved.get(entry)
        if entry_value is None or entry_value is False:
            continue
        is_added = entry == "mask" and saved["mask"].dtype != torch.bool and "bias" in names
        name = names.get("bias" if is_added else entry, "")
        if not name:
            raise ValueError(f"the function has no parameter {entry}, which was captured")
        passed[name] = entry_value
    query, key, value = leaves
    if "num_kv_heads" in names:
        passed[names["num_kv_heads"]] = True if names["num_kv_heads"] == "enable_gqa" else key.shape[1]
    else:
        key, value = (repeat_heads(each, query.shape[1]) for each in (key, value))
    is_tokens_first = signature.layout == "bthk"
    tensors = [each.transpose(1, 2) if is_tokens_first else each for each in (query, key, value)]
    output: object = signature.function(*tensors, **passed)
    if not isinstance(output, Tensor):
        raise ValueError(f"the function returned {kind(output)}: it must return one tensor (B, H, T, V)")  # noqa: TRY004
    return answers(output.transpose(1, 2) if is_tokens_first else output, leaves, gradient)


def judge(saved: dict[str, Any], limits: list[Tolerance], file: Path) -> Agreement:
    """Compare the answers in the file with the right ones, and the inputs there with the captured ones.

    Raises:
        ValueError: there are no answers, or they have other shapes.
    """
    try:
        written: Any = torch.load(file, weights_only=True)
        is_kept = all(torch.equal(saved[name], written["inputs"][name]) for name in PARTS)
        actual = [written["answers"][each.name].double() for each in limits]
    except Exception:  # noqa: BLE001 - foreign code writes anything
        raise ValueError("its process ended without answers") from None
    for each, tensor in zip(limits, actual, strict=True):
        if tensor.shape != each.expected.shape:
            raise ValueError(f"the {each.name} has shape {tuple(tensor.shape)}, not {tuple(each.expected.shape)}")
    rule = RuleResult(rule="inputs kept", holds=is_kept, found="" if is_kept else "the call changes its inputs")
    errors = tuple(each.judge(tensor) for each, tensor in zip(limits, actual, strict=True))
    return Agreement(oracle="float64", probes=(ProbeResult(probe="captured", tensors=errors),), rules=(rule,))


def answer(request: Request) -> None:
    """Write the function's answers, and its inputs after the call, into the file of the request."""
    saved = load(Path(request.file))
    answers = called(request.spec, saved)
    torch.save({"answers": answers, "inputs": {name: saved[name].detach() for name in PARTS}}, request.answers)


if __name__ == "__main__":
    try:
        answer(msgspec.json.decode(sys.stdin.buffer.read(), type=Request))
    except Exception as reason:  # noqa: BLE001 - foreign code raises anything
        sys.exit(f"{type(reason).__name__}: {' '.join(str(reason).split())}")
