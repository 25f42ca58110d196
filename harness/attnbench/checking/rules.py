"""Rules that any attention obeys whatever its inputs: about hidden keys, memory, layouts, and saying the same twice.

They are tried at a short length, forward only. A rule is a function of a `Bench` that returns what it found, in
words, where the rule does not hold, or "". What PyTorch's own kernels break is only noted (docs/adr/0007).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from attnbench.checking import oracle
from attnbench.checking.case import TORCH_DTYPES, Case, build
from attnbench.checking.deviation import allowed, error, observe, require_form
from attnbench.checking.reference import Reference
from attnbench.contract import Implementation
from attnbench.storage.records import RuleResult


@dataclass(frozen=True)
class Trial:
    """A candidate at one workload: its references for two kinds of input."""

    implementation: Implementation
    normal: Reference
    other: Reference

    def case(self) -> Case:
        """A case on fresh copies of the normal inputs."""
        return build(self.normal.workload, self.implementation, self.normal.inputs.map(lambda tensor: tensor.clone()))

    def call(self, **changed: Tensor) -> Tensor:
        """The output on the normal inputs, some of them exchanged."""
        case = self.case()
        case.tensors.update(changed)
        with case.grad_mode():
            output = case.output()
        require_form(self.normal.workload, output)
        return output.detach()

    @cached_property
    def output(self) -> Tensor:
        """The output on the normal inputs."""
        return self.call()

    @property
    def can_be_called(self) -> bool:
        """Whether the candidate takes this workload at all."""
        try:
            return self.output is not None
        except Exception:  # noqa: BLE001 - whatever the candidate raises
            return False

    @property
    def is_right_on_other(self) -> bool:
        """Whether a case of its own answers the other inputs rightly."""
        found = observe(self.implementation, self.other)
        return error("output", found["output"], self.other).agrees

    @property
    def allowed(self) -> float:
        """How far two honest answers on the normal inputs may be apart."""
        return 2 * allowed("output", self.normal)

    @cached_property
    def seen(self) -> Tensor:
        """Which keys each query sees (B, T, S)."""
        return oracle.seen_rows(self.normal.workload, torch.arange(self.normal.workload.seq_len))

    def with_key(self, name: str, key: int, change: Callable[[Tensor], Tensor]) -> Tensor:
        """The output with one key's row of the tensor `name` changed."""
        tensor = self.normal.inputs.tensors[name].clone()
        tensor[..., key, :] = change(tensor[..., key, :])
        return self.call(**{name: tensor})

    @property
    def sources(self) -> tuple[str, ...]:
        """The tensors that hold a row for each key and nothing else."""
        tensors = self.normal.inputs.tensors
        return ("key", "value") if "key" in tensors else tuple(name for name in ("context",) if name in tensors)

    def split(self, output: Tensor, key: int) -> tuple[Tensor, Tensor]:
        """The rows of an output whose query does not see that key, and those whose query does; each (n, ...)."""
        rows = output.transpose(1, 2) if output.dim() == 4 else output  # noqa: PLR2004 - (B,H,T,V) -> (B,T,H,V)
        sees = self.seen[:, :, key].to(output.device)
        return rows[~sees], rows[sees]


def outputs_apart(trial: Trial) -> str:
    """A later call leaves an earlier call's output alone, and answers from what its tensors hold now."""
    case = trial.case()
    with case.grad_mode():
        first = case.output()
        kept = first.detach().clone()
        for name, tensor in case.tensors.items():
            tensor.data.copy_(trial.other.inputs.tensors[name])
        second = case.output()
    if not torch.equal(kept.nan_to_num(), first.nan_to_num()):
        return "a later call overwrote the output of an earlier one: they share memory"
    rows = second.index_select(second.dim() - 2, trial.other.rows.to(second.device))
    if not error("output", rows, trial.other).agrees and trial.is_right_on_other:
        return "a second call on other values in the same tensors is wrong: something is kept from the first"
    return ""


def inputs_kept(trial: Trial) -> str:
    """A call leaves its inputs as they are."""
    case = trial.case()
    with case.grad_mode():
        case.output()
    given = trial.normal.inputs.tensors
    changed = [name for name, tensor in case.tensors.items() if not torch.equal(tensor, given[name])]
    return f"the call changed its input {', '.join(changed)}" if changed else ""


def layouts(trial: Trial) -> str:
    """Tensors that lie in memory in another way give the same answer: transposed, at an offset, with gaps."""
    for name, change in LAYOUTS.items():
        changed = {key: change(tensor) for key, tensor in trial.normal.inputs.tensors.items()}
        off = _apart(trial.call(**changed), trial.output)
        if not off <= trial.allowed:
            return f"inputs that are {name} give another answer: off by {off:.3g} (allowed {trial.allowed:.3g})"
    return ""


def expanded(trial: Trial) -> str:
    """A batch that is one row expanded, with stride 0, gives what its copy in memory gives."""
    shared = {name: tensor[:1].expand_as(tensor) for name, tensor in trial.normal.inputs.tensors.items()}
    copied = {name: tensor.contiguous() for name, tensor in shared.items()}
    off = _apart(trial.call(**shared), trial.call(**copied))
    return "" if off <= trial.allowed else f"inputs that are expanded give another answer: off by {off:.3g}"


def hidden_keys(trial: Trial) -> str:
    """What a hidden key and its value hold, as long as it and its scores are finite, moves nothing."""
    poison = math.sqrt(torch.finfo(TORCH_DTYPES[trial.normal.workload.dtype]).max)
    for key in _half_hidden(trial):
        for name in trial.sources:
            output = trial.with_key(name, key, lambda row: poison * row)
            hidden, _ = trial.split(output, key)
            before, _ = trial.split(trial.output, key)
            off = _apart(hidden, before)
            if not off <= trial.allowed:
                return f"the {name} of key {key} moves queries that do not see it by {off:.3g}"
    return ""


def visible_nan(trial: Trial) -> str:
    """NaN in a key or value reaches every query that sees it: it must not be lost.

    A key that is alone has weight 1 whatever its score.
    """
    for name in trial.sources if trial.normal.workload.kv_len > 1 else ():
        key = trial.normal.workload.kv_len // 2
        _, seeing = trial.split(trial.with_key(name, key, lambda row: row * math.nan), key)
        if seeing.numel() and seeing.flatten(1).isfinite().all(dim=1).any():
            return f"NaN in the {name} of a visible key is lost"
    return ""


def hidden_nan(trial: Trial) -> str:
    """NaN or Inf in a hidden key or value stays there."""
    leaks = []
    for name in trial.sources:
        for word, bad in (("NaN", math.nan), ("Inf", math.inf)):
            for key in _half_hidden(trial):
                hidden, _ = trial.split(trial.with_key(name, key, lambda row, bad=bad: torch.full_like(row, bad)), key)  # type: ignore[misc]
                if not hidden.isfinite().all():
                    leaks.append(f"{word} in the {name}")
    return f"queries are reached by a hidden {', '.join(leaks)}" if leaks else ""


def repeatable(trial: Trial) -> str:
    """The same inputs give the same answer, to the last bit."""
    off = _apart(trial.call(), trial.output)
    return "" if off == 0 else f"two calls differ by {off:.3g}"


def _apart(one: Tensor, other: Tensor) -> float:
    """The largest difference; places where both are not finite are alike, where one alone is, they are far apart."""
    one, other = one.double().cpu(), other.double().cpu()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return float((one - other).abs().where(one.isfinite(), 0.0).max()) if one.numel() else 0.0


def _half_hidden(trial: Trial) -> list[int]:
    """A key that some queries see and others do not, or that none sees; the last such, or none."""
    hidden = (~trial.seen).any(dim=0).any(dim=0).nonzero().flatten()
    return [int(hidden[-1])] if len(hidden) else []


def _transposed(tensor: Tensor) -> Tensor:
    """The same values, with the axis of tokens outermost but one, as a projection leaves them."""
    return tensor.transpose(-2, -1).contiguous().transpose(-2, -1)


def _offset(tensor: Tensor) -> Tensor:
    """The same values, one element after the start of a buffer."""
    buffer = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return buffer[1:].view(tensor.shape).copy_(tensor)


def _gapped(tensor: Tensor) -> Tensor:
    """The same values, with tokens before heads and unused numbers between the rows."""
    moved = tensor.transpose(1, -2)
    wide = torch.full((*moved.shape[:-1], moved.shape[-1] + 3), math.nan, dtype=tensor.dtype, device=tensor.device)
    wide[..., : moved.shape[-1]] = moved
    return wide[..., : moved.shape[-1]].transpose(1, -2)


LAYOUTS = {"transposed": _transposed, "at an offset": _offset, "spread out in memory": _gapped}
DECIDING: dict[str, Callable[[Trial], str]] = {
    "inputs kept": inputs_kept,
    "outputs apart": outputs_apart,
    "layouts": layouts,
    "expanded": expanded,
    "hidden keys": hidden_keys,
    "visible NaN": visible_nan,
}
MAY_REFUSE = {"layouts", "expanded"}
"""To refuse a layout, loudly, is not to give a wrong answer: it is noted."""
MAY_BE_KNOWN = {"visible NaN"}
"""About values that are not finite alone: an implementation may say that a kernel is known for it, and why."""
NOTED: dict[str, Callable[[Trial], str]] = {"hidden NaN": hidden_nan, "repeatable": repeatable}


def examine(trial: Trial, on_step: Callable[[], object] = lambda: None) -> tuple[RuleResult, ...]:
    """Try every rule; what a candidate raises is what was found. `on_step` is called before each."""
    results = []
    for name, rule in (DECIDING | NOTED).items():
        on_step()
        known = trial.implementation.known.get(name, "") if name in MAY_BE_KNOWN else ""
        is_noted = name in NOTED or bool(known)
        try:
            found = rule(trial)
        except Exception as error:  # noqa: BLE001 - whatever the candidate raises
            found = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            is_noted = name in NOTED or name in MAY_REFUSE  # what is known excuses an answer, not an error
        found = f"{found} (known: {known})" if found and known and is_noted else found
        results.append(RuleResult(rule=name, holds=not found, found=found, is_noted=is_noted))
    return tuple(results)
