"""Masks: visible keys of each query, score changes, and exact counts of visible pairs. Does not import torch.

A mask is one class. Its rules (methods such as `sees` and `bias`) use only operators that numpy arrays and torch
tensors share, so one line gives the dense mask, a single tile and the predicate of a compiled kernel
(docs/adr/0002-mask-is-a-rule.md).

If T and S differ, a query's position may be counted from the start (top-left, as in `is_causal` of
scaled_dot_product_attention) or from the end (bottom-right, as in decoding with a cache): see `Mask.is_at_end`.
From the mask NAME, `at_end` creates NAME_bottom_right, which counts from the end.
"""

import functools
import math
import operator
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from attnbench.units import did_you_mean

LARGEST = 2**31  # largest length, count or argument of a mask
COUNTED_AT_ONCE = 2**24  # most elements of a dense mask that are created at once, to limit memory

Array = Any  # an operand in a mask's methods: a numpy array or a torch tensor, used through operators that both have
Table = Any
"""The lookup table of a mask: a numpy array or torch tensor of integers, a number, None, or a tuple of such tables."""
Span = tuple[Array | None, Array | None]
"""The first and the last visible key of a query; None means no limit on that side."""
Numbers = npt.NDArray[np.int64]


class Mask:
    """The mask `none`: every key is visible and keeps its score. Base class of all other masks.

    A mask that hides keys overrides `span`. If a query's visible keys are not contiguous, `span` returns None, and the
    mask overrides `sees`, too. A mask that changes scores sets `changes_scores` and overrides `bias` or `transform`. A
    mask with a learned bias also sets `is_learned` and overrides `parameters`, `index` and `looked_up`. In all methods,
    `batch_size` is B, `query_len` is T and `key_len` is S.
    """

    name: str = "none"
    summary: str = "every key is visible"  # in a subclass, by default the first line of its docstring
    usage: ClassVar[str] = "none"  # how users write the mask; in a subclass, by default its name
    num_arguments: ClassVar[tuple[int, int]] = (0, 0)  # fewest and most arguments
    argument_range: ClassVar[tuple[int, int]] = (0, LARGEST)  # smallest and largest value of an argument
    changes_scores: bool = False
    is_additive: bool = True  # False: the change depends on the score, so no bias can express it
    is_learned: bool = False  # the mask adds numbers from tensors that are inputs of the call
    is_at_end: bool = False  # a query's position is counted from the end
    has_lengths: bool = False  # its arguments are lengths, which fit only some sizes

    def __init_subclass__(cls) -> None:
        own = vars(cls)
        first = (cls.__doc__ or "").partition("\n")[0].rstrip(".")
        cls.summary = own.get("summary") or first[:1].lower() + first[1:]
        cls.usage = own.get("usage") or own.get("name", "")

    def __init__(self, *arguments: int) -> None:
        """Store the mask's arguments, such as 64 and 0 of `window(64,0)`.

        Raises:
            ValueError: too few or too many arguments, or one out of range.
        """
        self.arguments = arguments
        (fewest, most), (lowest, highest) = self.num_arguments, self.argument_range
        self.require(fewest <= len(arguments) <= most and all(lowest <= number <= highest for number in arguments))

    def __str__(self) -> str:
        """Return the text that `parse_mask` parses to this mask."""
        return f"{self.name}({','.join(map(str, self.arguments))})" if self.arguments else self.name

    @property
    def parts(self) -> "tuple[Mask, ...]":
        """The masks that this one combines; for a simple mask, only itself."""
        return (self,)

    @property
    def without_causal(self) -> "Mask | None":
        """The mask of all parts that hide keys, except `causal` (top-left); None if no other part hides keys."""
        others = [part for part in self.parts if part.hides and not isinstance(part, Causal)]
        return Combined(*others) if len(others) > 1 else next(iter(others), None)

    @property
    def hides(self) -> bool:
        """Whether the mask may hide keys: true if its class overrides `span`."""
        return type(self).span is not Mask.span

    @property
    def changes(self) -> "tuple[Mask, ...]":
        """The parts that change scores, in order of application."""
        return tuple(part for part in self.parts if part.changes_scores)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        """Raise ValueError if the arguments do not fit the sizes."""

    def require(self, holds: bool, **sizes: int) -> None:  # noqa: FBT001 - as `assert` takes it
        """Raise ValueError unless `holds` is true; the message includes the `sizes`."""
        if not holds:
            given = " with " + ", ".join(f"{name}={size}" for name, size in sizes.items()) if sizes else ""
            raise ValueError(f"mask={self}{given} is not allowed: write it as {self.usage}")

    def place(self, query: Array, offset: int) -> Array:
        """Return the position of `query` among the keys, counted from the end if `is_at_end`; `offset` is S - T."""
        return query + offset if self.is_at_end else query

    def table(self, batch_size: int, query_len: int, key_len: int) -> Table:
        """Return the lookup table that `span` and `sees` get; None if they need none."""
        return None

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span | None:
        """Return the first and last key that `query` sees in batch row `batch`, elementwise; `offset` is S - T.

        An end is None if there is no limit on that side. `table` is the result of the method `table`. Return None
        instead of a pair if the visible keys are not contiguous; `sees` then decides for each key.
        """
        return None, None

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Array:
        """Return whether `query` sees `key` in batch row `batch`, elementwise; by default, whether it is in `span`."""
        span = self.span(batch, query, table, offset)
        assert span is not None
        first, last = span
        seen = key <= (key if last is None else last)
        return seen if first is None else seen & (first <= key)

    def per_head(self, num_heads: int) -> npt.NDArray[Any]:
        """Return, for each head, the number that `bias` gets (H,); by default, it is the head's index."""
        return np.arange(num_heads)

    def bias(self, per_head: Array, query: Array, key: Array, offset: int) -> Array:
        """Return the number that an additive mask adds to the score of `query` and `key`, elementwise.

        It is the same in every batch row. `per_head` is the head's number from the method `per_head`, and `offset` is
        S - T. Hidden keys get the score -inf after all changes.
        """
        return key * 0.0

    def parameters(self, sizes: tuple[int, int, int], num_heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a learned bias, by name, at sizes (B, T, S)."""
        return {}

    def index(self, query: Array, key: Array, offset: int, key_len: int) -> tuple[Array, ...]:
        """Return the indices that follow the head's index in a learned bias's table, elementwise; `offset` is S - T."""
        return ()

    def looked_up(self, tables: Mapping[str, Array], places: tuple[Array, Array, Array], index: Array) -> Array:
        """Return the numbers that a learned bias adds to scores, read from its tensors `tables` at `index`.

        `places` are the indices of batch row, head and query, which broadcast with each other and with `index`.
        """
        return 0.0

    def transform(self, score: Array) -> Array:
        """Return the score (a torch tensor) as changed by a mask that is not additive, elementwise."""
        return score

    def seen_keys(self, batch_size: int, query_len: int, key_len: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return each query's first visible key, last visible key and number of visible keys, each (B, T).

        For a query that sees no key, they are 0, S - 1 and 0.
        """
        sizes, end = (batch_size, query_len, key_len), key_len - 1
        rows, queries = np.arange(batch_size)[:, None], np.arange(query_len)
        span = self.span(rows, queries, self.table(*sizes), key_len - query_len)
        if span is not None:
            first, last = (default if each is None else each for each, default in zip(span, (0, end), strict=True))
            first, last, _ = np.broadcast_arrays(np.maximum(first, 0), np.minimum(last, end), rows + queries)
            number = np.maximum(last - first + 1, 0)
        else:
            block, parts = max(1, COUNTED_AT_ONCE // (batch_size * key_len)), []
            for at in range(0, query_len, block):  # one block after another, to limit memory
                seen = self.dense(*sizes, rows=queries[at : at + block])
                parts.append((seen.argmax(-1), end - seen[..., ::-1].argmax(-1), seen.sum(-1, dtype=np.int64)))
            first, last, number = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        return np.where(number > 0, first, 0), np.where(number > 0, last, end), number

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """Return the exact number of visible (batch row, query, key) triples of one head."""
        return int(self.seen_keys(batch_size, query_len, key_len)[-1].sum())

    def has_empty_rows(self, batch_size: int, query_len: int, key_len: int) -> bool:
        """Return whether some query sees no key."""
        return bool((self.seen_keys(batch_size, query_len, key_len)[-1] == 0).any())

    def at_other_length(self) -> "Mask":
        """Return the mask for other sizes: without its arguments if they are lengths, or else unchanged."""
        return type(self)() if self.has_lengths else self

    def dense(
        self, batch_size: int, query_len: int, key_len: int, rows: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.bool_]:
        """Return the mask (B, T, S), True where a key is visible; with `rows` (R,), only these queries: (B, R, S)."""
        chosen = np.arange(query_len) if rows is None else rows
        batch = np.arange(batch_size)[:, None, None]
        query = chosen[None, :, None]
        key = np.arange(key_len)[None, None, :]
        table = self.table(batch_size, query_len, key_len)
        seen = self.sees(batch, query, key, table, key_len - query_len)
        return np.broadcast_to(seen, (batch_size, len(chosen), key_len))


AT_END = "_bottom_right"


def at_end(kind: type[Mask]) -> type[Mask]:
    """Create the mask NAME_bottom_right from the mask NAME: the last query has the position of the last key.

    If T > S, the first T - S queries may see no key.
    """
    name = f"{kind.name}{AT_END}"
    changed = {
        "name": name,
        "summary": f"as {kind.name}, with i+S-T in place of i: aligned at the end (bottom-right)",
        "usage": kind.usage.replace(kind.name, name, 1),
        "is_at_end": True,
    }
    body = {key: value for key, value in vars(kind).items() if key not in {"__dict__", "__weakref__"}}
    return type(f"{kind.__name__}BottomRight", kind.__bases__, body | changed)


class Causal(Mask):
    """Query i sees keys 0..i, aligned at the start (top-left)."""

    name = "causal"

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        return None, self.place(query, offset)


CausalBottomRight = at_end(Causal)


class SlidingWindow(Mask):
    """Query i sees keys i-n+1..i, aligned at the start (top-left)."""

    name = "sliding_window"
    usage = "sliding_window(n), n at least 1"
    num_arguments = (1, 1)
    argument_range = (1, LARGEST)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        place = self.place(query, offset)
        return place - self.arguments[0] + 1, place


SlidingWindowBottomRight = at_end(SlidingWindow)


class Prefix(Mask):
    """Every query sees the first n keys, and keys up to its own position."""

    name = "prefix"
    usage = "prefix(n)"
    num_arguments = (1, 1)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        rest = self.arguments[0] - 1 - query  # keys of the prefix after its own position
        return None, query + rest * (rest > 0)


class Padding(Mask):
    """Batch row b sees its first lengths[b] keys; without lengths, half to nearly all of the keys, unsorted."""

    name = "padding"
    usage = "padding or padding(len,len,...) with one length for each batch row, none above kv_len"
    num_arguments = (0, 1_000_000)
    has_lengths = True

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        fits = len(self.arguments) in {0, batch_size} and max(self.arguments, default=0) <= key_len
        self.require(fits, batch_size=batch_size, kv_len=key_len)

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:
        """Return the lengths (B,), by default unsorted.

        With three rows or more, the permutation that sorts them is not its own inverse, so the check finds code that
        sorts the rows and then applies the same permutation to restore their order.
        """
        falling = [key_len - (row + 1) * key_len // (2 * batch_size) for row in range(batch_size)]
        return np.asarray(self.arguments or falling[1:] + falling[:1], dtype=np.int64)

    def lengths(self, batch_size: int, query_len: int, key_len: int) -> Numbers:
        """Return the number of keys of each batch row (B,)."""
        return self.table(batch_size, query_len, key_len)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        return None, table[batch] - 1


class PaddingToNothing(Padding):
    """As padding, but the last batch row sees no key, so that its output is 0."""

    name = "padding_to_nothing"
    num_arguments = (0, 0)

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:
        """Return the lengths (B,); the last one is 0."""
        lengths = super().table(batch_size, query_len, key_len).copy()
        lengths[-1] = 0
        return lengths


class Window(Mask):
    """Query i sees keys i-left..i+right, aligned at the start (top-left).

    Source: ModernBERT, https://arxiv.org/abs/2412.13663, section 2.1 (64 on either side).
    """

    name = "window"
    usage = "window(left,right)"
    num_arguments = (2, 2)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        left, right = self.arguments
        return query - left, query + right


class Chunks(Mask):
    """Query i sees the keys of its own chunk of n, n*(i//n)..n*(i//n)+n-1, aligned at the start.

    Source: Llama 4, the layers with rotary positions, `attention_chunk_size` in
    https://github.com/huggingface/transformers/blob/main/src/transformers/models/llama4/configuration_llama4.py
    """

    name = "chunks"
    usage = "chunks(n), n at least 1"
    num_arguments = (1, 1)
    argument_range = (1, LARGEST)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        (length,) = self.arguments
        first = self.place(query, offset) // length * length
        return first, first + length - 1


ChunksBottomRight = at_end(Chunks)


class Ragged(Mask):
    """Batch row b has lengths[b] keys; its queries have the last T positions of these, and are causal.

    Without lengths as arguments, the lengths are from a quarter of S to S, unsorted, and at least T. With one query the
    mask equals `padding` with the same lengths. Source: `cache_seqlens` of flash_attn_with_kvcache,
    https://github.com/Dao-AILab/flash-attention
    """

    name = "ragged"
    usage = "ragged or ragged(len,len,...) with one length for each batch row, from seq_len to kv_len"
    num_arguments = (0, 1_000_000)
    has_lengths = True

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        lengths = self.arguments or (key_len,) * batch_size
        fits = len(lengths) == batch_size and query_len <= min(lengths) <= max(lengths) <= key_len
        self.require(fits, batch_size=batch_size, seq_len=query_len, kv_len=key_len)

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:
        """Return the position of the first query of each batch row (B,)."""
        return self.lengths(batch_size, query_len, key_len) - query_len

    def lengths(self, batch_size: int, query_len: int, key_len: int) -> Numbers:
        """Return the number of keys of each batch row (B,)."""
        shortest = max(query_len, key_len // 4)
        falling = [key_len - row * (key_len - shortest) // max(1, batch_size - 1) for row in range(batch_size)]
        return np.asarray(self.arguments or falling[1:] + falling[:1], dtype=np.int64)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        return None, table[batch] + query


class Document(Mask):
    """Packed documents of the given lengths (default: two halves); a query sees only the keys of its own document."""

    name = "document"
    usage = "document or document(len,len,...) whose lengths add up to seq_len, with kv_len=seq_len"
    num_arguments = (0, 1_000_000)
    has_lengths = True

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        is_full = not self.arguments or sum(self.arguments) == query_len
        self.require(query_len == key_len and is_full, seq_len=query_len, kv_len=key_len)

    def table(self, batch_size: int, query_len: int, key_len: int) -> tuple[npt.NDArray[np.int64], ...]:
        """Return, for each position, the first and the last position of its document, each (S,)."""
        lengths = np.asarray(self.arguments or (key_len - key_len // 2, key_len // 2))
        ends = np.cumsum(lengths)
        return np.repeat(ends - lengths, lengths), np.repeat(ends - 1, lengths)

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span:
        return table[0][query], table[1][query]


LOW_31 = 2**31 - 1
PERCENT = 100
LARGEST_BIAS = 4.0
BIAS_BITS = 24  # an additive bias uses all digits of float32, so that rounding it changes the answer


def drawn(first: Array, second: Array, third: Array, seed: int) -> Array:
    """Return pseudo-random integers from 0 to 2^31 - 1, one for each triple of integers, elementwise.

    The three are added one after another, each followed by products and shifts, as in the last step of MurmurHash3
    (https://github.com/aappleby/smhasher/wiki/MurmurHash3). No product reaches 2^62.
    """
    mixed: Array = seed
    for number in (first, second, third):
        mixed = (mixed * 0x2C1B3C6D + number + 1) & LOW_31
        mixed = ((mixed ^ (mixed >> 15)) * 0x297A2D39) & LOW_31
        mixed = mixed ^ (mixed >> 13)
    return mixed


class Boolean(Mask):
    """Query i sees key i mod S and about p percent of the other keys, drawn at random in each batch row."""

    name = "boolean"
    usage = "boolean(p) or boolean(p,seed), p from 0 to 100"
    num_arguments = (1, 2)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        self.require(self.arguments[0] <= PERCENT)

    def table(self, batch_size: int, query_len: int, key_len: int) -> int:
        return key_len

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> None:
        return None  # keys in between are hidden

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Array:
        percent, seed = (*self.arguments, 0)[:2]
        return (drawn(batch, query, key, seed) % PERCENT < percent) | (key == query % table)


class Additive(Mask):
    """Adds a number from -4 to 4, drawn for each head, query and key, to the score."""

    name = "additive"
    usage = "additive or additive(seed)"
    num_arguments = (0, 1)
    changes_scores = True

    def bias(self, per_head: Array, query: Array, key: Array, offset: int) -> Array:
        half = 2 ** (BIAS_BITS - 1)
        return (drawn(per_head, query, key, sum(self.arguments)) % (2 * half) - half) * (LARGEST_BIAS / half)


STEEPEST = 8.0
"""Exponent of ALiBi's slopes: of 2^n heads, head h (counted from 1) has the slope 2^(-8h/2^n), so the last has 2^-8."""


class Alibi(Mask):
    """Subtracts slope * |i-j| from the score of query i and key j, slopes 2^(-8h/H) (ALiBi), aligned at the start.

    The paper uses ALiBi with the causal mask, `causal+alibi`; `alibi` alone is the symmetric form.
    Source: https://arxiv.org/abs/2108.12409; slopes for other numbers of heads as in
    https://github.com/ofirpress/attention_with_linear_biases
    """

    name = "alibi"
    changes_scores = True

    def per_head(self, num_heads: int) -> npt.NDArray[np.float64]:
        """Return the slopes (H,): those of n heads (n: largest power of 2 up to H), then every second of 2n heads."""
        whole = 2 ** int(math.log2(num_heads))
        head, more = np.arange(1, whole + 1), np.arange(num_heads - whole)
        exponents = np.concatenate([head * STEEPEST / whole, (2 * more + 1) * STEEPEST / (2 * whole)])
        slopes: npt.NDArray[np.float64] = np.exp2(-exponents)
        return slopes

    def bias(self, per_head: Array, query: Array, key: Array, offset: int) -> Array:
        return -per_head * abs(self.place(query, offset) - key)


AlibiBottomRight = at_end(Alibi)


class RelativeBuckets(Mask):
    """Adds a learned number for each head and bucket of the distance j-i (T5), n buckets, both directions.

    Half of the n buckets are for keys up to the query's position and half for keys after it, as in T5's encoder. In
    each half, the first buckets have one distance each; the widths of the others grow geometrically up to `farthest`,
    and all larger distances share the last bucket.
    Source: T5, https://arxiv.org/abs/1910.10683, section 2.1, and `_relative_position_bucket` in
    https://github.com/huggingface/transformers/blob/main/src/transformers/models/t5/modeling_t5.py
    """

    name = "relative_buckets"
    usage = "relative_buckets or relative_buckets(n,farthest), n even and at least 4, farthest more than n; else 32,128"
    num_arguments = (0, 2)
    changes_scores = True
    is_learned = True
    is_two_sided = True
    parameter = "relative_bias"

    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        self.num_buckets, self.farthest = arguments if len(arguments) == 2 else (32, 128)  # noqa: PLR2004 - both
        self.require(len(arguments) != 1 and self.num_buckets % 2 == 0 and 4 <= self.num_buckets < self.farthest)  # noqa: PLR2004

    def parameters(self, sizes: tuple[int, int, int], num_heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shape (H, n) of the only table, by its name."""
        return {self.parameter: (num_heads, self.num_buckets)}

    def edges(self) -> list[int]:
        """Return the smallest distance of each bucket in one direction, without the first bucket."""
        number = self.num_buckets // 2 if self.is_two_sided else self.num_buckets
        single = number // 2  # buckets of a single distance
        rest, reach = number - single, self.farthest / single
        wide = [math.ceil(single * reach ** (step / rest) - 1e-9) for step in range(1, rest)]
        return [*range(1, single + 1), *wide]

    def index(self, query: Array, key: Array, offset: int, key_len: int) -> tuple[Array, ...]:
        ahead = key - query if self.is_two_sided else key - query - offset
        distance = abs(ahead) if self.is_two_sided else -ahead * (ahead < 0)
        bucket = sum((distance >= edge) * 1 for edge in self.edges())
        return (bucket + (ahead > 0) * (self.num_buckets // 2) if self.is_two_sided else bucket,)

    def looked_up(self, tables: Mapping[str, Array], places: tuple[Array, Array, Array], index: Array) -> Array:
        return tables[self.parameter][places[1], index[0]]


class RelativeBucketsPast(RelativeBuckets):
    """Adds a learned number for each head and bucket of the distance max(i+S-T-j, 0) (T5's decoder).

    A query's position is counted from the end, as in decoding with a cache.
    """

    name = "relative_buckets_past"
    usage = RelativeBuckets.usage.replace("relative_buckets", "relative_buckets_past")
    is_two_sided = False
    parameter = "relative_bias_past"


class Softcap(Mask):
    """Squashes the scores into -x..x: x * tanh(score / x).

    Source: Gemma 2, https://arxiv.org/abs/2408.00118, section 2.
    """

    name = "softcap"
    usage = "softcap(x), x at least 1"
    num_arguments = (1, 1)
    argument_range = (1, LARGEST)
    changes_scores = True
    is_additive = False

    def transform(self, score: Array) -> Array:
        return (score / self.arguments[0]).tanh() * self.arguments[0]


BETWEEN = "+"


class Combined(Mask):
    """A key is visible if every part shows it; parts change scores from left to right, before any key is hidden.

    In the text, parts that hide keys come first and are sorted, because their order does not matter.

    Raises:
        ValueError: `none` among the parts, a repeated mask, or a learned bias with a softcap.
    """

    usage = "mask+mask, or more"
    summary = "visible is what every part shows; scores are changed from left to right, before keys are hidden"

    def __init__(self, *parts: Mask) -> None:
        self._parts = (
            *sorted((part for part in parts if not part.changes_scores), key=str),
            *(part for part in parts if part.changes_scores),
        )
        names = [part.name for part in self._parts]
        self.name = BETWEEN.join(names)
        super().__init__()
        self.summary = "; ".join(part.summary for part in self._parts)
        self.changes_scores = any(part.changes_scores for part in self._parts)
        self.is_additive = all(part.is_additive for part in self._parts)
        self.is_learned = any(part.is_learned for part in self._parts)
        if Mask.name in names:
            raise ValueError(f"mask={self} is not allowed: {Mask.name} hides nothing, leave it out")
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"mask={self} is not allowed: {', '.join(twice)} appears twice, give it once")
        if self.is_learned and not self.is_additive:
            raise ValueError(f"mask={self} is not allowed: no model has a learned bias and a softcap, give one of them")

    def __str__(self) -> str:
        return BETWEEN.join(map(str, self._parts))

    @property
    def parts(self) -> tuple[Mask, ...]:
        return self._parts

    @property
    def hides(self) -> bool:
        return any(part.hides for part in self._parts)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        for part in self._parts:
            part.check(batch_size, query_len, key_len)

    def parameters(self, sizes: tuple[int, int, int], num_heads: int) -> dict[str, tuple[int, ...]]:
        return {name: shape for part in self._parts for name, shape in part.parameters(sizes, num_heads).items()}

    def table(self, batch_size: int, query_len: int, key_len: int) -> Table:
        return tuple(part.table(batch_size, query_len, key_len) for part in self._parts)

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Array:
        parts = [(part, own) for part, own in zip(self._parts, table, strict=True) if part.hides]
        if not parts:
            return super().sees(batch, query, key, table, offset)
        return functools.reduce(operator.and_, (part.sees(batch, query, key, own, offset) for part, own in parts))

    def span(self, batch: Array, query: Array, table: Table, offset: int) -> Span | None:
        spans = [part.span(batch, query, own, offset) for part, own in zip(self._parts, table, strict=True)]
        known = [span for span in spans if span is not None]
        if len(known) < len(spans):
            return None
        firsts = [first for first, _ in known if first is not None]
        lasts = [last for _, last in known if last is not None]
        return (
            functools.reduce(np.maximum, firsts) if firsts else None,
            functools.reduce(np.minimum, lasts) if lasts else None,
        )

    def at_other_length(self) -> Mask:
        return Combined(*(part.at_other_length() for part in self._parts))


def aligned_at_end(mask: Mask) -> Mask:
    """Return the mask with each part aligned at the end (bottom-right).

    Raises:
        ValueError: a part cannot be aligned at the end.
    """
    parts = (
        str(part) if part.is_at_end else str(part).replace(part.name, f"{part.name}{AT_END}", 1) for part in mask.parts
    )
    return parse_mask(BETWEEN.join(parts))


UNLIMITED = -1


def attention_window(mask: Mask, query_len: int, key_len: int) -> tuple[int, int] | None:
    """Return the mask as a window (left, right), as FlashAttention takes it; None if it is not a window.

    Query i sees keys i + S - T - left to i + S - T + right, counted from the end (bottom-right); -1 means no limit. A
    mask that is aligned at the start (top-left) is therefore a window only if T = S.

    Source: https://github.com/Dao-AILab/flash-attention, README, changes in 2.1 and 2.3
    """
    if type(mask) is Mask:
        return UNLIMITED, UNLIMITED
    if isinstance(mask, CausalBottomRight) or (isinstance(mask, Causal) and query_len == key_len):
        return UNLIMITED, 0
    if type(mask) in {SlidingWindow, SlidingWindowBottomRight} and (query_len == key_len or mask.is_at_end):
        return mask.arguments[0] - 1, 0
    if isinstance(mask, Window) and query_len == key_len:
        return mask.arguments[0], mask.arguments[1]
    return None


def not_a_window(mask: Mask, query_len: int, key_len: int) -> str | None:
    """Return why a kernel that takes only windows cannot take this mask; None if it can."""
    if attention_window(mask, query_len, key_len) is not None:
        return None
    if query_len != key_len:
        return f"the kernel aligns masks at the last key, so that mask {mask} needs kv_len == seq_len"
    return f"the kernel does not support mask {mask}, only none, causal and sliding windows"


def masks() -> dict[str, type[Mask]]:
    """Return every named mask: `none`, then the others in alphabetical order."""
    family = [Mask]
    for mask in family:  # the list grows during the loop
        family += mask.__subclasses__()
    named = [mask for mask in family[1:] if mask.name and not issubclass(mask, Combined)]  # "": created by code only
    others = sorted(named, key=lambda mask: mask.name)
    return {mask.name: mask for mask in (Mask, *others)}


@functools.lru_cache(maxsize=4096)
def parse_mask(text: str) -> Mask:
    """Parse a mask: `name`, `name(number,number,...)`, or several of these joined by +.

    Raises:
        ValueError: the name is unknown, or the arguments do not fit; the message lists the allowed masks.
    """
    known, parts = masks(), []
    for part in text.split(BETWEEN):
        match = re.fullmatch(r"\s*([a-z_]+)\s*(?:\(([\d\s,]*)\))?\s*", part)
        if match is None or match[1] not in known:
            allowed = "; ".join([*(mask.usage for mask in known.values()), Combined.usage])
            culprit = "" if part == text else f" (its part {part.strip() or 'before or after a +, which is empty'})"
            hint = did_you_mean(part.partition("(")[0].strip(), known)
            raise ValueError(f"mask={text} is not allowed{culprit}{hint}: mask is one of {allowed}")
        numbers = (match[2] or "").replace(" ", "").split(",")
        parts.append(known[match[1]](*(int(number) for number in numbers if number)))
    return parts[0] if len(parts) == 1 else Combined(*parts)
