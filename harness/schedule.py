"""Which workload is visited next: today every live one once a round, in an order drawn anew, until the budget ends.

Spending the budget where doubt is (racing) has its place here.
"""

import random
from collections.abc import Iterator, Sequence

MIN_ROUNDS = 3
"""Fewer visits than this give no interval: the budget may be overdrawn for them."""


def rounds(workloads: Sequence[str], seed: int) -> Iterator[list[str]]:
    """Endless rounds of the workloads, each in an order of its own."""
    draws = random.Random(seed)
    while True:
        yield draws.sample(workloads, len(workloads))


def visit_seed(seed: int, workload: str, number: int) -> int:
    """The seed of a visit's orders: other for each run seed, workload and visit, the same on every machine."""
    return random.Random(f"{seed}/{workload}/{number}").getrandbits(53)
