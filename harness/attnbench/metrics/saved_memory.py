"""What a forward call leaves behind for a backward pass, beyond inputs and output.

It is what is still held when the call has returned, less the output's own memory: each byte once, whoever keeps it; 0
in inference, which records no graph. Hooks on saved tensors would count inputs, which are there anyway, a tensor once
for each operator that saves it, and not what a custom function keeps in addition. An output that is saved too, as flash
kernels do, counts as output.
"""

from attnbench.metrics import Metric

METRIC = Metric(
    unit="bytes",
    summary="memory that a forward call keeps for its backward pass",
    measure=lambda case: float(case.forward_footprint.kept_bytes - case.forward_footprint.result_bytes),
)
