"""A policy: which implementation to call at which shapes on one machine, as measurements in a JSON file.

For each kind of call the file has the workloads that were measured and how long each candidate took there, as a
multiple of PyTorch's own choice. Between them a Gaussian process interpolates the logarithms of these ratios; whoever
is expected to be the fastest, beyond the smallest effect and with some caution where little was measured nearby, is
called. It is data: nothing in the file is executed, and it can name no code outside of the implementations that are
installed. It holds for the machine and the versions that it was learned on, and for the kinds of calls and the ranges
of sizes that were measured there; anywhere else the choice is PyTorch's own.

Source: C. Rasmussen and C. Williams, Gaussian Processes for Machine Learning, 2006, algorithm 2.1 and equation 4.17.
"""

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from attnbench import plugins
from attnbench.workloads.workload import Workload

VARIABLE = "ATTNBENCH_POLICY"
USUAL_PATH = Path("results", "policy.json")
FORMAT = 2
OTHERWISE = "sdpa"
"""PyTorch's own choice: taken where nothing else is expected to be faster."""
ITSELF = "fastest"
"""The implementation that follows a policy, which therefore cannot name it."""
KINDS = ("device", "dtype", "direction", "queries")
"""Axes by which calls are of one kind; queries are `one`, as in decoding, or `many`."""
SIZES = ("batch_heads", "seq_len", "kv_len", "head_dim", "group_size", "num_threads")
"""Axes that are numbers: batch_heads is batch_size * num_heads, group_size is num_heads / num_kv_heads."""
AXES = ("mask", *SIZES)
"""Of a workload within its kind; the mask is `none`, `causal` or `other`."""
COORDINATES = (
    "batch_heads",
    "seq_len",
    "keys_per_query",
    "head_dim",
    "group_size",
    "num_threads",
    "is_grouped",
    "is_causal",
    "is_other_mask",
)
"""Where a workload lies among others: natural logarithms of sizes, then 0 or 1."""
CAUTION = 0.5
"""So many standard deviations are added to what is expected of a candidate: what is not known is not chosen."""
LOST = math.log(2.5)
"""The log ratio of a candidate that did not run at a workload, or was left out as predicted to take this or more."""
LEAST_SPREAD = 0.02
"""Log ratios of a candidate are taken to spread at least so far."""
UNSURE = 3.0
"""A candidate may be faster than is expected of it by so many standard deviations..."""
NEARLY = 0.4
"""... and by a log ratio of so much; whoever then may be the fastest is a contender. Who was never that near to sdpa in
any workload of a kind is none there."""
SURPRISE = 2.0
"""The standard deviation of what was expected is at least such that a trial is no more than so many of them off."""
HOLDS = 0.08
"""A trial is of one process, and another may be off by as much: who is faster than sdpa by less is not called then."""
REACH = 4.0
"""Contenders are named up to so many times beyond the sizes that were measured."""
_NAME = re.compile(r"\w+(\+\w+)?")

Values = dict[str, int | str]
"""The value of each axis of a policy."""
Floats = NDArray[np.float64]


class Kind(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False, dict=True):
    """What was measured of one kind of call, and how it is interpolated.

    Raises:
        ValueError: a name is none of an implementation, or a field does not have what it should.
    """

    device: str
    dtype: str
    direction: str
    queries: str
    chosen: dict[str, int]  # at how many of the workloads each implementation is chosen: to be read
    candidates: tuple[str, ...]  # besides sdpa
    scales: dict[str, float]  # by coordinate: how far apart workloads are still alike
    signal: float  # variance of what is smooth, and of what is not, relative to that of the log ratios
    noise: float
    axes: tuple[str, ...] = AXES
    workloads: tuple[tuple[str | int | float | None, ...], ...]  # values of `axes`; then candidates' times over sdpa's

    def __post_init__(self) -> None:
        """Check it."""
        for name in self.candidates:
            _check_name(name)
        if self.axes != AXES or set(self.scales) != set(COORDINATES):
            raise ValueError(f"a kind names the axes {', '.join(AXES)} and the scales {', '.join(COORDINATES)}")
        if not (min(self.scales.values()) > 0 and self.signal > 0 and self.noise > 0):
            raise ValueError("scales, signal and noise are above 0")
        for row in self.workloads:
            sizes, ratios = row[1 : len(AXES)], row[len(AXES) :]
            is_whole = len(ratios) == len(self.candidates) and isinstance(row[0], str)
            numbers = [*sizes, *(each for each in ratios if each is not None)]
            if not is_whole or not all(isinstance(each, int | float) and 0 < each < math.inf for each in numbers):
                raise ValueError(
                    f"the workload {list(row)} is not readable: {', '.join(AXES)}, then a ratio or null each"
                )

    @property
    def key(self) -> tuple[str, ...]:
        """What makes calls be of this kind, in the order of KINDS."""
        return self.device, self.dtype, self.direction, self.queries

    def covers(self, values: Mapping[str, int | str], reach: float = 1.0) -> bool:
        """Whether that mask was measured, and all sizes lie within what was, or within `reach` times beyond it."""
        is_inside = all(low / reach <= int(values[axis]) <= high * reach for axis, (low, high) in self._ranges.items())
        return is_inside and values["mask"] in self._masks

    def choose(self, values: Mapping[str, int | str], smallest_effect: float) -> str:
        """Who is called at that workload of this kind; where it was measured, it must have been faster there, too."""
        if not self.candidates or not self.covers(values):
            return OTHERWISE
        means, spreads = self.expected(coordinates(values)[None])
        known = self._known.get(tuple(values[axis] for axis in AXES), np.array(-math.inf))
        costs = np.maximum(means[0] + CAUTION * spreads[0], known)
        best = int(costs.argmin())
        return self.candidates[best] if costs[best] < -math.log1p(smallest_effect) else OTHERWISE

    def contenders(self, values: Mapping[str, int | str], smallest_effect: float) -> tuple[str, ...]:
        """Who may be the fastest at that workload of this kind: one that is sure, or several, sdpa first.

        Where several may be, a trial on the call's own tensors decides (contract/trial.py).
        """
        if tuple(values[axis] for axis in AXES) in self._known:
            return (self.choose(values, smallest_effect),)
        if not self.candidates or not self.covers(values, REACH):
            return (OTHERWISE,)
        means, spreads = self.expected(coordinates(values)[None], of_one=True)
        latest = min(0.0, float((means + UNSURE * spreads).min()))
        earliest = (means - UNSURE * spreads)[0] - NEARLY
        near = [name for name, log in zip(self.candidates, earliest, strict=True) if log < latest]
        return (OTHERWISE, *near)

    def settled(
        self, values: Mapping[str, int | str], tried: Mapping[str, tuple[float, float]], smallest_effect: float
    ) -> str:
        """Who is called after a trial, from log ratios with standard deviations of those who were tried.

        Each is weighed with what was expected: a trial that was disturbed says little, and one that says something
        else quite clearly says more, since what is interpolated may be off by more than its standard deviations.
        """
        means, spreads = self.expected(coordinates(values)[None], of_one=True)
        costs = {}
        for name, mean, spread in zip(self.candidates, means[0].tolist(), spreads[0].tolist(), strict=True):
            if name in tried:
                log, doubt = tried[name]
                trust = 1 / doubt**2
                prior = 1 / max(spread, abs(log - mean) / SURPRISE) ** 2
                costs[name] = (trust * log + prior * mean) / (trust + prior)
        best = min(costs, key=costs.__getitem__, default=OTHERWISE)
        return best if costs.get(best, 0.0) < -math.log1p(max(smallest_effect, HOLDS)) else OTHERWISE

    def expected(self, places: Floats, *, of_one: bool = False) -> tuple[Floats, Floats]:
        """Log ratios (N, candidates) that are expected at coordinates (N, COORDINATES), and standard deviations.

        They are those of what is smooth, or `of_one` workload, with what is not.
        """
        scales, means, spreads, lower, weights = self._solved
        near = self.signal * correlation(places, self._places, scales)
        reduced = np.linalg.solve(lower, near.T)
        variance = np.maximum(self.signal - (reduced**2).sum(axis=0), 0.0) + of_one * self.noise
        return means + spreads * (near @ weights), spreads * np.sqrt(variance)[:, None]

    @cached_property
    def _values(self) -> list[Values]:
        return [dict(zip(AXES, row, strict=False)) for row in self.workloads]  # type: ignore[arg-type] # checked above

    @cached_property
    def _places(self) -> Floats:
        return np.array([coordinates(each) for each in self._values])

    @cached_property
    def _logs(self) -> Floats:
        ratios = [row[len(AXES) :] for row in self.workloads]
        return np.array([[LOST if each is None else math.log(float(each)) for each in row] for row in ratios])

    @cached_property
    def _known(self) -> dict[tuple[int | str, ...], Floats]:
        return {tuple(each.values()): logs for each, logs in zip(self._values, self._logs, strict=True)}

    @cached_property
    def _masks(self) -> frozenset[str]:
        return frozenset(str(each["mask"]) for each in self._values)

    @cached_property
    def _ranges(self) -> dict[str, tuple[int, int]]:
        columns = {axis: [int(each[axis]) for each in self._values] for axis in SIZES}
        return {axis: (min(column), max(column)) for axis, column in columns.items()}

    @cached_property
    def _solved(self) -> tuple[Floats, Floats, Floats, Floats, Floats]:
        logs = self._logs
        scales = np.array([self.scales[each] for each in COORDINATES])
        means: Floats = logs.mean(axis=0)
        spreads: Floats = np.maximum(logs.std(axis=0), LEAST_SPREAD)
        matrix = self.signal * correlation(self._places, self._places, scales) + self.noise * np.eye(len(logs))
        lower: Floats = np.linalg.cholesky(matrix).astype(np.float64)
        weights: Floats = np.linalg.solve(lower.T, np.linalg.solve(lower, (logs - means) / spreads))
        return scales, means, spreads, lower, weights


class Regret(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much longer calls take than with the fastest of all candidates, as a share: 0.02 is 2 %.

    Each workload is judged by a policy that was learned without it. What seems the fastest by noise counts as such.
    """

    mean: float  # in the geometric mean over the workloads
    worst: float
    sdpa_mean: float  # the same where sdpa is always called
    sdpa_worst: float


class Evidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a policy was learned from."""

    runs: tuple[str, ...]
    num_workloads: int
    candidates: tuple[str, ...]  # that were measured, the slower ones included
    fingerprints: tuple[str, ...] = ()  # of the runs' environments, settings and threads included
    smallest_effect: float = 0.02  # what is faster by less is a tie, and ties are sdpa's


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """What was measured, kind by kind, and what it rests on.

    Raises:
        ValueError: it has another format, or names what is no implementation by its name.
    """

    format: int = FORMAT
    machine: str  # Environment.machine_fingerprint, which must be that of the process that follows it
    date: str
    environment: dict[str, Any]  # what the fingerprint is made of, to be read
    num_threads: int  # what num_threads=0 stands for
    evidence: Evidence
    regret: Regret
    kinds: tuple[Kind, ...]
    otherwise: str = OTHERWISE

    def __post_init__(self) -> None:
        """Check it."""
        if self.format != FORMAT:
            raise ValueError(f"format={self.format} is not known: this version reads format {FORMAT}; learn it again")
        _check_name(self.otherwise)

    def choose(self, workload: Workload) -> str:
        """The name of the implementation to call for query, key and value of that workload."""
        kind, values = self._kind(workload)
        return self.otherwise if kind is None else kind.choose(values, self.evidence.smallest_effect)

    def contenders(self, workload: Workload) -> tuple[str, ...]:
        """Who may be the fastest: the name of one that is sure, or those of several, PyTorch's own choice first."""
        kind, values = self._kind(workload)
        return (self.otherwise,) if kind is None else kind.contenders(values, self.evidence.smallest_effect)

    def settled(self, workload: Workload, tried: Mapping[str, tuple[float, float]]) -> str:
        """Who is called after a trial of contenders; PyTorch's own choice where none of the others is in it."""
        kind, values = self._kind(workload)
        return self.otherwise if kind is None else kind.settled(values, tried, self.evidence.smallest_effect)

    def _kind(self, workload: Workload) -> tuple[Kind | None, Values]:
        """What was measured of its kind, if anything, and its axes."""
        values = values_of(workload, self.num_threads)
        key = tuple(values[axis] for axis in KINDS)
        return next((kind for kind in self.kinds if kind.key == key and is_plain(workload)), None), values

    def save(self, path: Path | str) -> None:
        """Write it, one workload a line."""
        fields = msgspec.to_builtins(self)
        kinds = [_lines(kind, "workloads", "    ") for kind in fields.pop("kinds")]
        text = ",\n".join([*_fields(fields, "  "), '  "kinds": [\n' + ",\n".join(kinds) + "\n  ]"])
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{\n" + text + "\n}\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path | str) -> "Policy":
        """Read it.

        Raises:
            ValueError: there is no such file, or it is damaged.
        """
        again = "learn it again with `attnbench fastest --sweep NAME --policy FILE`"
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except OSError as error:
            raise ValueError(f"cannot read the policy {path}: {error.strerror}; {again}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, ValueError) as error:
            raise ValueError(f"the policy {path} is not readable: {error}; {again}") from None


def is_plain(workload: Workload) -> bool:
    """Whether query, key and value, their mask and the scale are all that it has: what a policy chooses for."""
    usual = Workload()
    same = ("scope", "dropout", "rotary", "sinks", "page_size", "cache_dtype", "float32_matmul_precision")
    return workload.value_dim == workload.head_dim and all(
        getattr(workload, axis) == getattr(usual, axis) for axis in same
    )


def values_of(workload: Workload, num_threads: int) -> Values:
    """The axes of a policy; `num_threads` is what 0 stands for."""
    return {
        "device": workload.device.partition(":")[0],
        "dtype": workload.dtype,
        "direction": workload.direction,
        "queries": "one" if workload.seq_len == 1 else "many",
        "mask": workload.mask if workload.mask in {"none", "causal"} else "other",
        "batch_heads": workload.batch_size * workload.num_heads,
        "seq_len": workload.seq_len,
        "kv_len": workload.kv_len,
        "head_dim": workload.head_dim,
        "group_size": workload.num_heads // workload.num_kv_heads,
        "num_threads": workload.num_threads or num_threads,
    }


def coordinates(values: Mapping[str, int | str]) -> Floats:
    """Where a workload lies among others (COORDINATES,)."""
    sizes = {axis: math.log(float(values[axis])) for axis in SIZES}
    return np.array(
        [
            sizes["batch_heads"],
            sizes["seq_len"],
            sizes["kv_len"] - sizes["seq_len"],
            sizes["head_dim"],
            sizes["group_size"],
            sizes["num_threads"],
            float(sizes["group_size"] > 0),
            float(values["mask"] == "causal"),
            float(values["mask"] == "other"),
        ]
    )


def correlation(places: Floats, others: Floats, scales: Floats) -> Floats:
    """How alike workloads at coordinates (N, D) are to those at (M, D): the Matern kernel of order 5/2 (N, M)."""
    square = (((places[:, None] - others[None]) / scales) ** 2).sum(axis=2)
    distance = np.sqrt(5 * square)
    found: Floats = (1 + distance + distance**2 / 3) * np.exp(-distance)
    return found


def default_path() -> Path | None:
    """The file that ATTNBENCH_POLICY names, else results/policy.json if it exists; None: no policy is followed."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    return USUAL_PATH if USUAL_PATH.exists() else None


def digest(spec: str) -> str:
    """That of the source file of a spec (plugins.py); of what follows the usual policy, of both, since both decide."""
    own, path = plugins.digest(spec), default_path()
    if plugins.split(plugins.variant(spec)[0]) != (None, ITSELF) or path is None or not path.exists():
        return own
    return hashlib.sha256(own.encode() + path.read_bytes()).hexdigest()[:8]


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name == ITSELF:
        raise ValueError(f"{name!r} is not allowed: a policy names installed implementations, but {ITSELF}")


def _fields(fields: Mapping[str, Any], indent: str) -> list[str]:
    return [f"{indent}{json.dumps(name)}: {json.dumps(value)}" for name, value in fields.items()]


def _lines(fields: Mapping[str, Any], rows: str, indent: str) -> str:
    """A JSON object with a line for each field, and for each of the rows of one of them."""
    more = indent + "  "
    last = [more + " " + json.dumps(row, separators=(",", ":")) for row in fields[rows]]
    others = _fields({name: value for name, value in fields.items() if name != rows}, more)
    listed = f"{more}{json.dumps(rows)}: [\n" + ",\n".join(last) + f"\n{more}]"
    return f"{indent}{{\n" + ",\n".join([*others, listed]) + f"\n{indent}}}"
