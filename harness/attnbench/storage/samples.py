"""Samples as one array: a million objects would need six times the memory. Reads like a tuple."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from attnbench.storage.records import BLOCK_BITS, VISIT_BITS, Sample

Integers = NDArray[np.int64]
CHUNK = 4096
_TYPES = {"num_calls": "i8", "num_faults": "i8", "num_untimed": "i8", "epoch": "i4", "visit": "i4", "block": "i4"}
_TYPES |= {"slot": "i4", "flags": "i4"}
ROW = np.dtype([(name, _TYPES.get(name, "f8")) for name in Sample.__struct_fields__])
"""One sample."""


class Samples(Sequence[Sample]):
    """Many samples, to which more can be added; each field of Sample is an attribute: an array (n,)."""

    def __init__(self, rows: NDArray[np.void] | None = None) -> None:
        """Begin with rows (n,) of type ROW."""
        self._parts = [np.empty(0, ROW) if rows is None else rows]
        self._rest: list[Sample] = []  # few of them, as objects

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Samples":
        """Convert samples to rows."""
        if isinstance(samples, Samples):
            return samples
        return cls(_rows(samples))

    def extend(self, samples: Iterable[Sample]) -> None:
        """Add samples."""
        self._rest.extend(samples)
        if len(self._rest) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._parts.append(_rows(self._rest))
        self._rest.clear()

    @property
    def rows(self) -> NDArray[np.void]:
        """All samples in order (n,)."""
        if self._rest:
            self._flush()
        if len(self._parts) > 1:
            self._parts = [np.concatenate(self._parts)]
        return self._parts[0]

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name not in Sample.__struct_fields__:
            raise AttributeError(name)
        return self.rows[name]

    @property
    def places(self) -> Integers:
        """Epoch, visit and block of each sample as one number (n,), increasing in time."""
        places: Integers = (self.visits << BLOCK_BITS) | self.block
        return places

    @property
    def visits(self) -> Integers:
        """Epoch and visit of each sample as one number (n,)."""
        visits: Integers = (self.epoch.astype(np.int64) << VISIT_BITS) | self.visit
        return visits

    def where(self, chosen: NDArray[np.bool_]) -> "Samples":
        """The samples chosen by a mask or by indices (n,)."""
        return Samples(self.rows[chosen])

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> "Samples": ...

    def __getitem__(self, place: int | slice) -> "Sample | Samples":
        if isinstance(place, slice):
            return Samples(self.rows[place])
        return Sample(*self.rows[place].item())

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), CHUNK):
            for row in self.rows[start : start + CHUNK].tolist():
                yield Sample(*row)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same samples in the same order, in any representation."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Sample.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


def _rows(samples: Iterable[Sample]) -> NDArray[np.void]:
    return np.array([astuple(sample) for sample in samples], ROW)
