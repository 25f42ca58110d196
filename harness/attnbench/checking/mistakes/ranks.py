"""Mistakes of attention over several ranks: how parts are merged, and where each rank's tokens are."""

import math

import torch
from torch import Tensor

from attnbench.checking import steps
from attnbench.checking.mistakes.scores import has
from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import Condition, hide, is_square, mistake, product
from attnbench.contract import tokens_of
from attnbench.workloads.masks import Causal
from attnbench.workloads.workload import Workload


def shares_out(parts: int = 1) -> Condition:
    """Whether there are several ranks, and a token at least for each of their parts."""
    return lambda workload: workload.world_size > 1 and workload.kv_len >= parts * workload.world_size


def each_rank(workload: Workload) -> dict[str, range]:
    """The tokens of each rank, in one part."""
    named = {str(rank): each for rank in range(workload.world_size) for each in _own(workload, rank)}
    return {f"{rank}, {each.start} to {each.stop - 1}": each for rank, each in named.items()}


def _own(workload: Workload, rank: int) -> list[range]:
    return tokens_of("contiguous", rank, workload.world_size, workload.kv_len)


def all_ranks(workload: Workload) -> dict[str, list[range]]:
    """The tokens of all ranks."""
    return {"": [each for rank in range(workload.world_size) for each in _own(workload, rank)]}


def zigzag(workload: Workload) -> dict[str, Tensor]:
    """The tokens in the order in which zigzag ranks have them."""
    world_size, length = workload.world_size, workload.kv_len
    parts = [each for rank in range(world_size) for each in tokens_of("zigzag", rank, world_size, length)]
    return {"": torch.cat([torch.arange(each.start, each.stop) for each in parts])}


@mistake("masked scores", shares_out(), choices=each_rank)
def keys_of_rank_twice(scores: Tensor, mask: RowMask, choice: range) -> Tensor:
    """The keys of a rank are merged twice: those of rank {choice}."""
    is_among = (choice.start <= mask.keys) & (mask.keys < choice.stop)
    return hide(mask.changed(scores) + math.log(2) * is_among.to(scores.dtype), mask.seen)


@mistake("masked scores", shares_out(), choices=each_rank)
def keys_of_rank_missing(scores: Tensor, mask: RowMask, choice: range) -> Tensor:
    """The keys of a rank never arrive: those of rank {choice}."""
    is_among = (choice.start <= mask.keys) & (mask.keys < choice.stop)
    return hide(mask.changed(scores), mask.seen & ~is_among)


def merged(masked: Tensor, parts: list[range], *, is_mean: bool) -> Tensor:
    """Each rank's own softmax (B, H, R, S), side by side; with `is_mean`, divided by how many take part."""
    made = [masked[..., each.start : each.stop].softmax(dim=-1).nan_to_num(0.0) for each in parts]
    whole = torch.cat(made, dim=-1)
    return whole / whole.sum(dim=-1, keepdim=True).clamp(min=1) if is_mean else whole


@mistake("weights", shares_out(), choices=all_ranks)
def ranks_added_without_logsumexp(masked: Tensor, mask: RowMask, choice: list[range]) -> Tensor:
    """The outputs of the ranks' keys are added up without the correction by their logsumexp."""
    return merged(masked, choice, is_mean=False)


@mistake("weights", shares_out(), choices=all_ranks)
def ranks_averaged_without_logsumexp(masked: Tensor, mask: RowMask, choice: list[range]) -> Tensor:
    """The outputs of the ranks' keys are averaged, without the weights that their logsumexp gives them."""
    return merged(masked, choice, is_mean=True)


def within(positions: Tensor, parts: list[range]) -> tuple[Tensor, Tensor]:
    """The rank that has each token, and the place of the token among its own."""
    starts = torch.tensor([each.start for each in parts], device=positions.device)
    rank = torch.searchsorted(starts, positions, right=True) - 1
    return rank, positions - starts[rank]


@mistake("masked scores", shares_out(parts=2), is_square, has(Causal), choices=all_ranks)
def queries_of_rank_from_zero(scores: Tensor, mask: RowMask, choice: list[range]) -> Tensor:
    """The causal mask takes each rank's queries to begin at token 0, and keys where they are."""
    _, query = within(mask.queries, choice)
    return hide(mask.changed(scores), mask.keys <= query)


@mistake("masked scores", shares_out(parts=2), is_square, has(Causal), choices=all_ranks)
def keys_of_rank_from_zero(scores: Tensor, mask: RowMask, choice: list[range]) -> Tensor:
    """The causal mask takes the keys of each rank to begin at token 0, and queries where they are."""
    _, key = within(mask.keys, choice)
    return hide(mask.changed(scores), key <= mask.queries)


@mistake("masked scores", shares_out(parts=2), is_square, has(Causal), choices=all_ranks)
def every_block_causal(scores: Tensor, mask: RowMask, choice: list[range]) -> Tensor:
    """The causal triangle is laid over every pair of ranks, as if both began at the same token."""
    (_, query), (_, key) = within(mask.queries, choice), within(mask.keys, choice)
    return hide(mask.changed(scores), key <= query)


@mistake("masked scores", shares_out(), is_square, has(Causal), choices=all_ranks)
def later_ranks_not_hidden(scores: Tensor, mask: RowMask, choice: list[range]) -> Tensor:
    """The causal mask holds within a rank alone: the keys of later ranks are seen as those of earlier ones are."""
    (of_query, _), (of_key, _) = within(mask.queries, choice), within(mask.keys, choice)
    return hide(mask.changed(scores), mask.seen | (of_key > of_query))


@mistake("masked scores", shares_out(parts=2), is_square, has(Causal), choices=zigzag)
def zigzag_masked_in_one_part(scores: Tensor, mask: RowMask, choice: Tensor) -> Tensor:
    """The causal mask goes by the places that zigzag ranks give the tokens, and not by the tokens' own."""
    places = choice.argsort().to(mask.keys.device)
    return hide(mask.changed(scores), places <= places[mask.queries])


@mistake("context", shares_out(parts=2), is_square, needs_all_rows=True, choices=zigzag)
def zigzag_not_undone(weights: Tensor, value: Tensor, mask: RowMask, choice: Tensor) -> Tensor:
    """The output is left in the order in which zigzag ranks have the tokens."""
    return product(weights, value)[:, :, choice]


@mistake("heads", shares_out(parts=2), choices=zigzag)
def zigzag_values_in_order(
    query: Tensor, key: Tensor, value: Tensor, mask: RowMask, choice: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys are in the order of zigzag ranks and their values are not, so that each key has the value of another."""
    return steps.heads(query, key, value[:, :, choice], mask)
