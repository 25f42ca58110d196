"""Mistakes of attention over several ranks: wrong merging of parts, and wrong places of each rank's tokens."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from attnbench.checking.mistakes.parts import partial_softmaxes, twice, without
from attnbench.checking.mistakes.permutations import in_order
from attnbench.checking.mistakes.wrong_masks import Seen, showing
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Mistake, after, before, wrong
from attnbench.ranks import tokens_of
from attnbench.workloads.masks import Causal
from attnbench.workloads.workload import Workload


def wrong_ranks(workload: Workload) -> Iterator[Mistake]:
    """Every mistake of ranks, if there are several."""
    world_size, length = workload.world_size, workload.kv_len
    if world_size == 1 or length < world_size:
        return
    parts = [part for rank in range(world_size) for part in tokens_of("contiguous", rank, world_size, length)]
    for rank, keys in enumerate(parts):
        words = f"those of rank {rank}, {keys.start} to {keys.stop - 1}"
        merged, absent = (partial(change, keys=keys) for change in (twice, without))
        yield wrong("keys_of_rank_twice", f"the keys of a rank are merged twice: {words}", masked_scores=merged)
        yield wrong("keys_of_rank_missing", f"the keys of a rank never arrive: {words}", masked_scores=absent)
    for merge in ("added up", "averaged"):
        words = f"the outputs of the ranks' keys are {merge}, without the weights that their logsumexps give them"
        change = partial(partial_softmaxes, lengths=[len(part) for part in parts], merge=merge)
        yield wrong(f"ranks_{merge.split()[0]}_without_logsumexp", words, weights=change)
    if length < 2 * world_size:
        return
    zigzag = [part for rank in range(world_size) for part in tokens_of("zigzag", rank, world_size, length)]
    order = torch.cat([torch.arange(part.start, part.stop) for part in zigzag])
    is_square = workload.seq_len == length
    if is_square and any(type(part) is Causal for part in workload.mask_rule.parts):
        yield from causal_ranks(parts, order.argsort())
    place = in_order(2, order.tolist())
    if is_square:
        words = "the output is left in the order in which zigzag ranks have the tokens"
        yield wrong("zigzag_not_undone", words, "needs_all_rows", context=after("context", place))
    words = "keys are in the order of zigzag ranks and their values are not, so that each key has the value of another"
    yield wrong("zigzag_values_in_order", words, heads=before("heads", place, 2))


def causal_ranks(parts: list[range], places: Tensor) -> Iterator[Mistake]:
    """Causal masks by wrong token positions; `places` are those of the tokens in the order of zigzag ranks."""
    starts = torch.tensor([part.start for part in parts])

    def rank_of(tokens: Tensor) -> Tensor:
        return torch.searchsorted(starts.to(tokens.device), tokens, right=True) - 1

    def inside(tokens: Tensor) -> Tensor:
        return tokens - starts.to(tokens.device)[rank_of(tokens)]

    def zigzag(mask: RowMask) -> Tensor:
        return places.to(mask.keys.device) <= places.to(mask.keys.device)[mask.queries]

    def later(mask: RowMask) -> Tensor:
        return mask.seen | (rank_of(mask.keys) > rank_of(mask.queries))

    def named(name: str, words: str, seen: Seen) -> Mistake:
        return wrong(name, f"the causal mask {words}", masked_scores=partial(showing, seen=seen))

    words = "takes each rank's queries to begin at token 0, and keys where they are"
    yield named("queries_of_rank_from_zero", words, lambda mask: mask.keys <= inside(mask.queries))
    words = "takes the keys of each rank to begin at token 0, and queries where they are"
    yield named("keys_of_rank_from_zero", words, lambda mask: inside(mask.keys) <= mask.queries)
    words = "is laid over every pair of ranks, as if both began at the same token"
    yield named("every_block_causal", words, lambda mask: inside(mask.keys) <= inside(mask.queries))
    words = "holds within a rank alone: keys of later ranks are seen, too"
    yield named("later_ranks_not_hidden", words, later)
    words = "goes by the places that zigzag ranks give the tokens, and not by the tokens' own"
    yield named("zigzag_masked_in_one_part", words, zigzag)
