"""A policy: the fastest implementation at each measured shape of one machine, as a table in a JSON file.

A call uses the winner at the nearest measured shape of its kind (same device, dtype, direction, mask: see ShapeKey), if
every size of that shape is within a factor of 2; any other call uses PyTorch's own choice (`sdpa`). The file is data:
nothing in it is executed, and it can only name installed implementations. It is valid for the machine and the versions
with which it was measured.
"""

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from attnbench.units import grouped
from attnbench.workloads.workload import Workload

FORMAT = 3
OTHERWISE = "sdpa"  # PyTorch's own choice, used where nothing else was measurably faster nearby
REACH = 1.0 + 1e-9
"""The largest distance of each size from a measured one, in log2: a factor of 2, plus rounding error."""
LEARN = "`attnbench fastest --sweep NAME --policy FILE`"
_NAME = re.compile(r"\w+(\+\w+)?")

Floats = NDArray[np.float64]
Count = Annotated[int, msgspec.Meta(ge=1)]
ShapeKey = tuple[str, str, str, Literal["one", "many"], Literal["none", "causal", "other"], bool, int]
"""The facts that two calls must share for a measurement of one to apply to the other: a `Row`'s first seven fields."""
Shape = tuple[int, int, int, int]
"""The sizes that define the distance between two calls with equal ShapeKey: a `Row`'s `batch_heads` to `head_dim`."""


class Row(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The fastest implementation at one measured shape, and its time divided by that of PyTorch's own choice.

    Raises:
        ValueError: the winner is not the name of an implementation.
    """

    device: str
    dtype: str
    direction: str
    queries: Literal["one", "many"]  # one: decoding
    mask: Literal["none", "causal", "other"]
    is_grouped: bool
    num_threads: Count
    batch_heads: Count  # batch_size * num_heads
    seq_len: Count
    kv_len: Count
    head_dim: Count
    winner: str
    ratio: Annotated[float, msgspec.Meta(gt=0)]

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.winner):
            raise ValueError(f"winner {self.winner!r} is not allowed: a policy names installed implementations")

    @property
    def shape_key(self) -> ShapeKey:
        """The kind of call that the row is about: the row's first seven fields."""
        return self.device, self.dtype, self.direction, self.queries, self.mask, self.is_grouped, self.num_threads

    @property
    def shape(self) -> Shape:
        """The sizes of the call: B * H, T, S and K."""
        return self.batch_heads, self.seq_len, self.kv_len, self.head_dim


class Regret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Extra time of a policy's choices compared with the winner at each measured shape, as a share: 0.02 is 2 %.

    Computed leave-one-out: the choice at each shape comes from the table without that shape.
    """

    mean: float  # geometric mean over the shapes
    worst: float
    sdpa_mean: float  # the mean if sdpa is always called
    sdpa_worst: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The runs that a policy was learned from."""

    runs: tuple[str, ...]
    candidates: tuple[str, ...]  # all that were measured, including losers
    fingerprints: tuple[str, ...] = ()  # environments of the runs, including settings and threads
    smallest_effect: float = 0.02  # smaller gains do not win against sdpa
    seconds: float = 0.0  # total time of the runs


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False, dict=True):
    """A table of winners and its evidence.

    Raises:
        ValueError: the columns are not those of this version.
    """

    format: int = FORMAT
    machine: str  # Environment.machine_fingerprint: a policy holds for one machine
    date: str
    environment: dict[str, Any]  # the facts behind the fingerprint, for readers
    num_threads: Count  # number of threads of workloads with num_threads=0
    evidence: Evidence
    regret: Regret
    columns: tuple[str, ...] = Row.__struct_fields__
    rows: tuple[Row, ...]

    def __post_init__(self) -> None:
        if self.columns != Row.__struct_fields__:
            raise ValueError(f"its columns are not {', '.join(Row.__struct_fields__)}")

    def choose(self, workload: Workload) -> str:
        """Return the name of the implementation to call for query, key and value of that workload."""
        rows, logs = self._kinds.get(shape_key_of(workload, self.num_threads), ((), np.empty((0, 4))))  # no row
        row = nearest(logs, logs_of([shape_of(workload)])[0]) if is_plain(workload) else None
        return OTHERWISE if row is None else rows[row].winner

    @cached_property
    def _kinds(self) -> dict[ShapeKey, tuple[Sequence[Row], Floats]]:
        """For each kind of call, its N rows, and the binary logarithms of their sizes (N, 4)."""
        kinds = grouped(self.rows, lambda row: row.shape_key)
        with_logs: dict[ShapeKey, tuple[Sequence[Row], Floats]] = {}
        for kind, rows in kinds.items():
            with_logs[kind] = rows, logs_of([row.shape for row in rows])
        return with_logs

    def save(self, path: Path | str) -> None:
        """Write the policy as JSON, one line per row; creates the folder of `path`."""
        fields = msgspec.to_builtins(self)
        rows = ",\n".join(f"    {json.dumps(row)}" for row in fields.pop("rows"))
        lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]
        text = ",\n".join([*lines, f'  "rows": [\n{rows}\n  ]'])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Policy":
        """Read a policy from its JSON file.

        Raises:
            ValueError: the file cannot be read, has another format version, or is damaged.
        """
        try:
            content = Path(path).read_bytes()
            version = msgspec.json.decode(content, type=dict[str, Any]).get("format", 0)
            if version != FORMAT:
                raise ValueError(f"it has format {version}, and this version of attnbench reads format {FORMAT}")  # noqa: TRY301 - it needs the path, too
            return msgspec.json.decode(content, type=cls)
        except OSError as error:
            raise ValueError(f"cannot read the policy {path}: {error.strerror}; learn it again with {LEARN}") from None
        except ValueError as error:  # also covers the errors of msgspec and Unicode
            raise ValueError(f"cannot use the policy {path}: {error}; learn it again with {LEARN}") from None


def nearest(logs: Floats, point: Floats) -> int | None:
    """Return the index of the row of `logs` (N, sizes) nearest to `point` (sizes,); None if none is within REACH."""
    apart = np.abs(logs - point)
    near = np.flatnonzero((apart <= REACH).all(axis=1))
    return int(near[(apart[near] ** 2).sum(axis=1).argmin()]) if near.size else None


def logs_of(shapes: Sequence[Shape]) -> Floats:
    """Return the binary logarithms (N, sizes) of N shapes."""
    return np.log2(np.array(shapes, dtype=np.float64))


def is_plain(workload: Workload) -> bool:
    """Return whether policies apply: K = V, and default scope, dropout, rotary, sinks, batch and matmul precision."""
    usual = Workload()
    same = ("scope", "dropout", "rotary", "sinks", "batch", "float32_matmul_precision")
    return workload.value_dim == workload.head_dim and all(
        getattr(workload, axis) == getattr(usual, axis) for axis in same
    )


def shape_key_of(workload: Workload, num_threads: int) -> ShapeKey:
    """Return the kind of a workload's call; `num_threads` replaces the workload's own number if that is 0."""
    return (
        workload.device.partition(":")[0],
        workload.dtype,
        workload.direction,
        "one" if workload.seq_len == 1 else "many",
        "none" if workload.mask == "none" else "causal" if workload.mask == "causal" else "other",
        workload.num_kv_heads < workload.num_heads,
        workload.num_threads or num_threads,
    )


def shape_of(workload: Workload) -> Shape:
    """Return the sizes of a workload's call: (B * H, T, S, K)."""
    return workload.batch_size * workload.num_heads, workload.seq_len, workload.kv_len, workload.head_dim
