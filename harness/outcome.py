"""What a check found, as data."""

from collections.abc import Iterator

import msgspec


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """How far one tensor (output or a gradient) is from the oracle, and how far it may be.

    `error` is the largest absolute difference; None says that it is not finite. `allowed` is 2 * yardstick_error +
    rounding_band, or a few times that: see docs/method.md. `worst` is the index of the largest error.
    """

    tensor: str
    error: float | None
    allowed: float
    yardstick_error: float
    rounding_band: float
    worst: tuple[int, ...]
    expected: float
    actual: float | None

    @property
    def agrees(self) -> bool:
        """Whether the error is finite and allowed."""
        return self.error is not None and self.error <= self.allowed


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one kind of input showed."""

    probe: str
    tensors: tuple[TensorError, ...]


class RuleResult(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a rule about special rows, memory or layouts holds; one that is only noted does not decide."""

    rule: str
    holds: bool
    found: str = ""  # what was seen, in words, where it does not hold
    is_noted: bool = False


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of the check: which oracle, probes and rules, each tensor's error, a diagnosis where it fails."""

    oracle: str
    probes: tuple[ProbeResult, ...]
    rules: tuple[RuleResult, ...] = ()
    diagnosis: str = ""
    mistakes: tuple[str, ...] = ()  # the known mistakes that it could be: more than one where they cannot be told apart
    step: str = ""  # the first step that differs, where it is known

    def tensors(self) -> Iterator[tuple[str, TensorError]]:
        """Every compared tensor with the name of its probe."""
        for probe in self.probes:
            for tensor in probe.tensors:
                yield probe.probe, tensor

    @property
    def agrees(self) -> bool:
        """True only if something was compared, everything compared agrees, the rules hold and nothing was diagnosed."""
        compared = [tensor.agrees for _, tensor in self.tensors()]
        return bool(compared) and all(compared) and not self.broken_rules and not self.diagnosis

    @property
    def broken_rules(self) -> tuple[RuleResult, ...]:
        """The rules that do not hold and decide."""
        return tuple(rule for rule in self.rules if not rule.holds and not rule.is_noted)

    @property
    def notes(self) -> tuple[RuleResult, ...]:
        """The rules that do not hold and are only noted."""
        return tuple(rule for rule in self.rules if not rule.holds and rule.is_noted)

    @property
    def error_ratio(self) -> float | None:
        """The largest error / allowed over all tensors; None where nothing was compared or an error is not finite."""
        ratios = [
            None if t.error is None else (t.error / t.allowed if t.allowed else float(t.error > 0) * 1e9)
            for _, t in self.tensors()
        ]
        finite = [ratio for ratio in ratios if ratio is not None]
        return max(finite) if finite and len(finite) == len(ratios) else None


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of operator that ran in one call, as the profiler names it, such as aten::bmm."""

    name: str
    kind: str  # one of kinds.KINDS
    num_calls: int
    self_s: float  # without the operators that it called; profiled, so for shares and not for speed
    allocated_bytes: int = 0  # what it asked for itself, freed or not
    largest_bytes: int = 0  # the largest single block among these


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """What really ran in one call, in a pass of its own, and whether it is what was asked for."""

    calls: tuple[Operator, ...]
    requested: str = ""  # the backend that the implementation is named after; empty: none
    predicted: str = ""  # the backend that PyTorch said it would take; empty: it does not say
    observed: str = ""  # the backend that ran; empty: none of PyTorch's
    reason: str = ""  # why it is not what was requested, in PyTorch's words
    num_faults: float = 0.0  # minor page faults of one call, without a profiler
    fault_s: float = 0.0  # what one costs on this machine, by an estimate; 0: not known

    @property
    def fallback(self) -> str:
        """In words, that something else ran than what was requested, and why; empty where nothing of the kind did."""
        if self.requested in {"", self.observed}:
            return ""
        ran = f"{self.observed} ran" if self.observed else "no backend of PyTorch's ran"
        because = self.reason or "PyTorch gives no reason"
        return f"the {self.requested} backend was asked for and {ran}: {because}"
