"""Known mistakes of functions that read a paged cache, by kind: each function in KINDS yields the mistakes of one kind.

A mistake is textbook attention over a batch of requests, with some steps replaced as in mistakes.py. The textbook form
has keys and values in the order of the requests. `Pages` maps them to slots of the page pool, so that code which reads
a wrong slot gets another key, or 0 from an unused slot. Shapes as in the contract; T and S count tokens of all
requests.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnbench.checking.oracle import RowMask
from attnbench.checking.steps import DEFAULTS, Mistake, hide, softmax_with_sinks, wrong
from attnbench.contract import repeat_heads
from attnbench.workloads.batch import SAME, Cache
from attnbench.workloads.workload import Workload

NUM_PARTS, MOST_PARTS = (2, 3, 4), 256
"""Numbers of parts into which a request's keys are split; splits into more than MOST_PARTS parts are left out."""


class Pages:
    """The requests and positions of the queries and keys in a batch, and their layout in the pool.

    `of_query` (T,) and `of_key` (S,) are indices of requests. `query` (T,) and `key` (S,) are positions among all keys
    of a request, and `token` (T,) are positions of queries among the new tokens of a request.
    """

    def __init__(self, cache: Cache) -> None:
        news, totals = (torch.tensor(each) for each in zip(*cache.requests, strict=True))
        number = torch.arange(len(news))
        self.cache, self.totals, self.layout = cache, totals, cache.layout()
        self.of_query, self.of_key = number.repeat_interleave(news), number.repeat_interleave(totals)
        self.key = torch.arange(len(self.of_key)) - (totals.cumsum(0) - totals)[self.of_key]
        token = torch.arange(len(self.of_query)) - (news.cumsum(0) - news)[self.of_query]
        self.token, self.query = token, token + (totals - news)[self.of_query]
        self.page_ends = -(-totals // cache.page_size) * cache.page_size

    def seen(self, mask: RowMask, last: Tensor) -> Tensor:
        """Return whether each query of the mask sees each key (R, S), if `last` (T,) are the last visible positions."""
        return self.between(mask, self.query - self.cache.window + 1 if self.cache.window else 0 * last, last)

    def between(self, mask: RowMask, first: Tensor, last: Tensor) -> Tensor:
        """Return whether each key belongs to the query's request, at a position from `first` to `last` (T,): (R, S)."""
        own, first, last = (each[mask.rows, None] for each in (self.of_query, first, last))
        return (own == self.of_key) & (first <= self.key) & (self.key <= last)

    def read(self, table: Tensor, *, is_swapped: bool = False) -> Tensor:
        """Return for each key (S,) the index of the key that code reads instead with block table `table`.

        The index is -1 for an unused slot. If `is_swapped`, page number and slot change places in the address.
        """
        size, num_pages = self.cache.page_size, self.layout.num_pages
        keys_of = torch.full((num_pages * size,), -1)
        slots = torch.from_numpy(self.layout.slots)
        keys_of[slots] = torch.arange(len(slots))
        pages, inside = table[self.of_key, self.key // size].long(), self.key % size
        flat = inside * num_pages + pages if is_swapped else pages * size + inside
        return keys_of[flat]


def read_elsewhere(sources: Tensor) -> Callable[..., Any]:
    """Create a step `heads` that reads keys and values at the indices `sources` (S,), and zeros where they are -1."""

    def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Any:  # noqa: ANN401 - as the step
        moved = (each[:, :, sources].where((sources >= 0)[:, None], 0.0) for each in (key, value))
        return DEFAULTS["heads"](query, *moved, mask)

    return heads


def lengths(pages: Pages) -> Iterator[Mistake]:
    """Yield mistakes that read keys beyond a request's end, or omit its last key; some also shift its queries."""
    whole = pages.page_ends - pages.totals
    ones = torch.ones_like(whole)
    for name, more in (("last_page_whole", whole), ("one_key_more", ones), ("one_key_less", -ones)):
        of_query = more[pages.of_query]
        end = pages.totals[pages.of_query] - 1
        for is_moved in (True, False):
            last = pages.query + of_query if is_moved else torch.minimum(pages.query, end + of_query)
            extra = (last - end).clamp(min=0) if is_moved else of_query.clamp(min=0)  # number of extra keys that are 0

            def scored(scores: Tensor, mask: RowMask, last: Tensor = last) -> Tensor:
                return hide(mask.changed(scores), pages.seen(mask, last))

            def weighed(scores: Tensor, mask: RowMask, extra: Tensor = extra) -> Tensor:
                return softmax_with_sinks(scores, extra[mask.rows, None].double().log()).nan_to_num(0.0)

            yield wrong(name, masked_scores=scored, weights=weighed)


def tables(pages: Pages) -> Iterator[Mistake]:
    """Yield mistakes that read the block table wrongly, or ignore it."""
    table = torch.from_numpy(pages.layout.block_table)
    first = table[:, :1].expand_as(table)
    counts = torch.tensor(pages.cache.num_pages)
    in_order = (counts.cumsum(0) - counts)[:, None] + torch.arange(table.shape[1])
    yield wrong("page_and_slot_swapped", heads=read_elsewhere(pages.read(table, is_swapped=True)))
    last = pages.layout.num_pages - 1
    for detail, other in (
        ("that of the next request", table.roll(-1, 0)),
        ("that of the request before", table.roll(1, 0)),
        ("that of the first request", table[:1].expand_as(table)),
        ("its first page for all of a request", first),
        ("the order of pages in the pool", in_order.clamp(max=last)),
        ("the number of the page in the request", torch.arange(table.shape[1]).expand_as(table).clamp(max=last)),
    ):
        yield wrong("another_block_table", detail, heads=read_elsewhere(pages.read(other)))


def alignments(pages: Pages) -> Iterator[Mistake]:
    """Yield mistakes in which new tokens see wrong keys, keys of other requests, or no keys of the shared prefix."""
    ends = pages.totals[pages.of_query] - 1
    for name, last in (("chunk_at_the_start", pages.token), ("new_tokens_not_causal", ends)):

        def scored(scores: Tensor, mask: RowMask, last: Tensor = last) -> Tensor:
            return hide(mask.changed(scores), pages.seen(mask, last))

        yield wrong(name, masked_scores=scored)

    def every(scores: Tensor, mask: RowMask) -> Tensor:
        seen = pages.seen(mask, pages.query) | (pages.of_key < pages.of_query[mask.rows, None])
        return hide(mask.changed(scores), seen)

    yield wrong("requests_not_separated", masked_scores=every)
    for owner in (0, len(pages.totals) - 1) if pages.cache.shared_prefix else ():

        def unshared(scores: Tensor, mask: RowMask, owner: int = owner) -> Tensor:
            is_own = (pages.of_key == owner) | (pages.key >= pages.cache.shared_prefix)
            return hide(mask.changed(scores), pages.seen(mask, pages.query) & is_own)

        yield wrong("shared_page_of_one", masked_scores=unshared)


def windows(pages: Pages) -> Iterator[Mistake]:
    """Yield mistakes in which the sliding window of a query begins at a wrong key."""
    window, page = pages.cache.window, pages.cache.page_size
    if not window:
        return
    right = pages.query - window + 1
    for detail, first in (
        ("at the first key", 0 * right),
        ("one key early", right - 1),
        ("one key late", right + 1),
        ("at the beginning of its first page", right // page * page),
        ("at its first whole page", -(-right // page) * page),
    ):

        def scored(scores: Tensor, mask: RowMask, first: Tensor = first) -> Tensor:
            return hide(mask.changed(scores), pages.between(mask, first, pages.query))

        yield wrong("window_begins_elsewhere", detail, masked_scores=scored)


def scales(pages: Pages) -> Iterator[Mistake]:
    """Yield mistakes that mix up the scales of 8-bit keys and values, leave them out, or apply them twice."""
    cache = pages.cache
    if cache.dtype == SAME:
        return
    right = {name: np.asarray(cache.scales(name)) for name in ("key", "value")}

    def scaled(of_key: Any, of_value: Any) -> Callable[..., Any]:  # noqa: ANN401 - arrays or numbers
        def heads(query: Tensor, key: Tensor, value: Tensor, mask: RowMask) -> Any:  # noqa: ANN401 - as the step
            factors = (
                torch.as_tensor(np.broadcast_to(each, len(right["key"])).copy()).to(key) for each in (of_key, of_value)
            )
            key, value = (each * factor[:, None, None] for each, factor in zip((key, value), factors, strict=True))
            return DEFAULTS["heads"](query, key, value, mask)

        return heads

    of_key, of_value = right["key"], right["value"]
    yield wrong("scales_swapped", "k_scale is used for the values", heads=scaled(1.0, of_key / of_value))
    yield wrong("scales_swapped", "v_scale is used for the keys", heads=scaled(of_value / of_key, 1.0))
    yield wrong(
        "scales_swapped", "k_scale and v_scale change places", heads=scaled(of_value / of_key, of_key / of_value)
    )
    for detail, power in (("left out", -1), ("applied twice", 1)):
        for what, powers in (("keys", (power, 0)), ("values", (0, power)), ("keys and values", (power, power))):
            factors = (own**number for own, number in zip((of_key, of_value), powers, strict=True))
            yield wrong("scales_left_out_or_twice", f"those of the {what} are {detail}", heads=scaled(*factors))
    if len(of_key) > 1:
        others: dict[str, Any] = {
            "the first head's for all": [0] * len(of_key),
            "the next head's": np.roll(np.arange(len(of_key)), -1),
        }
        for detail, index in others.items():
            yield wrong(
                "scales_of_other_heads", detail, heads=scaled(of_key[index] / of_key, of_value[index] / of_value)
            )
        yield from _by_query_head(of_key, of_value)


def _by_query_head(of_key: Any, of_value: Any) -> Iterator[Mistake]:  # noqa: ANN401 - arrays
    """Yield the mistake that query head h uses the dequantization scales of key/value head h % G.

    The right head is h // (H / G): the code treats the groups of query heads as if they were interleaved.
    """

    def heads(query: Tensor, key: Tensor, value: Tensor, _: RowMask) -> tuple[Tensor, ...]:
        num_heads = query.shape[1]
        index = np.arange(num_heads)
        group, found = index // (num_heads // len(of_key)), list[Tensor]()
        for tensor, own in ((key, of_key), (value, of_value)):
            factor = torch.from_numpy(own[index % len(own)] / own[group]).to(tensor)
            found.append(repeat_heads(tensor, num_heads) * factor[:, None, None])
        return query, *found

    yield wrong("scales_of_other_heads", "repeated head after head along the query heads", heads=heads)


def merges(pages: Pages) -> Iterator[Mistake]:
    """Yield mistakes that average the softmaxes of parts of a request's keys, without weights from the logsumexp."""

    def merged(number_of: Tensor, scores: Tensor, _: RowMask) -> Tensor:
        parts = [scores.where(number_of == part, -math.inf) for part in range(int(number_of.max()) + 1)]
        added = torch.stack([part.softmax(dim=-1).nan_to_num(0.0) for part in parts]).sum(dim=0)
        return added / added.sum(dim=-1, keepdim=True).clamp(min=1)

    sizes, page = pages.totals[pages.of_key], pages.cache.page_size
    splits = {f"in {number} parts": pages.key * number // sizes for number in NUM_PARTS}
    for number in NUM_PARTS:
        num_pages = (sizes + page - 1) // page
        of_pages = (num_pages + number - 1) // number
        splits[f"in {number} parts of whole pages"] = pages.key // page // of_pages
    splits["page by page"] = pages.key // page
    if pages.cache.shared_prefix:
        splits["the shared prefix and the rest"] = (pages.key >= pages.cache.shared_prefix).long()
    for detail, number_of in splits.items():
        if number_of.max() >= MOST_PARTS:
            continue
        yield wrong("merged_without_logsumexp", detail, weights=partial(merged, number_of))


KINDS = (lengths, tables, alignments, windows, scales, merges)


def page_mistakes(workload: Workload) -> Iterator[Mistake]:
    """Yield every mistake about pages that is possible at this workload."""
    if workload.page_size and workload.cache is not None:
        pages = Pages(workload.cache)
        for generator in KINDS:
            yield from generator(pages)
