"""A sequence of samples that stores them in one array; a million `Sample` objects need six times as much memory."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from msgspec.structs import astuple, fields
from numpy.typing import NDArray

from attnbench.storage.records import BLOCK_BITS, VISIT_BITS, Sample

CHUNK = 4096  # `extend` converts samples to rows once it has this many
# the fields of a Sample: int64 for integers, float64 for all others
ROW = np.dtype([(field.name, "i8" if isinstance(field.default, int) else "f8") for field in fields(Sample)])


class Samples(Sequence[Sample]):
    """A sequence of n samples that can be extended. Each field of `Sample` is an attribute: an array (n,)."""

    def __init__(self, samples: Iterable[Sample] = ()) -> None:
        self._rows = np.empty(0, ROW)
        self._new = list(samples)  # not converted to rows yet

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "Samples":
        """Convert samples to `Samples`; an object of this class is returned unchanged."""
        return samples if isinstance(samples, Samples) else cls(samples)

    def extend(self, samples: Iterable[Sample]) -> None:
        """Append samples."""
        self._new.extend(samples)
        if len(self._new) >= CHUNK:
            _ = self.rows

    @property
    def rows(self) -> NDArray[np.void]:
        """All samples in order, as a structured array (n,) of dtype ROW."""
        if self._new:
            self._rows = np.concatenate([self._rows, np.array([astuple(sample) for sample in self._new], ROW)])
            self._new.clear()
        return self._rows

    def __getattr__(self, name: str) -> NDArray[Any]:
        if name not in Sample.__struct_fields__:
            raise AttributeError(name)
        return self.rows[name]

    @property
    def visits(self) -> NDArray[np.int64]:
        """The visit of each sample as an integer (n,) that combines the numbers of its process (epoch) and visit."""
        return np.asarray((self.epoch << VISIT_BITS) | self.visit)

    @property
    def places(self) -> NDArray[np.int64]:
        """The block of each sample as an integer (n,) that combines process, visit and block; it increases in time."""
        return np.asarray((self.visits << BLOCK_BITS) | self.block)

    def where(self, chosen: "NDArray[np.bool_] | slice") -> "Samples":
        """Return the samples that a boolean array (n,) or a slice selects."""
        part = Samples()
        part._rows = self.rows[chosen]
        return part

    def __len__(self) -> int:
        return len(self._rows) + len(self._new)

    def __getitem__(self, place: int | slice) -> Any:  # noqa: ANN401 - one sample, or Samples of a slice
        return self.where(place) if isinstance(place, slice) else Sample(*self.rows[place].item())

    def __iter__(self) -> Iterator[Sample]:
        for row in self.rows:
            yield Sample(*row.item())

    def __eq__(self, other: object) -> bool:
        """Return whether `other`, any sequence of samples, has equal samples in the same order."""
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(Sample.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]
