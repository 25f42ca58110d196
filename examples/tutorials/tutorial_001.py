"""Batched multi-head self-attention with padding: token 0 fills up the shorter of two rows.

The cells of the notebook ran out of order, so that its printed weights were computed without the mask. This module
computes the tables as printed, and also with the mask that the text describes.
"""

import torch
from torch import Tensor, nn

from attnbench.contract import Weights
from attnbench.workloads.workload import Workload
from examples.tutorials.blocks import attend, output, planted, seeded

TOKENS = ((1, 2, 0, 0), (1, 2, 3, 4))
LENGTHS = tuple(sum(token != 0 for token in row) for row in TOKENS)
PRINTED_QKV = (
    (
        (0.1592, -0.3586, 0.5629, -0.5026, -0.3295, 0.6718),
        (-0.2941, 0.1607, -0.5823, 0.5015, 0.6178, -0.5147),
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ),
    (
        (0.1544, -0.4201, 0.1823, -0.1312, 0.1394, -0.2156),
        (-0.0365, 0.5209, 0.3704, 0.3071, -0.3399, 0.4653),
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ),
)
"""Data point 1 after its projection, as printed (H, T, 3 * K): query, key and value of each head, in one row."""
POINT = Workload(batch_size=1, seq_len=4, num_heads=2, head_dim=2, mask=f"padding({LENGTHS[0]})")


def draws() -> tuple[Tensor, Tensor]:
    """Draw the vectors of the tokens (B, T, D) and the fused projection (H * 3 * K, D).

    The printed projection is the second layer that is drawn from the seed; the first one is not used.
    """
    with seeded(2):
        x = nn.Embedding(5, 4, padding_idx=0)(torch.tensor(TOKENS)).detach()
        _, projection = nn.Linear(4, 12, bias=False), nn.Linear(4, 12, bias=False)
    return x, projection.weight.detach()


def canonical(projection: Tensor) -> Weights:
    """Split a projection (H * 3 * K, D), whose rows are grouped by head, into three weights (H, K, D)."""
    query, key, value = projection.view(2, 3, 2, 4).unbind(1)
    return Weights(query=query, key=key, value=value)


def tables() -> dict[str, Tensor]:
    """Compute every table, by name; those of data point 1 start from the printed projection. Scores are scaled."""
    x, projection = draws()
    qkv = torch.tensor(PRINTED_QKV)
    query, key, value = qkv.chunk(3, dim=-1)  # (H,T,3*K) -> 3 x (H,T,K)
    masked = attend(query, key, value, POINT.mask)
    unmasked = attend(query, key, value, POINT.mask, planted("padding_ignored", POINT))
    lengths = ",".join(map(str, LENGTHS))
    return {
        "embedded": x.flatten(0, 1),
        "qkv_data_point_1": qkv,
        "qkv_data_point_1_from_the_seed": (x[0] @ projection.T).unflatten(-1, (2, 6)).transpose(0, 1),
        "scores_data_point_1_unmasked": unmasked["scores"],
        "weights_data_point_1_unmasked": unmasked["weights"],
        "values_data_point_1_unmasked": unmasked["context"],
        "scores_data_point_1_masked": masked["masked scores"],
        "weights_data_point_1_masked": masked["weights"],
        "values_data_point_1_masked": masked["context"],
        "output_unmasked": output("fused", canonical(projection), x),
        "output_masked": output("fused", canonical(projection), x, mask=f"padding({lengths})"),
    }
