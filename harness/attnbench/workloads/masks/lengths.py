"""Masks by lengths: rows that end in padding, documents packed into one row."""

from typing import Any

import numpy as np
import numpy.typing as npt

from attnbench.workloads.masks.rule import Array, Mask, Span, Table


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

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """True keys only."""
        return key < table[batch]

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:
        """The row's length, for each of its queries."""
        return 0, self.table(batch_size, query_len, key_len)[:, None]

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

    def _lengths(self, key_len: int) -> npt.NDArray[np.int64]:
        return np.asarray(self.arguments or (key_len - key_len // 2, key_len // 2), dtype=np.int64)

    def table(self, batch_size: int, query_len: int, key_len: int) -> npt.NDArray[np.int64]:  # noqa: ARG002
        """The document of each position (S,)."""
        lengths = self._lengths(key_len)
        return np.repeat(np.arange(len(lengths)), lengths)

    def sees(self, batch: Array, query: Array, key: Array, table: Table, offset: int) -> Any:  # noqa: ANN401, ARG002
        """Same document."""
        return table[query] == table[key]

    def span(self, batch_size: int, query_len: int, key_len: int) -> Span:  # noqa: ARG002
        """From the first key of the query's document to its last."""
        lengths = self._lengths(key_len)
        ends = lengths.cumsum()
        return np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)

    def at_other_length(self) -> Mask:
        """Two halves of the new one."""
        return Document()
