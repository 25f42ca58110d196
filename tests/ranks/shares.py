"""Functions for ranks in tests: one sleeps, one fails, one returns its input."""

import time

import torch

from attnbench.ranks.group import Asked
from attnbench.ranks.rank import Rank


def sleep(query, key, value, rank):
    if rank.rank == 1:
        time.sleep(1000)
    return query


def fail(query, key, value, rank):
    """Raise on one rank, while the other waits for it."""
    if rank.rank == 1:
        raise ValueError("no head for this")
    return rank.pass_on([query], rank.num_tokens(1))()[0]


def give_back(query, key, value, rank):
    return query


def give_late(query, key, value, rank):
    time.sleep(0.3)
    return query


def asked(function, **details):
    named = {"module": __name__, "function": function.__name__, "file": __file__}
    return Asked(**named, rank=Rank(length=8, **details), keeps_graph=False)


def three():
    return [torch.randn(1, 2, 8, 4) for _ in range(3)]
