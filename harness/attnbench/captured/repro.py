"""Write a script that reproduces a wrong answer and needs only torch: repro.py, its tensors, and copies of the code.

`python -m attnbench.captured.repro` reads a `Request` from standard input. Foreign code runs only in that process.
"""

import inspect
import math
import shutil
import sys
import textwrap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from attnbench import plugins
from attnbench.case import QKV, Case, build
from attnbench.checking.oracle import row_mask
from attnbench.checking.reference import Reference, reference_for_probe
from attnbench.contract import Implementation
from attnbench.contract.adapters import Adapted, sizes_of
from attnbench.contract.functions import ByFunction
from attnbench.contract.loading import implementation
from attnbench.storage.records import TensorError
from attnbench.workloads.workload import Workload

TOKENS = ("x", "context")
NOT_A_FUNCTION = (
    "a repro script can only call a function of query, key and value, or a module that `adapt` was given: add "
    "--set scope=attention"
)
SAVED = Tensor | bool | int | float | str | None  # what torch.load reads with weights_only
TEXT = Template('''"""$title

$words

`python repro.py` needs torch, and the other files in its folder. It exits with 1 while the fault is there.
"""

import math
import os
import sys
import types

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
saved = torch.load(os.path.join(sys.path[0], "repro.pt"), weights_only=True)
$parts

def textbook(query, key, value):
    """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V); a query that sees no key gets 0."""
    if saved["rotary"]:
        query, key = rotated(query), rotated(key)
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = saved["scale"] * query @ key.mT + saved["added"]  # -inf hides a key
    empty = (saved["added"] == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0) @ value


def rotated(heads):
    """Rotate pairs of columns of (B, H, T, K) by angles in proportion to the position."""
    base, is_interleaved = saved["rotary"]
    half = heads.shape[-1] // 2
    angles = torch.arange(heads.shape[2]).double()[:, None] * base ** -(torch.arange(half).double() / half)
    cos, sin = angles.cos().to(heads.device), angles.sin().to(heads.device)
    one, other = (heads[..., 0::2], heads[..., 1::2]) if is_interleaved else heads.chunk(2, -1)
    pairs = one * cos - other * sin, other * cos + one * sin
    return torch.stack(pairs, -1).flatten(-2) if is_interleaved else torch.cat(pairs, -1)


def answer(attention, inputs):
    """The output, or the gradient of one of the inputs."""
    inputs = [each.requires_grad_(saved["gradient"] is not None) for each in inputs]
    output = attention(*inputs)
    if saved["place"] == 0:
        return output.detach().double()
    gradient = saved["gradient"].to(output.dtype)
    gradients = torch.autograd.grad(output, inputs, gradient, allow_unused=True, materialize_grads=True)
    return gradients[saved["place"] - 1].double()


inputs = saved["inputs"]  # with their strides
for each in inputs:
    print(tuple(each.shape), each.dtype, each.device, "strides", each.stride())
seen = answer(called, [each.clone() if 0 in each.stride() else each for each in inputs])
right = answer(expected, [each.detach().double() for each in inputs])
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
IMPORTED = """from candidate import $name as candidate

"""
STAND_IN = '''

def adapt(made, layout=None, **facts):
    """Stand for the function of attnbench: return what it was given."""
    return made, facts


class Attnbench(types.ModuleType):
    """Stand for a module of attnbench, which candidate.py imports, so that this script needs torch alone."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return adapt if name == "adapt" else sys.modules.get(f"{self.__name__}.{name}", lambda *_, **__: None)


for name in ("attnbench", "attnbench.contract", "attnbench.contract.adapters"):
    sys.modules[name] = Attnbench(name)

'''
FUNCTION = """
def called(query, key, value):
    output = heads_first(candidate(query, key, value, **saved["passed"]))
    return output if saved["empty"] is None else output.masked_fill(saved["empty"], 0.0)


def heads_first(tensor):
    return tensor.transpose(1, 2) if saved["is_tokens_first"] else tensor


def expected(query, key, value):
    return textbook(*map(heads_first, (query, key, value)))

"""
MODULE = '''
class Mask:
    """The mask that the module's call was given: what the call read of it."""

    def __getattr__(self, name):
        if name in saved["mask"]:
            return saved["mask"][name]
        return lambda *by_place, **by_name: saved["mask"][f"{name}{by_place}{by_name}"]


def called(x, context=None):
    make, facts = candidate
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = make(types.SimpleNamespace(**saved["sizes"])).eval().to(x.device, x.dtype)
    module.load_state_dict(saved["state"], strict=False)
    for path, buffer in saved["buffers"].items():
        owner, _, name = path.rpartition(".")
        setattr(module.get_submodule(owner), name, buffer)
    call = facts.get("call")
    output = module(x) if call is None else call(module, x, x if context is None else context, Mask())
    output = output[0] if isinstance(output, tuple) else output
    output = output - x if facts.get("residual") else output
    return output if saved["projection"] is None else torch.nn.functional.linear(output, *saved["projection"])


def expected(x, context=None):
    """Tokens x (B, T, D), and context (B, S, D) or None -> (B, T, D): projections around the textbook's attention."""
    weights = {name: tensor.double() for name, tensor in saved["weights"].items()}

    def heads(name, tokens):
        projected = torch.einsum("btd,hkd->bhtk", tokens, weights[name])
        return projected + weights[f"{name}_bias"][:, None] if f"{name}_bias" in weights else projected

    source = x if context is None else context
    output = textbook(heads("query", x), heads("key", source), heads("value", source))
    return torch.nn.functional.linear(output.transpose(1, 2).flatten(2), weights["out"], weights.get("out_bias"))

'''


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A request to write a script that reproduces one wrong tensor."""

    spec: str  # of the implementation
    workload: Workload
    probe: str  # kind of input, as in ProbeResult
    seed: int  # of the input
    error: TensorError
    words: str  # about the fault, for the script's docstring
    folder: str  # folder into which the script and its files are written


def compared(workload: Workload) -> list[str]:
    """Return the names of the tensors that a script can compare: the output, and gradients of the call's arguments."""
    names = QKV if workload.scope == "attention" else TOKENS[: 1 + (workload.kv_len != workload.seq_len)]
    return ["output", *(f"gradient of {name}" for name in names)]


def reason_against(workload: Workload, error: TensorError) -> str:
    """Return why a script cannot reproduce a wrong tensor; "" if it can."""
    if workload.requests:
        return "the script has no pages of a cache"
    if workload.sinks != "none" or not workload.mask_rule.is_additive:
        return "the formula of the script has no sinks and no softcap"
    return (
        "" if error.tensor in compared(workload) and error.rows else f"the script does not compare the {error.tensor}"
    )


def write(request: Request) -> Path:
    """Write the script and its files into the folder of the request; return the script's path.

    Raises:
        ValueError: a script cannot reproduce the wrong tensor, or cannot import the code.
    """
    workload, error = request.workload, request.error
    if reason := reason_against(workload, error):
        raise ValueError(reason)
    reference = reference_for_probe(workload, request.probe, request.seed)
    candidate = implementation(request.spec)
    case = build(workload, candidate, reference.inputs)
    if workload.scope == "attention" and isinstance(case.module, ByFunction):
        (own, name, file), parts = _of_function(case.module, case), FUNCTION
    elif isinstance(case.module, Adapted) and not isinstance(case.module, ByFunction):
        (file, name), parts = _place(request.spec), MODULE
        own = _of_module(candidate, reference, case.module)
    else:
        raise ValueError(NOT_A_FUNCTION)
    rows = row_mask(workload, torch.arange(workload.seq_len))
    zeros = torch.zeros(workload.batch_size, workload.num_heads, workload.seq_len, workload.kv_len).double()
    style, names = workload.rotary.partition("(")[0], compared(workload)
    saved = own | {
        "added": rows.changed(zeros).masked_fill(~rows.seen, -math.inf),
        "scale": rows.scale_for(workload.head_dim),
        "rotary": None if style == "none" else (workload.rotary_base, style == "interleaved"),
        "gradient": reference.grad_output,
        "place": names.index(error.tensor),
        "rows": error.rows,
        "allowed": error.allowed,
        "allowed_rms": error.allowed_rms,
    }
    folder = Path(request.folder)
    sources = plugins.sources([f"{file}:{name}"])
    for source in sources:
        copy = folder / ("candidate.py" if source == sources[0] else source.relative_to(sources[0].parent))
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
    torch.save(saved, folder / "repro.pt")
    stand_in = STAND_IN * any("attnbench" in plugins.imports_of(source) for source in sources)
    title = f"{name} of {file.name} is {error.grade.name} on {workload.id}."
    words = textwrap.fill(request.words.replace('"', "'"), 116)
    parts = stand_in + Template(IMPORTED).substitute(name=name) + parts
    text = TEXT.substitute(title=title, words=words, parts=parts, tensor=error.tensor)
    script = folder / "repro.py"
    script.write_text(text, encoding="utf-8")
    return script


def _of_function(module: ByFunction, case: Case) -> tuple[dict[str, Any], str, Path]:
    """Return what a script needs to call a function: values by name, the function's name, and its file.

    Raises:
        ValueError: the function is not at the top level of a file.
    """
    case.hand_over_operands()
    query, key, value = (case.tensors[name] for name in QKV)
    call = module.bind(query, key, value, case.mask).call
    function = call.func if isinstance(call, partial) else call
    name, file = getattr(function, "__name__", ""), inspect.getsourcefile(inspect.unwrap(function))
    if file is None or getattr(function, "__qualname__", "") != name:
        raise ValueError("a repro script cannot import the function: define it at the top level of a Python file")
    prepared = module.prepare(query, key, value, case.mask)
    passed = {key: each.detach() if isinstance(each, Tensor) else each for key, each in prepared.passed.items()}
    own = {"inputs": [each.detach() for each in prepared.tensors], "passed": passed, "empty": prepared.empty}
    return own | {"is_tokens_first": prepared.is_tokens_first}, name, Path(file)


def _place(spec: str) -> tuple[Path, str]:
    """Return the file of a spec, and the name of the value in it.

    Raises:
        ValueError: the spec names no file.
    """
    path, name = plugins.split(plugins.variant(spec)[0])
    if path is None:
        raise ValueError("a repro script needs the file of the module: name it as FILE.py:NAME")
    return path, name


class _Noted:
    """A wrapper of a mask that records in `read` each value that code reads from the mask.

    The key is an attribute's name or, for a method, the text of the call, as in "visible_as('bts',){}".
    """

    def __init__(self, mask: object) -> None:
        self._mask, self.read = mask, dict[str, Any]()

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - attributes have several types
        value = getattr(self._mask, name)
        return partial(self._call, name, value) if callable(value) else self.read.setdefault(name, value)

    def _call(self, name: str, method: Callable[..., Any], *by_place: Any, **by_name: Any) -> Any:  # noqa: ANN401
        return self.read.setdefault(f"{name}{by_place}{by_name}", method(*by_place, **by_name))


def _of_module(candidate: Implementation, reference: Reference, module: Adapted) -> dict[str, Any]:
    """Return what a script needs to create a module and to call it, by name.

    A second module is built and called once. This records the values that the call reads from the mask, and the dtypes
    of the module's buffers.
    """
    case = build(reference.workload, candidate, reference.inputs)
    assert isinstance(case.module, Adapted)
    mask, inputs = _Noted(case.mask), [case.tensors[name].detach() for name in TOKENS if name in case.tensors]
    with torch.no_grad():
        case.module(*inputs, mask=mask)
    _ = mask.visible, mask.hidden, mask.lengths, mask.scale, mask.added(inputs[0].dtype)  # repaired code may read these
    dtypes = {name: each.dtype for name, each in case.module.module.named_buffers()}
    sizes = sizes_of(reference.inputs.weights)
    out: nn.Module | None = module.out
    return {
        "inputs": inputs,
        "mask": {name: value for name, value in mask.read.items() if isinstance(value, SAVED)},
        "sizes": {name: getattr(sizes, name) for name in sizes.__dataclass_fields__},
        "state": {name: each.detach() for name, each in module.module.named_parameters()},
        "buffers": {name: each.to(dtypes.get(name, each.dtype)) for name, each in module.module.named_buffers()},
        "projection": None if out is None else [each.detach() for each in out.parameters()],
        "weights": reference.inputs.weights.tensors(),
    }


if __name__ == "__main__":
    try:
        sys.stdout.write(str(write(msgspec.json.decode(sys.stdin.buffer.read(), type=Request))))
    except ValueError as reason:
        sys.exit(str(reason))
