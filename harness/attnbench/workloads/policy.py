"""A policy: which implementation to call at which shapes on one machine, as a short list of rules in a JSON file.

It is data: conditions are compared, nothing in the file is executed, and it can name no code outside of the
implementations that are installed. It holds for the machine and the versions that it was learned on, and for the kinds
of calls and the ranges of sizes that were measured there; anywhere else the choice is PyTorch's own.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from attnbench import plugins
from attnbench.plugins import unknown
from attnbench.workloads.workload import DTYPE_BYTES, Workload

VARIABLE = "ATTNBENCH_POLICY"
USUAL_PATH = Path("results", "policy.json")
FORMAT = 1
OTHERWISE = "sdpa"
"""PyTorch's own choice: taken where no rule applies."""
ITSELF = "fastest"
"""The implementation that follows a policy, which therefore cannot name it."""
KINDS = ("device", "dtype", "direction", "mask")
"""Axes of a policy that are compared for equality; the mask is `none`, `causal` or `other`."""
SIZES = ("seq_len", "kv_len", "batch_heads", "head_dim", "group_size", "num_threads")
"""Axes that are numbers: batch_heads is batch_size * num_heads, group_size is num_heads / num_kv_heads."""
DERIVED = ("pairs", "score_bytes")
"""More of them: seq_len * kv_len, and the bytes of the score matrix of all heads."""
NUMBERS = (*SIZES, *DERIVED)
AXES = (*KINDS, *NUMBERS)
SIGNS = ("is not", "is", "<=", ">")
_CONDITION = re.compile(r"(\w+) (is not|is|<=|>) (\S+)")
_NAME = re.compile(r"\w+(\+\w+)?")

Values = dict[str, int | str]
"""The value of each axis of a policy."""


class Condition(msgspec.Struct, frozen=True):
    """One comparison; in a file it is a text such as `seq_len <= 512` or `dtype is not float16`."""

    axis: str
    sign: str
    value: int | str

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read the text.

        Raises:
            ValueError: it is none; the message says what is allowed.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise ValueError(f"the condition {text!r} is not readable: write AXIS SIGN VALUE, as in 'seq_len <= 512'")
        axis, sign, value = found.groups()
        if axis not in AXES:
            raise ValueError(f"the condition {text!r}: {unknown('axis', axis, AXES)}")
        is_number = axis in NUMBERS
        if is_number != (sign in {"<=", ">"}) or (is_number and not value.isdecimal()):
            allowed = "<= or > and a whole number" if is_number else "'is' or 'is not'"
            raise ValueError(f"the condition {text!r} is not allowed: {axis} takes {allowed}")
        return cls(axis, sign, int(value) if is_number else value)

    def __str__(self) -> str:
        """As in a file."""
        return f"{self.axis} {self.sign} {self.value}"

    def holds(self, values: Mapping[str, int | str]) -> bool:
        """Whether it is true of these values."""
        here: Any = values[self.axis]
        match self.sign:
            case "is":
                return bool(here == self.value)
            case "is not":
                return bool(here != self.value)
            case "<=":
                return bool(here <= self.value)
            case _:
                return bool(here > self.value)


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where all conditions hold, use this implementation."""

    when: tuple[str, ...]
    use: str
    num_workloads: int = 0  # that it was learned from
    ratio: float | None = None  # its time there divided by sdpa's, in the geometric mean


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


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False, dict=True):
    """Rules, tried in order, and what they rest on.

    Raises:
        ValueError: a rule or range is not readable, or names what is no implementation by its name.
    """

    format: int = FORMAT
    machine: str  # Environment.machine_fingerprint, which must be that of the process that follows it
    date: str
    environment: dict[str, Any]  # what the fingerprint is made of, to be read
    num_threads: int  # what num_threads=0 stands for
    evidence: Evidence
    regret: Regret
    covers: tuple[dict[str, str | tuple[int, int]], ...]  # by kinds: the sizes that were measured, from and to
    rules: tuple[Rule, ...]
    otherwise: str = OTHERWISE

    def __post_init__(self) -> None:
        """Check it."""
        if self.format != FORMAT:
            raise ValueError(f"format={self.format} is not known: this version reads format {FORMAT}; learn it again")
        for name in (*(rule.use for rule in self.rules), self.otherwise):
            if not _NAME.fullmatch(name) or name == ITSELF:
                raise ValueError(f"{name!r} is not allowed: a policy names installed implementations, but {ITSELF}")
        for cover in self.covers:
            if set(cover) != {*KINDS, *SIZES}:
                raise ValueError(f"{cover} is not readable: each of `covers` names {', '.join((*KINDS, *SIZES))}")
            for axis, value in cover.items():
                if isinstance(value, str) is not (axis in KINDS):
                    raise ValueError(f"{axis}={value} is not readable: give {'a text' if axis in KINDS else '[n, n]'}")
        assert self._parsed is not None  # raises

    @cached_property
    def _parsed(self) -> list[tuple[list[Condition], str]]:
        return [([Condition.parse(text) for text in rule.when], rule.use) for rule in self.rules]

    def choose(self, workload: Workload) -> str:
        """The name of the implementation to call for query, key and value of that workload."""
        if not is_plain(workload):
            return self.otherwise
        values = values_of(workload, self.num_threads)
        if not any(_covers(cover, values) for cover in self.covers):
            return self.otherwise
        for conditions, name in self._parsed:
            if all(each.holds(values) for each in conditions):
                return name
        return self.otherwise

    def save(self, path: Path | str) -> None:
        """Write it, one rule a line."""
        fields = msgspec.to_builtins(self)
        lines = []
        for name, value in fields.items():
            text = json.dumps(value)
            if isinstance(value, list | tuple) and value:
                text = "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
            lines.append(f"  {json.dumps(name)}: {text}")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

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
    same = ("scope", "dropout", "sinks", "page_size", "cache_dtype", "float32_matmul_precision")
    return workload.value_dim == workload.head_dim and all(
        getattr(workload, axis) == getattr(usual, axis) for axis in same
    )


def values_of(workload: Workload, num_threads: int) -> Values:
    """The axes of a policy; `num_threads` is what 0 stands for."""
    pairs = workload.seq_len * workload.kv_len
    batch_heads = workload.batch_size * workload.num_heads
    return {
        "device": workload.device.partition(":")[0],
        "dtype": workload.dtype,
        "direction": workload.direction,
        "mask": workload.mask if workload.mask in {"none", "causal"} else "other",
        "seq_len": workload.seq_len,
        "kv_len": workload.kv_len,
        "batch_heads": batch_heads,
        "head_dim": workload.head_dim,
        "group_size": workload.num_heads // workload.num_kv_heads,
        "num_threads": workload.num_threads or num_threads,
        "pairs": pairs,
        "score_bytes": batch_heads * pairs * DTYPE_BYTES[workload.dtype],
    }


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


def _covers(cover: Mapping[str, str | tuple[int, int]], values: Mapping[str, Any]) -> bool:
    for axis, known in cover.items():
        here = values[axis]
        if here != known if isinstance(known, str) else not known[0] <= here <= known[1]:
            return False
    return True
