"""GPUs by their data sheets: what a plan asks of a device that is not here, answered by a file.

data_sheets/NAME.toml has the numbers of one, with the address of the vendor's document. A file of your own, as TOML or
JSON, has the same keys. Nothing in it is executed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from attnbench.plugins import unknown
from attnbench.workloads.workload import DTYPE_BYTES, MATMUL_PRECISIONS, Workload

FOLDER = Path(__file__).parent / "data_sheets"
TF32 = "tf32"
RATES = (*DTYPE_BYTES, TF32)
"""What may have a rate: the dtypes, and float32 with its products in TF32."""


class DataSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as its vendor describes it.

    Raises:
        ValueError: a number that is not above 0, a rate of no dtype, or no rate at all.
    """

    name: str
    source: str  # the document that has these numbers
    sizes_source: str = ""  # the one that has its caches and multiprocessors, where that is another
    kind: str = "cuda"  # the device of attnbench that it would be
    memory_bytes: int
    bytes_per_s: float  # of its memory
    flops_per_s: dict[str, float]  # of dense matrix products, by dtype
    cache_bytes: int  # of its largest cache
    num_sms: int
    compute_capability: tuple[int, int]

    def __post_init__(self) -> None:
        """Check what no type says."""
        numbers = {
            **{name: getattr(self, name) for name in ("memory_bytes", "bytes_per_s", "cache_bytes", "num_sms")},
            **{f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()},
        }
        for name, value in numbers.items():
            if not value > 0:
                raise ValueError(f"{name} = {value} is not allowed: give a number above 0")
        if not self.flops_per_s:
            raise ValueError(f"flops_per_s is empty: give a rate for some of {', '.join(RATES)}")
        for dtype in self.flops_per_s:
            if dtype not in RATES:
                raise ValueError(unknown("flops_per_s", dtype, RATES))

    def rate(self, workload: Workload) -> float | None:
        """FLOP/s of matrix products as the workload makes them; None where the sheet does not say."""
        is_tf32 = workload.dtype == "float32" and workload.float32_matmul_precision != MATMUL_PRECISIONS[0]
        return self.flops_per_s.get(TF32 if is_tf32 else workload.dtype)


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """A device that stands in for the real one, and the packages that would have to be installed there."""

    sheet: DataSheet
    packages: list[str] = field(default_factory=list)  # that somebody asked for and that are not here


_ASSUMED: ContextVar[Assumed | None] = ContextVar("assumed", default=None)


def names() -> tuple[str, ...]:
    """The data sheets that there are, sorted."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


def load(given: str) -> DataSheet:
    """The data sheet of that name, or in that file.

    Raises:
        ValueError: there is no such sheet, or the file is none; the message says what is wrong with it.
    """
    path = Path(given)
    is_file = path.suffix in {".toml", ".json"}
    if not is_file and given not in names():
        other = "or a file NAME.toml or NAME.json"
        raise ValueError(f"{unknown('data sheet', given, names())}, {other}")
    file = path if is_file else FOLDER / f"{given}.toml"
    try:
        text = file.read_text(encoding="utf-8")
        read = msgspec.json.decode(text) if file.suffix == ".json" else tomllib.loads(text)
        return msgspec.convert(read, DataSheet)
    except OSError as error:
        raise ValueError(f"cannot read {given}: {error.strerror}") from None
    except (msgspec.DecodeError, ValueError) as error:  # of TOML, too
        raise ValueError(f"{given} is no data sheet: {error}") from None


def assumed() -> Assumed | None:
    """What stands in for a device at this moment, or None."""
    return _ASSUMED.get()


@contextmanager
def assuming(sheet: DataSheet) -> Iterator[Assumed]:
    """Within: implementations that ask what a device is are answered by its sheet, and find every package installed."""
    made = Assumed(sheet=sheet)
    before = _ASSUMED.set(made)
    try:
        yield made
    finally:
        _ASSUMED.reset(before)
