"""Bytes that the ranks of one call exchange, computed from the sizes alone."""

from collections.abc import Callable

from attnbench.workloads.workload import DTYPE_BYTES, Workload


def _wide_bytes(workload: Workload) -> int:
    """Return the bytes of a number in an accumulated gradient."""
    return max(4, DTYPE_BYTES[workload.dtype])


def _kv_numbers(workload: Workload) -> int:
    """Return B * G * (K + V): key and value of one token."""
    return workload.batch_size * workload.num_kv_heads * (workload.head_dim + workload.value_dim)


def ring(workload: Workload) -> tuple[int, int]:
    """Return the bytes of the forward and of the backward pass; both pass all keys and values on W - 1 times.

    The backward pass also passes their gradients on W times.
    """
    tokens = workload.seq_len * _kv_numbers(workload)
    once = (workload.world_size - 1) * tokens * DTYPE_BYTES[workload.dtype]
    home = workload.world_size * tokens * _wide_bytes(workload) if workload.world_size > 1 else 0
    return once, once + home


def ulysses(workload: Workload) -> tuple[int, int]:
    """Return the bytes of the forward and of the backward pass, which are equal.

    Query, key and value of a token go to the other ranks, 1 / W of the heads to each, and the output comes back.
    """
    per_token = workload.batch_size * workload.num_heads * (workload.head_dim + workload.value_dim)
    numbers = workload.seq_len * (per_token + _kv_numbers(workload)) * (workload.world_size - 1)
    sent = numbers // workload.world_size * DTYPE_BYTES[workload.dtype]
    return sent, sent


def all_gather(workload: Workload) -> tuple[int, int]:
    """Return the bytes of the forward and of the backward pass.

    Each rank sends its keys and values, padded to the longest, to all others; in the backward pass gradients come back.
    """
    others, longest = workload.world_size - 1, -(-workload.seq_len // workload.world_size)
    forward = workload.world_size * others * longest * _kv_numbers(workload) * DTYPE_BYTES[workload.dtype]
    return forward, others * workload.seq_len * _kv_numbers(workload) * _wide_bytes(workload)


THEORY: dict[str, Callable[[Workload], tuple[int, int]]] = {
    "ring": ring,
    "zigzag_ring": ring,
    "ulysses": ulysses,
    "all_gather": all_gather,
}


def bytes_sent(name: str, workload: Workload) -> int:
    """Return the bytes that all ranks send in one call of the workload's direction."""
    forward, backward = THEORY[name](workload)
    return forward * (workload.direction != "backward") + backward * (workload.direction.endswith("backward"))
