"""Samples as columns: a million objects would need six times the memory. Reads like a tuple."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from operator import attrgetter
from typing import Any, overload

import numpy as np
from msgspec.structs import astuple
from numpy.typing import NDArray

from attnbench.storage.records import BLOCK_BITS, VISIT_BITS, Sample

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Samples(Sequence[Sample]):
    """Many samples, with each of their fields as an array (n,)."""

    value: Floats
    num_calls: Integers
    epoch: Integers
    visit: Integers
    block: Integers
    slot: Integers
    start_s: Floats
    num_faults: Integers
    load: Floats
    host_s: Floats
    flags: Integers
    num_untimed: Integers
    untimed_s: Floats

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Samples":
        """Convert samples to columns."""
        if isinstance(samples, Samples):
            return samples
        rows = tuple(samples)
        numbers = chain.from_iterable(map(astuple, rows))  # integers below 2^53 are exact as floats
        columns = np.fromiter(numbers, np.float64, len(rows) * len(_READ)).reshape(-1, len(_READ)).T
        return cls(*(column.astype(dtype) for column, (_, dtype) in zip(columns, _READ, strict=True)))

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """Concatenate columns."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([read(part) for part in parts] or [[]]).astype(dtype) for read, dtype in _READ))

    @property
    def places(self) -> Integers:
        """Epoch, visit and block of each sample as one number (n,), increasing in time."""
        return (self.visits << BLOCK_BITS) | self.block

    @property
    def visits(self) -> Integers:
        """Epoch and visit of each sample as one number (n,)."""
        return (self.epoch.astype(np.int64) << VISIT_BITS) | self.visit

    def where(self, chosen: NDArray[np.bool_]) -> "Samples":
        """The samples chosen by a mask or by indices (n,)."""
        return Samples(*(read(self)[chosen] for read, _ in _READ))

    def __len__(self) -> int:
        return len(self.value)

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> "Samples": ...

    def __getitem__(self, place: int | slice) -> "Sample | Samples":
        if isinstance(place, slice):
            return Samples(*(read(self)[place] for read, _ in _READ))
        return Sample(*(read(self)[place].item() for read, _ in _READ))

    def __iter__(self) -> Iterator[Sample]:
        for start in range(0, len(self), CHUNK):
            for row in zip(*(read(self)[start : start + CHUNK].tolist() for read, _ in _READ), strict=True):
                yield Sample(*row)

    def __eq__(self, other: object) -> bool:
        """Whether both hold the same samples in the same order, in any representation."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Sample.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


_DTYPES: dict[str, Any] = {"num_calls": np.int64, "num_faults": np.int64, "epoch": np.int32, "visit": np.int32}
_DTYPES |= {"block": np.int32, "slot": np.int32, "flags": np.int32, "num_untimed": np.int64}
_READ = [(attrgetter(field.name), _DTYPES.get(field.name, np.float64)) for field in fields(Samples)]


class Collector:
    """Collects samples in parts, and keeps few of them as objects."""

    def __init__(self) -> None:
        self._parts: list[Samples] = []
        self._rest: list[Sample] = []

    def extend(self, samples: Iterable[Sample]) -> None:
        """Add samples."""
        self._rest.extend(samples)
        if len(self._rest) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._parts.append(Samples.of(self._rest))
        self._rest.clear()

    @property
    def samples(self) -> Samples:
        """All samples, in order."""
        if self._rest or not self._parts:
            self._flush()
        self._parts = [Samples.joined(self._parts)]
        return self._parts[0]
