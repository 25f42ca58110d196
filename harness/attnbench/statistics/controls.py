"""What an A/A control, a second arm with the same code, is good for: a noise floor, and twice the samples of a side."""

from collections.abc import Collection, Sequence

from attnbench.statistics.intervals import Block, Pairs, pairs
from attnbench.storage.records import Sample


def in_blocks_of(arm: Sequence[Sample], samples: Sequence[Sample]) -> list[Sample]:
    """The samples of the blocks in which `arm` took part too."""
    places = {(sample.epoch, sample.visit, sample.block) for sample in arm}
    return [sample for sample in samples if (sample.epoch, sample.visit, sample.block) in places]


def pairs_of_sides(
    candidate: tuple[Sequence[Sample], Sequence[Sample]],
    base: tuple[Sequence[Sample], Sequence[Sample]],
    discarded: Collection[Block] = (),
) -> Pairs:
    """The log ratio of two sides in each block, each side with its samples and those of its A/A control.

    Where both have a control, as in processes of their own, the mean of a side's two logs counts, which scatters less.
    Where the base alone has one it is left out: the sides could not change places, and a bet on their sign be fair.
    """
    (own, own_control), (reference, reference_control) = candidate, base
    if own_control and reference_control:
        own, reference = [*own, *own_control], [*reference, *reference_control]
    return pairs(own, reference, discarded)
