"""Attention over ranks of which one misbehaves, for tests that a run survives it. No test imports this module."""

import os
import signal
import time
from pathlib import Path

import torch

from attnbench.contract import Implementation, repeat_heads
from attnbench.contract.functions import Declared, from_function
from attnbench.ranks import not_over_ranks, over_ranks

SEEN = Path(os.environ.get("RANK_LIARS_SEEN", "/nonexistent"))
"""A folder in which each rank, and the process it was forked from, writes a file named by its process id."""


def right(query, key, value, rank):
    """Each rank gathers all keys and values."""
    if SEEN.exists():
        for process in (os.getpid(), os.getppid()) if rank.world_size > 1 else ():
            (SEEN / str(process)).touch()
    key, value = torch.cat(rank.gather(key), dim=2), torch.cat(rank.gather(value), dim=2)
    key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
    return (query @ key.transpose(-2, -1) * rank.scale).softmax(dim=-1) @ value


def one_dies(query, key, value, rank):
    """The second rank is killed once it has computed."""
    output = right(query, key, value, rank)
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return output


def one_hangs(query, key, value, rank):
    """The second rank computes and does not end."""
    output = right(query, key, value, rank)
    if rank.rank == 1:
        time.sleep(3600)
    return output


def over(share) -> Implementation:
    """Build an implementation in which each rank calls `share`."""

    def attention(query, key, value, scale, num_kv_heads, world_size, is_causal=False):
        return over_ranks(share, query, key, value, scale=scale, world_size=world_size, is_causal=is_causal)

    return from_function(attention, share.__name__, declared=Declared(unsupported=not_over_ranks))


healthy, dying, hanging = over(right), over(one_dies), over(one_hangs)
