"""The base of all masks: which keys each query sees, and how it changes their scores, as rules on indices."""

from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

LARGEST = 2**31
COUNTED_AT_ONCE = 2**24

Span = tuple[npt.ArrayLike, npt.ArrayLike]
"""The first key that each query sees and the one after its last, both broadcastable to (B, T)."""
Table = Any
"""What `sees` looks up: whole numbers as a numpy array or a torch tensor, one number, None, or a tuple of these."""


class Array(Protocol):
    """The operand of a rule: a numpy array or a torch tensor."""

    def __getitem__(self, index: Any, /) -> Any: ...  # noqa: D105, ANN401 - index types differ between libraries
    def __lt__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __le__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __add__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __sub__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __mul__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401
    def __mod__(self, other: Any, /) -> Any: ...  # noqa: D105, ANN401


class Mask:
    """Every key is visible and keeps its score: the mask `none`, and the base of all others.

    A mask that hides keys overrides `sees`; one that changes scores sets `changes_scores` and overrides `bias`, or
    `transform` with its `derivative`.
    Sizes are B (batch), T (query length) and S (key length) throughout.
    """

    name: str = "none"
    summary: str = "every key is visible"
    usage: ClassVar[str] = "none"
    num_arguments: ClassVar[tuple[int, int]] = (0, 0)  # fewest and most
    changes_scores: bool = False
    is_additive: bool = True  # False: the change depends on the score, so that no bias does the same

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

    @property
    def parts(self) -> "tuple[Mask, ...]":
        """The masks that this one combines: for most, itself alone."""
        return (self,)

    @property
    def hides(self) -> bool:
        """Whether it may hide a key: so does every mask with a `sees` of its own."""
        return type(self).sees is not Mask.sees

    @property
    def changes(self) -> "tuple[Mask, ...]":
        """The parts that change scores, in the order in which they do."""
        return tuple(part for part in self.parts if part.changes_scores)

    def check(self, batch_size: int, query_len: int, key_len: int) -> None:
        """Raise ValueError where the arguments do not fit the sizes."""

    def table(self, batch_size: int, query_len: int, key_len: int) -> Table:  # noqa: ARG002
        """What `sees` looks up."""
        return None

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Whether `query` sees `key` in that batch row, elementwise; `offset` is S - T."""
        return key <= key + 1

    def per_head(self, num_heads: int) -> npt.NDArray[Any]:
        """A number for each head (H,) that `bias` is given: here the head's own index."""
        return np.arange(num_heads)

    def bias(self, per_head: Any, query: Array, key: Array, offset: int) -> Any:  # noqa: ANN401, ARG002
        """What an additive mask adds to the score that `query` gives `key`, elementwise, in every batch row alike.

        `per_head` is the head's number. Hidden keys get -inf after all changes.
        """
        return key * 0.0

    def transform(self, score: Any) -> Any:  # noqa: ANN401
        """The score (a torch tensor) as a mask that is not additive changes it, elementwise."""
        return score

    def derivative(self, score: Any) -> Any:  # noqa: ANN401, ARG002
        """The derivative of `transform` at that score, elementwise."""
        return 1.0

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span | None:  # noqa: ARG002
        """Where the keys of each query lie if they are all neighbours, for a quick count; None: count one by one."""
        return None if self.hides else (0, key_len)

    def num_seen(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:
        """How many keys each query sees, exactly (B, T)."""
        sizes = (batch_size, query_len, key_len)
        span = self.span(*sizes)
        if span is not None:
            found = np.minimum(span[1], key_len) - np.maximum(span[0], 0)
            return np.broadcast_to(np.maximum(found, 0), (batch_size, query_len)).astype(np.int64)
        block = max(1, COUNTED_AT_ONCE // (batch_size * key_len))
        starts = range(0, query_len, block)
        rows = (np.arange(start, min(start + block, query_len)) for start in starts)
        return np.concatenate([self.dense(*sizes, rows=part).sum(axis=-1, dtype=np.int64) for part in rows], axis=1)

    def num_visible(self, batch_size: int, query_len: int, key_len: int) -> int:
        """How many (batch, query, key) triples are visible, exactly, for one head."""
        return int(self.num_seen(batch_size, query_len, key_len).sum())

    def has_empty_rows(self, batch_size: int, query_len: int, key_len: int) -> bool:
        """Whether some query sees no key at all."""
        return bool((self.num_seen(batch_size, query_len, key_len) == 0).any())

    def at_other_length(self) -> "Mask":
        """The mask of this kind for any length: a workload is tried at a shorter length first."""
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
