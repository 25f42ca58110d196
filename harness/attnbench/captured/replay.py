"""Check a function on captured inputs: `attnbench check FILE:NAME --replay tensors.pt`.

The file tensors.pt is a dictionary that torch.save wrote: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) and,
if the call had them, mask (boolean, True where visible, or additive; broadcastable to (B, H, T, S)), scale, is_causal
(query i sees keys 0..i) and the gradient of the output (B, H, T, V). Strides are kept. The right answer is computed
head by head in float64. A dictionary with a block table is a captured call on a paged cache (paged.py).

`python -m attnbench.captured.replay FILE:NAME tensors.pt answers.pt` writes the function's answers into a file. Foreign
code runs only in that process; the function `judge` runs in another one.
"""

import math
import pickle
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attnbench.captured.paged import gathered, is_paged
from attnbench.case import QKV, Inputs, build, draw_weights, reason_against
from attnbench.checking import side_effects
from attnbench.checking.oracle import RowMask
from attnbench.checking.reference import Reference, errors
from attnbench.contract.declared import kind
from attnbench.contract.functions import Signature
from attnbench.contract.loading import implementation
from attnbench.contract.outside import repeat_heads
from attnbench.contract.pages import PageSignature
from attnbench.storage.records import Agreement, ProbeResult, RuleResult
from attnbench.workloads.workload import Workload

# names in a file of captured inputs; only the first three are required
ENTRIES = (*QKV, "mask", "scale", "is_causal", "gradient")


def load(file: Path) -> dict[str, Any]:
    """Load captured inputs by name (see the top of this module), without executing anything from the file.

    The inputs of a paged call are returned as `paged.gathered` does.

    Raises:
        ValueError: the file cannot be loaded, or its entries have other names, types or shapes.
    """
    try:
        saved: dict[str, Any] = torch.load(file, weights_only=True)
        if is_paged(saved):
            return _gathered(saved, file)
        names, (query, key, value) = set(saved), (saved[name].shape for name in QKV)
        is_fine = {len(query), len(key), len(value)} == {4} and query[0] == key[0] and query[3] == key[3]
        is_fine = is_fine and key[:3] == value[:3] and query[1] % key[1] == 0
        is_fine = is_fine and all(_fits(entry, each) for entry, each in saved.items() if each is not None)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"--replay {file} cannot be loaded: {error}") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError):
        is_fine = False
    if not is_fine or not names <= set(ENTRIES):
        raise ValueError(
            f"--replay {file} holds no inputs of attention: give query (B, H, T, K), key (B, G, S, K), value "
            f"(B, G, S, V) and any of {', '.join(ENTRIES[3:])}; or a call with a block_table (docs/serving.md)"
        )
    return saved


def _gathered(saved: dict[str, Any], file: Path) -> dict[str, Any]:
    try:
        return gathered(saved)
    except ValueError as error:
        raise ValueError(f"--replay {file}: {error}") from None


def _fits(entry: str, value: Any) -> bool:  # noqa: ANN401 - whatever a file holds
    """Return whether an entry has the right type. An integer mask does not: it could be additive or boolean."""
    if entry in {"scale", "is_causal"}:
        return isinstance(value, float | int if entry == "scale" else bool)
    return bool(value.is_floating_point() or (entry == "mask" and value.dtype == torch.bool))


def settings(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the axes of a captured call's workload. `is_causal` becomes mask=causal; a mask tensor becomes no axis.

    A paged call has the axes of its batch, too.
    """
    query, value = saved["query"], saved["value"]
    axes: dict[str, Any] = dict(zip(("batch_size", "num_heads", "seq_len", "head_dim"), query.shape, strict=True))
    axes |= dict(zip(("num_kv_heads", "kv_len", "value_dim"), value.shape[1:], strict=True))
    return axes | {
        "scope": "attention",
        "embed_dim": query.shape[1] * query.shape[3],
        "dtype": str(query.dtype).removeprefix("torch."),
        "device": query.device.type,
        "direction": "inference" if saved.get("gradient") is None else "forward_backward",
        "mask": "causal" if saved.get("is_causal") else "none",
        **saved.get("axes", {}),
    }


@dataclass(frozen=True, kw_only=True)
class CapturedMask(RowMask):
    """A captured mask in additive form (B, H, T, S), -inf at hidden keys."""

    added: Tensor

    def changed(self, scores: Tensor) -> Tensor:
        """Add the captured mask to the scores (B, H, R, S) of R queries."""
        return scores + self.added[self.batch, self.heads].to(scores)


def reference(saved: dict[str, Any]) -> Reference:
    """Compute the right answer for the captured inputs, with limits for the errors of each tensor.

    Raises:
        ValueError: shapes of the inputs do not fit together, or the right answer is not finite.
    """
    workload, gradient, mask = Workload(**settings(saved)), saved.get("gradient"), saved.get("mask")
    shape = (*saved["query"].shape[:3], saved["key"].shape[2])
    added = torch.zeros((), dtype=torch.float64) if mask is None else mask.detach().cpu()
    added = torch.where(added, 0.0, -math.inf) if added.dtype == torch.bool else added
    try:
        added = added.double().expand(shape)
    except RuntimeError as error:
        raise ValueError(f"--replay has no inputs of attention: {error}") from None
    if gradient is not None and gradient.shape != (*shape[:3], workload.value_dim):
        raise ValueError(f"--replay has no inputs of attention: its gradient has shape {tuple(gradient.shape)}")

    def captured(mask: RowMask) -> CapturedMask:
        known = {field.name: getattr(mask, field.name) for field in fields(RowMask)}
        return CapturedMask(**known | {"scale": saved.get("scale")}, added=added)

    return Reference(
        workload,
        Inputs(tensors={name: saved[name].detach().cpu().double() for name in QKV}, weights=draw_weights(workload)),
        0,
        mask=captured,
        rows=torch.arange(workload.seq_len),
        grad_rows=gradient,
    )


def called(spec: str, saved: dict[str, Any]) -> dict[str, Tensor]:
    """Call the function `spec`; return, by name, its output and, if a gradient was captured, its input gradients.

    The results are converted to float64 on the CPU.

    Raises:
        ValueError: `spec` is no function of query, key and value, lacks a parameter, or returns no tensor.
        Exception: any exception of the function.
    """
    signature = getattr(implementation(spec).build, "signature", None)
    if isinstance(signature, PageSignature):
        raise ValueError("the function reads pages: give a capture with key_cache, value_cache and block_table")  # noqa: TRY004
    if not isinstance(signature, Signature):
        raise ValueError("--replay calls a function of query, key and value, and not a module")  # noqa: TRY004
    names, gradient = signature.names, saved.get("gradient")
    query, key, value = leaves = [saved[name].detach().requires_grad_(gradient is not None) for name in QKV]
    passed: dict[str, Any] = {}
    for entry in ("mask", "scale", "is_causal"):
        if saved.get(entry) is None or saved[entry] is False:
            continue
        is_added = entry == "mask" and saved["mask"].dtype != torch.bool and "bias" in names
        if (keyword := "bias" if is_added else entry) not in names:
            raise ValueError(f"the function has no parameter {entry}, which was captured")
        passed[names[keyword]] = saved[entry]
    if "num_kv_heads" in names:
        passed[names["num_kv_heads"]] = True if names["num_kv_heads"] == "enable_gqa" else key.shape[1]
    else:
        key, value = (repeat_heads(each, query.shape[1]) for each in (key, value))
    is_tokens_first = signature.layout == "bthk"
    tensors = [each.transpose(1, 2) if is_tokens_first else each for each in (query, key, value)]
    output: object = signature.function(*tensors, **passed)
    if not isinstance(output, Tensor):
        raise ValueError(f"the function returned {kind(output)}: it must return one tensor (B, H, T, V)")  # noqa: TRY004
    output = output.transpose(1, 2) if is_tokens_first else output
    answers = {"output": output}
    if gradient is not None:
        pulled = torch.autograd.grad(output, leaves, gradient.to(output), allow_unused=True, materialize_grads=True)
        answers |= {f"gradient of {name}": each for name, each in zip(QKV, pulled, strict=True)}
    return {name: each.detach().double().cpu() for name, each in answers.items()}


def called_on_requests(spec: str, saved: dict[str, Any]) -> tuple[dict[str, Tensor], str]:
    """Call the implementation `spec` on the batch of a captured paged call, as every check does.

    A function that names a block table gets pools that the harness lays out; for any other one, the requests are
    gathered. Return the output (1, H, T, V) by name, in float64 on the CPU, and what the call changed of its arguments.

    Raises:
        ValueError: the implementation cannot compute the batch, or returns no tensor.
        Exception: any exception of the function.
    """
    made, workload = implementation(spec), Workload(**settings(saved))
    if reason := reason_against(made, workload):
        raise ValueError(reason)
    inputs = Inputs(tensors={name: saved[name] for name in QKV}, weights=draw_weights(workload))
    case = build(workload, made, inputs)
    with case.grad_mode(), side_effects.watch_call(case.tensors, case.mask) as faults:
        output = case.output()
    return {"output": output.detach().double().cpu()}, faults.get(side_effects.INPUTS, "")


def judge(saved: dict[str, Any], right: Reference, file: Path) -> Agreement:
    """Compare the answers in `file`, which `answer` wrote, with `right`, and the inputs in `file` with `saved`.

    Raises:
        ValueError: the file contains no answers, or they have the wrong shapes.
    """
    try:
        written: Any = torch.load(file, weights_only=True)
        is_kept = all(torch.equal(saved[name], written["inputs"][name]) for name in QKV)
        fault = str(written["fault"]) if is_kept else "the call changes its inputs"
        actual = {name: written["answers"][name].double() for name in right.expected}
    except Exception:  # noqa: BLE001 - foreign code writes anything
        raise ValueError("its process ended without answers") from None
    for name, expected in right.expected.items():
        if actual[name].shape != expected.shape:
            raise ValueError(f"the {name} has shape {tuple(actual[name].shape)}, not {tuple(expected.shape)}")
    rule = RuleResult(rule="inputs kept", holds=not fault, found=fault)
    probe = ProbeResult(probe="captured", tensors=errors(actual, right))
    return Agreement(probes=(probe,), rules=(rule,))


def answer(spec: str, file: str, answers: str) -> None:
    """Call the function `spec` on the inputs in `file`; write its results, and the inputs afterwards, to `answers`."""
    saved = load(Path(file))
    made, fault = called_on_requests(spec, saved) if "axes" in saved else (called(spec, saved), "")
    kept = {name: saved[name].detach() for name in QKV}
    torch.save({"answers": made, "fault": fault, "inputs": kept}, answers)


if __name__ == "__main__":
    try:
        answer(*sys.argv[1:])
    except Exception as reason:  # noqa: BLE001 - foreign code raises anything
        sys.exit(f"{type(reason).__name__}: {' '.join(str(reason).split())}")
