"""A workload: one point of a sweep, with every axis checked. Knows nothing of torch."""

import hashlib
import re
from collections.abc import Iterator

import msgspec

from attnbench.workloads.masks import Mask, parse_mask

DTYPES = ("float64", "float32", "bfloat16", "float16")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DIRECTIONS = ("inference", "forward", "backward", "forward_backward")
BIASES = ("all", "qkv", "out", "none")
SCOPES = ("attention", "module")
LAYOUTS = ("contiguous", "transposed", "expanded", "broadcast")
MATMUL_PRECISIONS = ("highest", "high", "medium")
DEFAULT_HEAD_DIM = 64
HEAD_AXES = {"scope", "direction", "device", "dtype", "batch_size", "seq_len", "num_heads", "head_dim"}
"""Axes that every id names."""
SHORT_NAMES = {
    "kv_len": "s",
    "num_kv_heads": "g",
    "value_dim": "v",
    "embed_dim": "d",
    "mask": "",
    "float32_matmul_precision": "matmul_",
}
LONGEST_PART = 40
LARGEST = 2**31


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a sweep. A length, count or width given as 0 takes the value its comment names.

    Raises:
        ValueError: a value or a combination that no attention can have; the message says what is allowed.
    """

    batch_size: int = 1
    seq_len: int = 512
    kv_len: int = 0  # 0: as seq_len
    num_heads: int = 8
    num_kv_heads: int = 0  # 0: as num_heads
    head_dim: int = 0  # 0: embed_dim / num_heads, or 64 where embed_dim is not given either
    value_dim: int = 0  # 0: as head_dim
    embed_dim: int = 0  # 0: num_heads * head_dim
    dtype: str = "float32"
    device: str = "cpu"  # a file in devices/, or NAME:N for one of several; planning refuses others
    mask: str = "none"
    dropout: float = 0.0
    direction: str = "forward"
    scope: str = "attention"
    bias: str = "all"  # which projections have one; scope attention has no projections: always all
    num_threads: int = 0  # 0: one for each physical core
    seed: int = 0
    layout: str = "contiguous"  # how query, key and value lie in memory; scope module makes its own: always contiguous
    float32_matmul_precision: str = "highest"  # as in torch.set_float32_matmul_precision; of float32 alone

    def __post_init__(self) -> None:
        """Check each axis, fill in the ones that follow from others, check the combination."""
        for axis in ("batch_size", "seq_len", "num_heads"):
            _require(1 <= getattr(self, axis) <= LARGEST, axis, getattr(self, axis), "a whole number from 1 to 2^31")
        for axis in ("kv_len", "num_kv_heads", "head_dim", "value_dim", "embed_dim", "num_threads", "seed"):
            _require(0 <= getattr(self, axis) <= LARGEST, axis, getattr(self, axis), "a whole number from 0 to 2^31")
        _require(self.dtype in DTYPES, "dtype", self.dtype, "one of " + ", ".join(DTYPES))
        _require(self.direction in DIRECTIONS, "direction", self.direction, "one of " + ", ".join(DIRECTIONS))
        _require(self.scope in SCOPES, "scope", self.scope, "one of " + ", ".join(SCOPES))
        _require(self.bias in BIASES, "bias", self.bias, "one of " + ", ".join(BIASES))
        _require(
            bool(re.fullmatch(r"[a-z]\w*(:\d+)?", self.device)), "device", self.device, "NAME or NAME:N, as in cuda:1"
        )
        _require(0.0 <= self.dropout < 1.0, "dropout", self.dropout, "a probability from 0 up to, not including, 1")
        _require(self.layout in LAYOUTS, "layout", self.layout, "one of " + ", ".join(LAYOUTS))
        self._check_precision()
        if self.scope == "attention":
            msgspec.structs.force_setattr(self, "bias", "all")
        self._fill("kv_len", self.seq_len)
        self._fill("num_kv_heads", self.num_heads)
        self._fill("head_dim", self._head_dim())
        self._fill("value_dim", self.head_dim)
        self._fill("embed_dim", self.num_heads * self.head_dim)
        shares = {"expanded": self.num_kv_heads, "broadcast": self.batch_size}.get(self.layout, 0)
        if self.scope == "module" or shares == 1:  # one alone is shared with nobody
            msgspec.structs.force_setattr(self, "layout", "contiguous")
        if self.num_heads % self.num_kv_heads:
            message = f"num_heads={self.num_heads} does not divide into num_kv_heads={self.num_kv_heads} equal groups"
            raise ValueError(f"{message}; choose num_kv_heads among the divisors of num_heads")
        mask = parse_mask(self.mask)
        mask.check(self.batch_size, self.seq_len, self.kv_len)
        msgspec.structs.force_setattr(self, "mask", str(mask))

    def _check_precision(self) -> None:
        given, allowed = self.float32_matmul_precision, "one of " + ", ".join(MATMUL_PRECISIONS)
        _require(given in MATMUL_PRECISIONS, "float32_matmul_precision", given, allowed)
        if given != MATMUL_PRECISIONS[0] and self.dtype != "float32":
            message = (
                f"float32_matmul_precision={given} is not allowed with dtype={self.dtype}, which it does not touch"
            )
            raise ValueError(f"{message}; choose dtype=float32, or float32_matmul_precision={MATMUL_PRECISIONS[0]}")

    def _fill(self, axis: str, value: int) -> None:
        if getattr(self, axis) == 0:
            msgspec.structs.force_setattr(self, axis, value)

    def _head_dim(self) -> int:
        if self.embed_dim == 0:
            return DEFAULT_HEAD_DIM
        if self.head_dim == 0 and self.embed_dim % self.num_heads:
            message = f"embed_dim={self.embed_dim} does not divide into num_heads={self.num_heads} heads"
            raise ValueError(f"{message}; choose num_heads among the divisors of embed_dim, or give head_dim")
        return self.embed_dim // self.num_heads

    @property
    def id(self) -> str:
        """A stable name, fit for a path: the leading axes always, the others where they differ from the default."""
        head = f"{self.scope}-{self.direction}-{self.device.replace(':', '')}-{self.dtype}"
        sizes = f"b{self.batch_size}-t{self.seq_len}-h{self.num_heads}-k{self.head_dim}"
        return "-".join([head, sizes, *self._unusual()])

    def _unusual(self) -> Iterator[str]:
        """Each axis that the head does not name and that is not as usual: its short or whole name, and its value."""
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            usual = {
                "kv_len": self.seq_len,
                "num_kv_heads": self.num_heads,
                "value_dim": self.head_dim,
                "embed_dim": self.num_heads * self.head_dim,
            }.get(field.name, field.default)
            if field.name not in HEAD_AXES and value != usual:
                yield _in_path(f"{SHORT_NAMES.get(field.name, field.name)}{value}")

    @property
    def place(self) -> tuple[str, str, int]:
        """Where and in what it is computed: device, dtype and threads, the key of the ceilings that hold for it."""
        return self.device, self.dtype, self.num_threads

    @property
    def mask_rule(self) -> Mask:
        """The mask as data."""
        return parse_mask(self.mask)

    def axes(self) -> dict[str, int | float | str]:
        """Every axis and its value, in the order of the fields."""
        return msgspec.structs.asdict(self)


def _in_path(part: str) -> str:
    """Fit for a path: `padding(3,4)` becomes padding.3.4, and what is long is cut and ends in a digest."""
    name = re.sub(r"[^a-z0-9_.]", "", re.sub(r"[(,+]", ".", part))
    digest = hashlib.sha256(part.encode()).hexdigest()[:12]
    return name if len(name) <= LONGEST_PART else f"{name[:24]}.{digest}"


def _require(holds: bool, axis: str, given: object, allowed: str) -> None:  # noqa: FBT001 - reads as an assertion
    if not holds:
        raise ValueError(f"{axis}={given} is not allowed: {axis} is {allowed}")
