"""Samples as columns: as many bytes as numbers, where a million objects take six times as much. Reads like a tuple."""

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
    """Many samples, each field of theirs as an array (n,)."""

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
        """The same as columns."""
        if isinstance(samples, Samples):
            return samples
        rows = tuple(samples)
        numbers = chain.from_iterable(map(astuple, rows))  # whole ones lie below 2^53: as floats they are exact
        columns = np.fromiter(numbers, np.float64, len(rows) * len(_READ)).reshape(-1, len(_READ)).T
        return cls(*(column.astype(dtype) for column, (_, dtype) in zip(columns, _READ, strict=True)))

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> "Samples":
        """One after the other."""
        if len(parts) == 1:
            return parts[0]
        return cls(*(np.concatenate([read(part) for part in parts] or [[]]).astype(dtype) for read, dtype in _READ))

    @property
    def places(self) -> Integers:
        """Epoch, visit and block of each sample as one number, in whose order they were taken (n,)."""
        return (self.visits << BLOCK_BITS) | self.block

    @property
    def visits(self) -> Integers:
        """Epoch and visit of each sample as one number (n,)."""
        return (self.epoch.astype(np.int64) << VISIT_BITS) | self.visit

    def where(self, chosen: NDArray[np.bool_]) -> "Samples":
        """Those that are chosen (n,)."""
        return Samples(*(read(self)[chosen] for read, _ in _READ))

    def __len__(self) -> int:
        """How many samples there are."""
        return len(self.value)

    @overload
    def __getitem__(self, place: int) -> Sample: ...

    @overload
    def __getitem__(self, place: slice) -> "Samples": ...

    def __getitem__(self, place: int | slice) -> "Sample | Samples":
        """One sample, or a part of them."""
        if isinstance(place, slice):
            return Samples(*(read(self)[place] for read, _ in _READ))
        return Sample(*(read(self)[place].item() for read, _ in _READ))

    def __iter__(self) -> Iterator[Sample]:
        """Each sample."""
        for start in range(0, len(self), CHUNK):
            for row in zip(*(read(self)[start : start + CHUNK].tolist() for read, _ in _READ), strict=True):
                yield Sample(*row)

    def __eq__(self, other: object) -> bool:
        """Whether they are the same samples in the same order, however they are kept."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Sample.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]


_DTYPES: dict[str, Any] = {"num_calls": np.int64, "num_faults": np.int64, "epoch": np.int32, "visit": np.int32}
_DTYPES |= {"block": np.int32, "slot": np.int32, "flags": np.int32, "num_untimed": np.int64}
_READ = [(attrgetter(field.name), _DTYPES.get(field.name, np.float64)) for field in fields(Samples)]


class Collector:
    """Takes samples in parts, and keeps few of them as objects."""

    def __init__(self) -> None:
        """Nothing was taken yet."""
        self._parts: list[Samples] = []
        self._rest: list[Sample] = []

    def extend(self, samples: Iterable[Sample]) -> None:
        """Take some more."""
        self._rest.extend(samples)
        if len(self._rest) >= CHUNK:
            self._flush()

    def _flush(self) -> None:
        self._parts.append(Samples.of(self._rest))
        self._rest.clear()

    @property
    def samples(self) -> Samples:
        """All of them, in the order in which they came."""
        if self._rest or not self._parts:
            self._flush()
        self._parts = [Samples.joined(self._parts)]
        return self._parts[0]
