"""Masks as data: which keys each query may see, as a rule on indices and as an exact count. Knows nothing of torch.

A mask is one class. Its rule `sees` uses only operators that numpy arrays and torch tensors share, so that the dense
form, a single tile and a compiled kernel's predicate all come from the same line.
"""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

LARGEST = 2**31


class Array(Protocol):
    """What a rule needs of its operands: a numpy array or a torch tensor of whole numbers."""

    def __getitem__(self, index: Any, /) -> Any: ...  # noqa: D105, ANN401 - index types differ between libraries
    def __lt__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __le__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __add__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __sub__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401


class Mask:
    """Every key is visible: the mask `none`, and the base of all others.

    Sizes are B (batch), T (query length) and S (key length) throughout.
    """

    name: ClassVar[str] = "none"
    summary: ClassVar[str] = "every key is visible"
    usage: ClassVar[str] = "none"
    num_arguments: ClassVar[tuple[int, int]] = (0, 0)  # fewest and most
    changes_scores: ClassVar[bool] = False  # True: not expressible as visible or hidden

    def __init__(self, *arguments: int) -> None:
        """Keep the arguments between the parentheses.

        Raises:
            ValueError: too few or too many arguments, or a negative one.
        """
        fewest, most = self.num_arguments
        self.arguments = arguments
        if not fewest <= len(arguments) <= most or any(not 0 <= number <= LARGEST for number in arguments):
            raise ValueError(f"mask={self} is not allowed: write it as {self.usage}")

    def __str__(self) -> str:
        """The text that `parse_mask` reads back."""
        return f"{self.name}({','.join(map(str, self.arguments))})" if self.arguments else self.name

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        """Raise ValueError where the arguments do not fit the sizes."""

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64] | None:  # noqa: ARG002
        """Whole numbers that `sees` looks up, or None."""
        return None

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Whether `query` sees `key` in that batch row, elementwise; `offset` is S - T."""
        return key <= key + 1

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """How many (batch, query, key) triples are visible, exactly, for one head."""
        return batch_size * query_len * key_len

    def has_empty_rows(self, batch_size: int, query_len: int, key_len: int) -> bool:  # noqa: ARG002
        """Whether some query sees no key at all."""
        return False

    def at_other_length(self) -> "Mask":
        """The same idea, fit for any length: used when a cell is tried at a shorter length first."""
        return self

    def dense(
        self, batch_size: int, query_len: int, key_len: int, rows: npt.NDArray[np.int64] | None = None
    ) -> npt.NDArray[np.bool_]:
        """The dense form (B, T, S), True where a key is visible; with `rows` (R,), of those queries alone (B, R, S)."""
        chosen = np.arange(query_len) if rows is None else rows
        batch = np.arange(batch_size)[:, None, None]
        query = chosen[None, :, None]
        key = np.arange(key_len)[None, None, :]
        table = self.table(batch_size, query_len, key_len)
        seen = self.sees(batch, query, key, table, key_len - query_len)
        return np.broadcast_to(seen, (batch_size, len(chosen), key_len))


class Causal(Mask):
    """Query i sees keys 0 to i, counted from the start: top-left alignment."""

    name = "causal"
    summary = "query i sees keys 0..i, aligned at the start (top-left)"
    usage = "causal"

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Up to its own position."""
        return key <= query

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """A triangle, then full rows once the keys are exhausted."""
        triangle = min(query_len, key_len)
        return batch_size * (triangle * (triangle + 1) // 2 + (query_len - triangle) * key_len)


class CausalBottomRight(Mask):
    """The last query sees every key: bottom-right alignment, as in decoding with a cache."""

    name = "causal_bottom_right"
    summary = "query i sees keys 0..i+S-T, aligned at the end (bottom-right)"
    usage = "causal_bottom_right"

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Up to its own position counted from the end."""
        return key <= query + offset

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """Row i has i + 1 + S - T keys, where that is positive."""
        first, last = max(0, key_len - query_len + 1), key_len
        return batch_size * (first + last) * (last - first + 1) // 2

    def has_empty_rows(self, batch_size: int, query_len: int, key_len: int) -> bool:  # noqa: ARG002
        """The first T - S queries see nothing."""
        return query_len > key_len


class SlidingWindow(Mask):
    """Query i sees its own position and the n - 1 before it."""

    name = "sliding_window"
    summary = "query i sees keys i-n+1..i"
    usage = "sliding_window(n), n at least 1"
    num_arguments = (1, 1)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:  # noqa: ARG002
        """A window of 0 would see nothing."""
        if self.arguments[0] < 1:
            raise ValueError(f"mask={self} is not allowed: write it as {self.usage}")

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """The last n positions up to its own."""
        return (key <= query) & (query - self.arguments[0] < key)

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """All of the causal pairs less those of the causal mask that lags n positions behind."""
        rows = range(query_len)
        lag = self.arguments[0]
        return batch_size * sum(max(0, min(row + 1, key_len) - max(0, row + 1 - lag)) for row in rows)

    def has_empty_rows(self, batch_size: int, query_len: int, key_len: int) -> bool:  # noqa: ARG002
        """Queries more than a window past the last key see nothing."""
        return query_len - self.arguments[0] >= key_len


class Padding(Mask):
    """Row b of the batch has lengths[b] true keys; the rest is padding."""

    name = "padding"
    summary = "batch row b sees its first lengths[b] keys; without lengths the rows keep from nearly all down to half"
    usage = "padding or padding(len,len,...) with one length for each batch row, none above kv_len"
    num_arguments = (0, 1_000_000)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:  # noqa: ARG002
        """One length for each row, none longer than the keys."""
        if self.arguments and (len(self.arguments) != batch_size or max(self.arguments) > key_len):
            given = f"mask={self} with batch_size={batch_size} and kv_len={key_len}"
            raise ValueError(f"{given} is not allowed: write it as {self.usage}")

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """The lengths (B,)."""
        spread = [key_len - (row + 1) * key_len // (2 * batch_size) for row in range(batch_size)]
        return np.asarray(self.arguments or spread, dtype=np.int64)

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """True keys only."""
        assert table is not None
        return key < table[batch]

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """Each query of a row sees the row's length."""
        return int(self.table(batch_size, query_len, key_len).sum()) * query_len

    def has_empty_rows(self, batch_size: int, query_len: int, key_len: int) -> bool:
        """A row of length 0 sees nothing."""
        return int(self.table(batch_size, query_len, key_len).min()) == 0

    def at_other_length(self) -> Mask:
        """Lengths as fractions of the new one."""
        return type(self)()


class PaddingToNothing(Padding):
    """As padding without lengths, but the last row of the batch has no true key at all."""

    name = "padding_to_nothing"
    summary = "as padding, and the last batch row sees no key: its output is 0"
    usage = "padding_to_nothing"
    num_arguments = (0, 0)

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:
        """The lengths (B,), the last of them 0."""
        lengths = super().table(batch_size, query_len, key_len).copy()
        lengths[-1] = 0
        return lengths


class Prefix(Mask):
    """A prefix that all queries see, causal after it (prefix language model)."""

    name = "prefix"
    summary = "every query sees the first n keys, and keys up to its own position"
    usage = "prefix(n)"
    num_arguments = (1, 1)

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """The prefix, or up to its own position."""
        return (key < self.arguments[0]) | (key <= query)

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """Row i has max(n, i + 1) keys, no more than there are."""
        return batch_size * sum(min(key_len, max(self.arguments[0], row + 1)) for row in range(query_len))


class Document(Mask):
    """Several documents packed into one row: a query sees the keys of its own document."""

    name = "document"
    summary = "packed documents of the given lengths; a query sees its own document; without lengths, two halves"
    usage = "document or document(len,len,...) whose lengths add up to seq_len, with kv_len=seq_len"
    num_arguments = (0, 1_000_000)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:  # noqa: ARG002
        """The lengths fill the row."""
        if query_len != key_len or (self.arguments and sum(self.arguments) != query_len):
            given = f"mask={self} with seq_len={query_len} and kv_len={key_len}"
            raise ValueError(f"{given} is not allowed: write it as {self.usage}")

    def _lengths(self, key_len: int) -> tuple[int, ...]:
        return self.arguments or (key_len - key_len // 2, key_len // 2)

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """The document of each position (S,)."""
        lengths = self._lengths(key_len)
        return np.repeat(np.arange(len(lengths)), lengths)

    def sees(self, batch: Array, query: Array, key: Array, table: Array | None, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Same document."""
        assert table is not None
        return table[query] == table[key]

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:  # noqa: ARG002
        """A square for each document."""
        return batch_size * sum(length * length for length in self._lengths(key_len))

    def at_other_length(self) -> Mask:
        """Two halves of the new one."""
        return Document()


class Alibi(Mask):
    """A linear penalty on distance, added to the scores (https://arxiv.org/abs/2108.12409)."""

    name = "alibi"
    summary = "adds a head's slope times the distance to the scores"
    usage = "alibi"
    changes_scores = True


class Softcap(Mask):
    """Scores squashed to +-x by x * tanh(score / x) (Gemma 2, https://arxiv.org/abs/2408.00118)."""

    name = "softcap"
    summary = "squashes the scores into -x..x with tanh"
    usage = "softcap(x), x at least 1"
    num_arguments = (1, 1)
    changes_scores = True


def masks() -> dict[str, type[Mask]]:
    """Every mask by its name: the base class and its subclasses."""
    return {mask.name: mask for mask in _family(Mask)}


def _family(base: type[Mask]) -> Iterator[type[Mask]]:
    yield base
    for child in base.__subclasses__():
        yield from _family(child)


def parse_mask(text: str) -> Mask:
    """The mask that `name` or `name(number,number,...)` describes.

    Raises:
        ValueError: an unknown name or arguments that do not fit; the message lists what is allowed.
    """
    found = re.fullmatch(r"\s*([a-z_]+)\s*(?:\(([\d\s,]*)\))?\s*", text)
    known = masks()
    if found is None or found[1] not in known:
        allowed = "; ".join(mask.usage for mask in known.values())
        raise ValueError(f"mask={text} is not allowed: mask is one of {allowed}")
    numbers = [number for number in (found[2] or "").replace(" ", "").split(",") if number]
    return known[found[1]](*map(int, numbers))
