"""Numbers that follow from a workload alone: one pure function each."""

from harness.records import DTYPE_BYTES, Workload


def score_matrix_bytes(workload: Workload) -> int:
    """What the textbook form needs for one score matrix: B * H * T * S numbers of the workload's dtype."""
    num_scores = workload.batch_size * workload.num_heads * workload.seq_len * workload.kv_len
    return num_scores * DTYPE_BYTES[workload.dtype]
