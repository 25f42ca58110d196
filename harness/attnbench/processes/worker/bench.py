"""A workload made ready to be timed: its inputs and mask, the arms built on them, and whether they still compute."""

import msgspec
import torch

from attnbench.checking import agreement
from attnbench.checking.case import Case, bind, build, draw_normal, place
from attnbench.checking.reference import Reference, reference_for_probe
from attnbench.contract import Implementation
from attnbench.storage.records import Arm
from attnbench.timing.blocks import TimedCall
from attnbench.workloads.workload import Workload

VERIFY_PROBE, VERIFY_SEED = "needles", 1


class Bench:
    """One workload, made ready to be measured."""

    def __init__(self, workload: Workload) -> None:
        """Draw the inputs and bind the mask, which all arms share."""
        self.workload = workload
        self.inputs = place(draw_normal(workload, 0), workload)
        self.mask = bind(workload)
        self.cases: dict[Arm, Case] = {}
        self.calls: dict[Arm, TimedCall] = {}
        self._reference: Reference | None = None

    def case(self, implementation: Implementation) -> Case:
        """A new case on the bench's inputs."""
        return build(self.workload, implementation, self.inputs, self.mask)

    def timed(self, arm: Arm, implementation: Implementation) -> TimedCall:
        """What the arm calls, built at first use."""
        if arm not in self.calls:
            self.cases[arm] = self.case(implementation)
            with self.cases[arm].grad_mode():
                self.calls[arm] = TimedCall(arm=arm, call=self.cases[arm].call())
        return self.calls[arm]

    def verify(self, arm: Arm) -> str:
        """What is wrong with the output of an arm that has been timed, on other values in the same tensors; or ""."""
        if self._reference is None:
            forward = msgspec.structs.replace(self.workload, direction="inference")
            self._reference = reference_for_probe(forward, VERIFY_PROBE, VERIFY_SEED)
        return agreement.verify(self.cases[arm], self._reference)


class SharedStateError(Exception):
    """An implementation changed settings of the whole process."""


class Guard:
    """Watches settings of the process that every arm shares, and that none may change."""

    def __init__(self) -> None:
        """Remember how they are."""
        self._kept = _settings()

    def require_unchanged(self) -> None:
        """Put all of them back as they were.

        Raises:
            SharedStateError: any was changed; the message says which.
        """
        if changes := self.restore():
            raise SharedStateError(f"it changed {', '.join(changes)} for everybody in the process")

    def restore(self) -> list[str]:
        """Put all of them back; return what was changed, in words."""
        now = _settings()
        changes = [f"{name} from {value} to {now[name]}" for name, value in self._kept.items() if value != now[name]]
        if not changes:
            return []
        torch.set_num_threads(int(self._kept["the number of threads"]))
        torch.set_default_dtype(getattr(torch, self._kept["the default dtype"].removeprefix("torch.")))
        torch.set_float32_matmul_precision(self._kept["the precision of float32 matmuls"])
        torch.use_deterministic_algorithms(self._kept["deterministic algorithms"] == "True")
        return changes


def _settings() -> dict[str, str]:
    return {
        "the number of threads": str(torch.get_num_threads()),
        "the default dtype": str(torch.get_default_dtype()),
        "the precision of float32 matmuls": torch.get_float32_matmul_precision(),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
    }
