"""Masks without a pattern, drawn from a seed: any boolean mask, any additive bias.

A draw is a function of the place alone, so that a tile needs no dense form and a longer mask begins as a shorter one.
"""

from typing import Any

from attnbench.workloads.masks.rule import Array, Mask, Table

LOW_31 = 2**31 - 1
PERCENT = 100
STEPS = 128
"""An additive bias has one of so many values, STEP apart: few enough bits to be the same number in every dtype."""
STEP = 1 / 16


def drawn(first: Any, second: Any, third: Any, seed: int) -> Any:  # noqa: ANN401 - numpy arrays or torch tensors
    """A whole number from 0 to 2^31 - 1 for each triple of whole numbers, elementwise.

    After each of the three, multiply and shift, as in the final mix of MurmurHash3
    (https://github.com/aappleby/smhasher/wiki/MurmurHash3); no product reaches 2^62.
    """
    mixed: Any = seed
    for number in (first, second, third):
        mixed = (mixed * 0x2C1B3C6D + number + 1) & LOW_31
        mixed = ((mixed ^ (mixed >> 15)) * 0x297A2D39) & LOW_31
        mixed = mixed ^ (mixed >> 13)
    return mixed


class Boolean(Mask):
    """An arbitrary boolean mask: in each batch row a query sees its own place, and a share of the other keys."""

    name = "boolean"
    summary = "each query sees about p percent of the keys, drawn for each batch row, and always key i mod S"
    usage = "boolean(p) or boolean(p,seed), p from 0 to 100"
    num_arguments = (1, 2)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:  # noqa: ARG002
        """A share is no more than all."""
        if self.arguments[0] > PERCENT:
            raise ValueError(f"mask={self} is not allowed: write it as {self.usage}")

    def table(self, batch_size: int, query_len: int, key_len: int) -> int:  # noqa: ARG002
        """S, which `sees` takes a query's own place from."""
        return key_len

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """As it was drawn, or its own place."""
        percent, seed = (*self.arguments, 0)[:2]
        return (drawn(batch, query, key, seed) % PERCENT < percent) | (key == query % table)


class Additive(Mask):
    """An arbitrary additive bias for each head, the same in every batch row, as learned relative positions are."""

    name = "additive"
    summary = "adds a number from -4 to 4, drawn for each head, query and key, to the score"
    usage = "additive or additive(seed)"
    num_arguments = (0, 1)
    changes_scores = True

    def bias(self, per_head: Any, query: Array, key: Array, offset: int) -> Any:  # noqa: ANN401, ARG002
        """The number that was drawn there; `per_head` is the head's index."""
        return (drawn(per_head, query, key, sum(self.arguments)) % STEPS - STEPS // 2) * STEP
