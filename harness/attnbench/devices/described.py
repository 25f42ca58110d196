"""Data sheets of GPUs: a file answers a plan's questions about a device that is not here.

data_sheets/NAME.toml holds the numbers of one device, with the address of the vendor's document. A file of your own, as
TOML or JSON, has the same keys. Nothing in it is executed.
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
"""Keys with a rate: the dtypes, and float32 with its products in TF32."""


class DataSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device as its vendor describes it.

    Raises:
        ValueError: a number is not above 0, a rate has an unknown dtype, or there is no rate.
    """

    name: str
    source: str  # document with these numbers
    sizes_source: str = ""  # document with its caches and multiprocessors, if it is another one
    kind: str = "cuda"  # name of this device in attnbench
    memory_bytes: int
    bytes_per_s: float  # of its memory
    flops_per_s: dict[str, float]  # of dense matrix products, by dtype
    cache_bytes: int  # of its largest cache
    num_sms: int
    compute_capability: tuple[int, int]

    def __post_init__(self) -> None:
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
        """FLOP/s of the workload's matrix products; None if the sheet has no value."""
        is_tf32 = workload.dtype == "float32" and workload.float32_matmul_precision != MATMUL_PRECISIONS[0]
        return self.flops_per_s.get(TF32 if is_tf32 else workload.dtype)


@dataclass(frozen=True, kw_only=True)
class Assumed:
    """A stand-in for a real device, and the packages that would have to be installed there."""

    sheet: DataSheet
    packages: list[str] = field(default_factory=list)  # requested packages that are not installed here


_ASSUMED: ContextVar[Assumed | None] = ContextVar("assumed", default=None)


def names() -> tuple[str, ...]:
    """Names of the data sheets, sorted."""
    return tuple(sorted(file.stem for file in FOLDER.glob("*.toml")))


def load(given: str) -> DataSheet:
    """Read the data sheet of that name, or that file.

    Raises:
        ValueError: there is no such sheet, or the file is malformed; the message names the error.
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
    except (msgspec.DecodeError, ValueError) as error:  # TOML errors too
        raise ValueError(f"{given} is no data sheet: {error}") from None


def assumed() -> Assumed | None:
    """The device that currently stands in for a real one, or None."""
    return _ASSUMED.get()


@contextmanager
def assuming(sheet: DataSheet) -> Iterator[Assumed]:
    """Answer implementations from a data sheet inside the context, as if every package was installed."""
    made = Assumed(sheet=sheet)
    before = _ASSUMED.set(made)
    try:
        yield made
    finally:
        _ASSUMED.reset(before)
