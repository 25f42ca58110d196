"""Write a script that reproduces a wrong answer and needs only torch: repro.py, its tensors, and a copy of the code.

`python -m attnbench.captured.repro` reads a `Request` from standard input. Foreign code runs only in that process.
"""

import inspect
import math
import shutil
import sys
import textwrap
from functools import partial
from pathlib import Path
from string import Template

import msgspec
import torch
from torch import Tensor

from attnbench.case import QKV, build
from attnbench.checking.oracle import row_mask
from attnbench.checking.reference import reference_for_probe
from attnbench.contract.functions import ByFunction
from attnbench.contract.loading import implementation
from attnbench.storage.records import TensorError
from attnbench.workloads.workload import Workload

# names of the tensors that a script can compare; the index of one is stored as `place`
TENSORS = ("output", *(f"gradient of {name}" for name in QKV))
NOT_A_FUNCTION = "a repro script can only call a function of query, key and value, and not a module"
TEXT = Template('''"""$title

$words

`python repro.py` needs torch, and repro.pt and candidate.py in its folder. It exits with 1 while the fault is there.
"""

import math
import os
import sys

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from candidate import $name as candidate

saved = torch.load(os.path.join(sys.path[0], "repro.pt"), weights_only=True)
heads_first = (lambda tensor: tensor.transpose(1, 2)) if saved["is_tokens_first"] else (lambda tensor: tensor)


def called(query, key, value):
    output = heads_first(candidate(query, key, value, **saved["passed"]))
    return output if saved["empty"] is None else output.masked_fill(saved["empty"], 0.0)


def textbook(query, key, value):
    """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V); a query that sees no key gets 0."""
    query, key, value = map(heads_first, (query, key, value))
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = saved["scale"] * query @ key.mT + saved["added"]  # -inf hides a key
    empty = (saved["added"] == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value


def answer(attention, inputs):
    """The output, or the gradient of one of the inputs."""
    inputs = [each.requires_grad_(saved["gradient"] is not None) for each in inputs]
    output = attention(*inputs)
    if saved["place"] == 0:
        return output.detach().double()
    gradient = saved["gradient"].to(output.dtype)
    gradients = torch.autograd.grad(output, inputs, gradient, allow_unused=True, materialize_grads=True)
    return gradients[saved["place"] - 1].double()


inputs = saved["inputs"]  # query, key and value, with their strides
for each in inputs:
    print(tuple(each.shape), each.dtype, each.device, "strides", each.stride())
seen = answer(called, [each.clone() if 0 in each.stride() else each for each in inputs])
right = answer(textbook, [each.detach().double() for each in inputs])
apart = (seen - right).abs().nan_to_num(math.inf)
place = torch.unravel_index(apart.argmax(), apart.shape)
first, end = saved["rows"]
rms = float(apart[..., first:end, :].square().mean().sqrt())
print("$tensor at", [int(index) for index in place], "is", float(seen[place]), "and should be", float(right[place]))
# The limits are several times the errors of textbook forms in this dtype.
print("largest error", float(apart.max()), "allowed", saved["allowed"])
print("RMS error of rows", first, "to", end - 1, rms, "allowed", saved["allowed_rms"])
sys.exit(int(not (float(apart.max()) <= saved["allowed"] and rms <= saved["allowed_rms"])))
''')


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to write a script that reproduces one wrong tensor."""

    spec: str  # of the implementation
    workload: Workload
    probe: str  # kind of input, as in ProbeResult
    seed: int  # of the input
    error: TensorError
    words: str  # about the fault, for the script's docstring
    folder: str  # folder into which the script and its files are written


def reason_against(workload: Workload, error: TensorError) -> str:
    """Return why a script cannot reproduce a wrong tensor; "" if it can."""
    if workload.scope == "module":
        return f"{NOT_A_FUNCTION}: add --set scope=attention"
    if workload.sinks != "none" or workload.rotary != "none" or not workload.mask_rule.is_additive:
        return "the formula of the script has no sinks, no rotation and no softcap"
    return "" if error.tensor in TENSORS and error.rows else f"the script does not compare the {error.tensor}"


def write(request: Request) -> Path:
    """Write the script and its files into the folder of the request; return the script's path.

    Raises:
        ValueError: a script cannot reproduce the wrong tensor, or cannot import the function.
    """
    workload, error = request.workload, request.error
    if reason := reason_against(workload, error):
        raise ValueError(reason)
    reference = reference_for_probe(workload, request.probe, request.seed)
    case = build(workload, implementation(request.spec), reference.inputs)
    if not isinstance(case.module, ByFunction):
        raise ValueError(NOT_A_FUNCTION)  # noqa: TRY004 - the user's choice is wrong
    case.hand_over_operands()
    query, key, value = (case.tensors[name] for name in QKV)
    call = case.module.bind(query, key, value, case.mask).call
    function = call.func if isinstance(call, partial) else call
    name, file = getattr(function, "__name__", ""), inspect.getsourcefile(inspect.unwrap(function))
    if file is None or getattr(function, "__qualname__", "") != name:
        raise ValueError("a repro script cannot import the function: define it at the top level of a Python file")
    prepared = case.module.prepare(query, key, value, case.mask)
    rows = row_mask(workload, torch.arange(workload.seq_len))
    zeros = torch.zeros(workload.batch_size, workload.num_heads, workload.seq_len, workload.kv_len).double()
    saved = {
        "inputs": [each.detach() for each in prepared.tensors],
        "passed": {key: each.detach() if isinstance(each, Tensor) else each for key, each in prepared.passed.items()},
        "empty": prepared.empty,
        "is_tokens_first": prepared.is_tokens_first,
        "added": rows.changed(zeros).masked_fill(~rows.seen, -math.inf),
        "scale": rows.scale_for(workload.head_dim),
        "gradient": reference.grad_output,
        "place": TENSORS.index(error.tensor),
        "rows": error.rows,
        "allowed": error.allowed,
        "allowed_rms": error.allowed_rms,
    }
    folder = Path(request.folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(saved, folder / "repro.pt")
    shutil.copyfile(file, folder / "candidate.py")
    title = f"{name} of {Path(file).name} is {error.grade.name} on {workload.id}."
    words = textwrap.fill(request.words.replace('"', "'"), 116)
    script = folder / "repro.py"
    text = TEXT.substitute(title=title, words=words, name=name, tensor=error.tensor)
    script.write_text(text, encoding="utf-8")
    return script


if __name__ == "__main__":
    try:
        sys.stdout.write(str(write(msgspec.json.decode(sys.stdin.buffer.read(), type=Request))))
    except ValueError as reason:
        sys.exit(str(reason))
