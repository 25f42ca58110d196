"""Batches of requests as inference services run them, and the paged cache that holds their keys. Does not import torch.

A request has new tokens and keys. Its last keys are those of the new tokens, so its queries are causal and aligned at
the end (bottom-right). All requests are joined end to end in one batch row of T query tokens and S keys.

Source of the notation: https://github.com/vllm-project/vllm/tree/main/benchmarks/attention_benchmarks, README
"""

import functools
import itertools
import math
import re
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from attnbench.workloads.masks import LARGEST, Array, Mask, Span, Table

NO_BATCH = "none"
SAME = "same"  # the dtype of the call
CACHE_DTYPES = (SAME, "float8_e4m3fn", "float8_e5m2")
CACHE_SCALES = PER_HEAD, PER_TENSOR = ("per_head", "per_tensor")
LARGEST_FLOAT8 = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}  # largest finite number of each dtype
SCALES = (0.125, 0.4375, 0.3125, 0.21875, 0.09375)
"""Scales of float8 caches: all different, and with few digits, so that scaled numbers are exact in half precision."""
EXAMPLE = "as in 2q2k_32q1kv1k, which is 2 prefills of 2048 tokens and 32 decodes against 1024 keys"
_REQUESTS = re.compile(r"(?:(\d+)x?)?q(\d+)(k?)(?:(?:kv|s)(\d+)(k?))?")
KILO = 1024


class Request(NamedTuple):
    """A request: its number of new tokens, and its number of keys, those of the new tokens included."""

    new: int
    total: int


@functools.lru_cache(maxsize=4096)
def parse_batch(text: str) -> tuple[Request, ...]:
    """Parse `[count]q<new tokens>[k][kv<keys>[k]]`, or several joined by _; `none` gives no request.

    A `k` after a number multiplies it by 1,024. `s` is an older spelling of `kv`.

    Raises:
        ValueError: `text` cannot be parsed, has too many requests or no new token, or gives a request fewer keys than
            new tokens.
    """
    requests: list[Request] = []
    if text == NO_BATCH:
        return ()
    for part in text.strip().lower().split("_"):
        match = _REQUESTS.fullmatch(part)
        if match is None:
            where = "" if part == text else f" (its part {part or 'before or after a _, which is empty'})"
            raise ValueError(
                f"batch={text} is not allowed{where}: write [count]q<new tokens>[kv<keys>], joined by _, {EXAMPLE}"
            )
        count, new, new_k, total, total_k = match.groups()
        num_new = int(new) * (KILO if new_k else 1)
        num_keys = num_new if total is None else int(total) * (KILO if total_k else 1)
        if num_keys < num_new:
            raise ValueError(
                f"batch={text} is not allowed: {part} has {num_new} new tokens and {num_keys} keys, but the keys "
                f"include those of the new tokens; give kv{num_new} or more"
            )
        if len(requests) + int(count or 1) > LARGEST // KILO:
            raise ValueError(f"batch={text} is not allowed: it has more than {LARGEST // KILO} requests; give fewer")
        requests += [Request(num_new, num_keys)] * int(count or 1)
    if not any(each.new for each in requests):
        raise ValueError(f"batch={text} is not allowed: no request has a new token; give at least one q1")
    return tuple(requests)


def written(requests: tuple[Request, ...]) -> str:
    """Return the shortest text that `parse_batch` parses to these requests."""
    parts = []
    for request, same in itertools.groupby(requests):
        new, total = (f"{each // KILO}k" if each and each % KILO == 0 else str(each) for each in request)
        count = len([*same])
        parts.append(f"{count if count > 1 else ''}q{new}" + (f"kv{total}" if total != new else ""))
    return "_".join(parts)


def at_longest(requests: tuple[Request, ...], longest: int) -> tuple[Request, ...]:
    """Scale all requests so that the longest has `longest` keys; token and key counts above 0 stay at least 1."""
    factor = longest / max(each.total for each in requests)
    totals = [max(min(1, each.total), round(factor * each.total)) for each in requests]
    news = [max(min(1, each.new), round(factor * each.new)) for each in requests]
    return tuple(Request(min(new, total), total) for new, total in zip(news, totals, strict=True))


class Requests(Mask):
    """Each query sees the keys of its own request up to that of its own token; a request's last query sees all of them.

    With a `window` above 0, a query sees only the last `window` of these keys.
    """

    name = ""  # no name: users cannot select it as `mask`; it is built from the axis `batch`

    def __init__(self, requests: tuple[Request, ...], window: int = 0) -> None:
        super().__init__()
        self.requests, self.window = requests, window

    def __str__(self) -> str:
        return f"of the requests {written(self.requests)}" + f" in windows of {self.window} keys" * bool(self.window)

    def table(self, batch_size: int, query_len: int, key_len: int) -> Table:  # noqa: ARG002 - as in Mask
        """Return, for each query, the index of its request's first key, and that of its own token's key, each (T,)."""
        news, totals = (np.asarray(each, dtype=np.int64) for each in zip(*self.requests, strict=True))
        ends, offsets = np.cumsum(totals), np.arange(query_len) - np.repeat(np.cumsum(news), news)
        return np.repeat(ends - totals, news), np.repeat(ends, news) + offsets

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:  # noqa: ARG002 - as in Mask
        """Return the indices of the first key that a query sees, and of the key of its own token, elementwise."""
        first, last = table[0][query], table[1][query]
        before = (last - self.window + 1 - first) * bool(self.window)
        return first + before * (before > 0), last


@functools.lru_cache(maxsize=256)
def rule_of(batch: str, window: int = 0) -> Requests:
    """Return the mask of a batch of requests; equal arguments give the same object, so its bound mask is cached."""
    return Requests(parse_batch(batch), window)


class Cache(msgspec.Struct, frozen=True, kw_only=True):
    """The memory layout of a batch's keys and values: pages of a pool, in a random order that `seed` determines.

    `page_size` is in tokens; 0 means no pages. `num_heads` is the number G of key/value heads. `shared_prefix` is the
    number of first tokens that all requests share. A query sees the last `window` keys up to its own; 0 means all. In 8
    bits, keys and values each have one scale per head, or a single one with `has_one_scale`.

    `form` changes only details that no result may depend on. By default, unused slots and pages contain NaN; with
    "zeros", they contain 0. With "moved", pages have another order. With "strided", the pools of keys and values are
    views of one buffer, in which their pages alternate.
    """

    batch: str
    page_size: int
    num_heads: int
    shared_prefix: int = 0
    dtype: str = SAME
    seed: int = 0
    form: str = ""
    window: int = 0
    has_one_scale: bool = False

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests, in order."""
        return parse_batch(self.batch)

    @property
    def num_pages(self) -> list[int]:
        """The number of pages of each request, shared pages included."""
        return [-(-each.total // self.page_size) for each in self.requests]

    @property
    def num_own_pages(self) -> list[int]:
        """The number of pages of each request, without shared pages."""
        return [max(0, count - self.shared_prefix // self.page_size) for count in self.num_pages]

    @property
    def num_slots(self) -> int:
        """The number of token slots that the batch occupies; pages count in full, and those of a shared prefix once."""
        if not self.page_size:
            return sum(each.total for each in self.requests)
        return self.shared_prefix + sum(self.num_own_pages) * self.page_size

    def layout(self) -> "Layout":
        """Assign each key to a slot; the pages are in random order, and some stay unused."""
        draws = np.random.default_rng((self.seed, self.form == "moved"))
        shared, own = self.shared_prefix // self.page_size, self.num_own_pages
        num_used = shared + sum(own)
        num_unused = 2 + num_used // 8
        order = draws.permutation(num_used + num_unused).astype(np.int32)
        used, unused = order[:num_used], order[num_used:]
        table = draws.choice(unused, size=(len(own), max(1, max(self.num_pages) + 1)))
        starts, places = np.cumsum([shared, *own]), []
        for row, (request, count) in enumerate(zip(self.requests, own, strict=True)):
            pages = np.concatenate([used[: min(shared, self.num_pages[row])], used[starts[row] : starts[row] + count]])
            table[row, : len(pages)] = pages
            slots = np.arange(request.total)
            places.append(pages[slots // self.page_size].astype(np.int64) * self.page_size + slots % self.page_size)
        return Layout(len(order), table.astype(np.int32), np.concatenate(places))

    def sources(self) -> npt.NDArray[np.int64]:
        """Return, for each key (S,), the index of the key that it is a copy of.

        In a shared prefix, that is a key of the first request with keys; elsewhere it is the key itself.
        """
        totals = [each.total for each in self.requests]
        starts = np.cumsum([0, *totals[:-1]])
        first = int(starts[int(np.argmax(np.asarray(totals) > 0))])
        slots = [np.arange(total) for total in totals]
        return np.concatenate(
            [
                np.where(each < self.shared_prefix, first + each, start + each)
                for start, each in zip(starts, slots, strict=True)
            ]
        )

    def scales(self, name: str) -> list[float]:
        """Return the scales of stored keys or values: G numbers, or one with `has_one_scale`; all are 1 without float8.

        `name` is "key" or "value".
        """
        count = 1 if self.has_one_scale else self.num_heads
        if self.dtype == SAME:
            return [1.0] * count
        first = self.seed + 2 * (name == "value")
        return [SCALES[(first + head) % len(SCALES)] for head in range(count)]

    @property
    def num_keys(self) -> int:
        """The number of distinct keys that at least one query sees; keys of a shared prefix count once."""
        news, totals = (np.array(each) for each in zip(*self.requests, strict=True))
        ends = np.cumsum(totals)
        seen = np.minimum(totals, news + self.window - 1) if self.window else totals
        of_queries = [np.arange(end - count, end) for end, count in zip(ends, np.where(news, seen, 0), strict=True)]
        return len(np.unique(self.sources()[np.concatenate(of_queries)]))


class Layout(NamedTuple):
    """The number of pages in the pool, the block table of N requests, and each key's slot in the pool (S,).

    The block table is (N, largest number of pages of a request + 1); its spare entries are numbers of unused pages.
    """

    num_pages: int
    block_table: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int64]


def is_power_of_2(number: int) -> bool:
    """Return whether a number is 1, 2, 4, ..."""
    return number > 0 and math.log2(number).is_integer()
