"""Mistakes of attention over several ranks: wrong merging of parts, and wrong places of each rank's tokens."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.parts import partial_softmaxes, twice, without
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, hide, product, wrong
from attnbench.ranks import tokens_of
from attnbench.workloads.masks import Causal
from attnbench.workloads.workload import Workload


def within(positions: Tensor, parts: list[range]) -> tuple[Tensor, Tensor]:
    """The rank of each token, and the token's place in that rank."""
    starts = torch.tensor([part.start for part in parts], device=positions.device)
    rank = torch.searchsorted(starts, positions, right=True) - 1
    return rank, positions - starts[rank]


def wrong_ranks(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of ranks, if there are several."""
    world_size, length = workload.world_size, workload.kv_len
    if world_size == 1 or length < world_size:
        return
    parts = [part for rank in range(world_size) for part in tokens_of("contiguous", rank, world_size, length)]
    for rank, keys in enumerate(parts):
        words = f"the keys of a rank are merged twice: those of rank {rank}, {keys.start} to {keys.stop - 1}"
        yield wrong("keys_of_rank_twice", words, masked_scores=partial(twice, keys=keys))
        words = f"the keys of a rank never arrive: those of rank {rank}, {keys.start} to {keys.stop - 1}"
        yield wrong("keys_of_rank_missing", words, masked_scores=partial(without, keys=keys))
    for merge, name in (
        ("added up", "ranks_added_without_logsumexp"),
        ("averaged", "ranks_averaged_without_logsumexp"),
    ):
        words = f"the outputs of the ranks' keys are {merge}, without the weights that their logsumexps give them"
        change = partial(partial_softmaxes, lengths=[len(part) for part in parts], merge=merge)
        yield wrong(name, words, weights=change)
    if length < 2 * world_size:
        return
    zigzag = [part for rank in range(world_size) for part in tokens_of("zigzag", rank, world_size, length)]
    order = torch.cat([torch.arange(part.start, part.stop) for part in zigzag])
    is_square = workload.seq_len == length
    if is_square and any(type(part) is Causal for part in workload.mask_rule.parts):
        yield from causal_ranks(parts, order)
    if is_square:
        words = "the output is left in the order in which zigzag ranks have the tokens"
        unsorted = lambda weights, value, _: product(weights, value)[:, :, order]  # noqa: E731
        yield wrong("zigzag_not_undone", words, "needs_all_rows", context=unsorted)
    words = "keys are in the order of zigzag ranks and their values are not, so that each key has the value of another"
    misplaced = lambda query, key, value, mask: steps.heads(query, key, value[:, :, order], mask)  # noqa: E731
    yield wrong("zigzag_values_in_order", words, heads=misplaced)


def causal_ranks(parts: list[range], order: Tensor) -> Iterator[Mistake]:
    """Causal masks by wrong token positions."""

    def seen(name: str, mask: RowMask) -> Tensor:
        (of_query, query), (of_key, key) = within(mask.queries, parts), within(mask.keys, parts)
        places = order.argsort().to(mask.keys.device)
        ways = {
            "queries_of_rank_from_zero": mask.keys <= query,
            "keys_of_rank_from_zero": key <= mask.queries,
            "every_block_causal": key <= query,
            "later_ranks_not_hidden": mask.seen | (of_key > of_query),
            "zigzag_masked_in_one_part": places <= places[mask.queries],
        }
        return ways[name]

    words = {
        "queries_of_rank_from_zero": "takes each rank's queries to begin at token 0, and keys where they are",
        "keys_of_rank_from_zero": "takes the keys of each rank to begin at token 0, and queries where they are",
        "every_block_causal": "is laid over every pair of ranks, as if both began at the same token",
        "later_ranks_not_hidden": "holds within a rank alone: keys of later ranks are seen, too",
        "zigzag_masked_in_one_part": "goes by the places that zigzag ranks give the tokens, and not by the tokens' own",
    }
    for name, what in words.items():

        def masked(scores: Tensor, mask: RowMask, name: str) -> Tensor:
            return hide(mask.changed(scores), seen(name, mask))

        yield wrong(name, f"the causal mask {what}", masked_scores=partial(masked, name=name))
