"""What a forward call leaves behind for a backward pass, beyond inputs and output.

It is what is still held when the call has returned, less the output's own memory: each byte once, whoever keeps it.
Hooks on saved tensors would count inputs, which are there anyway, a tensor once for each operator that saves it, and
not what a custom function keeps beside them. An output that is saved too, as flash kernels do, counts as output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnbench.metrics import Metric

if TYPE_CHECKING:
    from attnbench.checking.case import Case


def measure(case: Case) -> float:
    """Bytes; 0 for inference, which records no graph."""
    found = case.forward_footprint
    return float(found.kept_bytes - found.result_bytes)


METRIC = Metric(unit="bytes", summary="memory that a forward call keeps for its backward pass", measure=measure)
