"""What a second arm with the same code is good for: a noise floor, and twice the samples of a side."""

from collections.abc import Collection, Sequence

from attnbench.statistics.intervals import Block, Pairs, pairs
from attnbench.storage.records import Sample


def beside(samples: Sequence[Sample], arm: Sequence[Sample]) -> list[Sample]:
    """The samples of the blocks in which `arm` took part too."""
    places = {(sample.epoch, sample.visit, sample.block) for sample in arm}
    return [sample for sample in samples if (sample.epoch, sample.visit, sample.block) in places]


def of_sides(
    candidate: tuple[Sequence[Sample], Sequence[Sample]],
    base: tuple[Sequence[Sample], Sequence[Sample]],
    void: Collection[Block] = (),
) -> Pairs:
    """The log ratio of two sides in each block, each side with its samples and those of its twin.

    Where both have a twin, as in processes of their own, the mean of a side's two logs counts, which scatters less.
    Where the base alone has one it is left out: the sides could not change places, and a bet on their sign be fair.
    """
    (own, own_twin), (reference, reference_twin) = candidate, base
    if own_twin and reference_twin:
        own, reference = [*own, *own_twin], [*reference, *reference_twin]
    return pairs(own, reference, void)
