"""A workload made ready to be timed: its inputs and mask, the arms built on them, and whether they still compute."""

from collections.abc import Callable
from typing import Any

import msgspec
import torch

from attnbench.checking import agreement
from attnbench.checking.case import Case, bind, build, place
from attnbench.checking.inputs import draw_normal
from attnbench.checking.reference import Reference, reference_for_probe
from attnbench.contract import Implementation
from attnbench.storage.records import Arm
from attnbench.timing.blocks import TimedCall
from attnbench.workloads.workload import Workload

VERIFY_PROBE, VERIFY_SEED = "needles", 1
SHARED_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the precision of float32 matmuls": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
}
"""Settings of the process that every arm shares, and that none may change: how each is read, and how it is set."""


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
    """Watches the shared settings of the process."""

    def __init__(self) -> None:
        """Remember how they are."""
        self._kept = {name: read() for name, (read, _) in SHARED_SETTINGS.items()}

    def require_unchanged(self) -> None:
        """Put all of them back as they were.

        Raises:
            SharedStateError: any was changed; the message says which.
        """
        if changes := self.restore():
            raise SharedStateError(f"it changed {', '.join(changes)} for everybody in the process")

    def restore(self) -> list[str]:
        """Put all of them back; return what was changed, in words."""
        changes: list[str] = []
        for name, (read, write) in SHARED_SETTINGS.items():
            kept, now = self._kept[name], read()
            if now != kept:
                changes.append(f"{name} from {kept} to {now}")
                write(kept)
        return changes
