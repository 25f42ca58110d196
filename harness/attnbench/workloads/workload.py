"""A workload: one point of a sweep, with every axis checked. Does not import torch."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import msgspec

from attnbench.units import did_you_mean
from attnbench.workloads.batch import (
    CACHE_DTYPES,
    CACHE_SCALES,
    NO_BATCH,
    PER_HEAD,
    PER_TENSOR,
    SAME,
    Cache,
    Request,
    at_longest,
    is_power_of_2,
    parse_batch,
    rule_of,
    written,
)
from attnbench.workloads.masks import LARGEST, Mask, SlidingWindow, parse_mask

DTYPES = ("float64", "float32", "bfloat16", "float16")
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
DIRECTIONS = ("inference", "forward", "backward", "forward_backward")
BIASES = ("all", "qkv", "out", "none")
ROTARIES = ("halves", "interleaved")
"""Pairing of a head's columns: first half with second half (Llama), or neighbours (GPT-J)."""
SCOPES = ("attention", "module")
LAYOUTS = ("contiguous", "transposed", "mixed", "expanded", "broadcast", "value_in_key")
SINKS = ("none", "learned")
MATMUL_PRECISIONS = ("highest", "high", "medium")
CHOICES = {
    "dtype": DTYPES,
    "direction": DIRECTIONS,
    "scope": SCOPES,
    "bias": BIASES,
    "layout": LAYOUTS,
    "sinks": SINKS,
    "float32_matmul_precision": MATMUL_PRECISIONS,
    "cache_dtype": CACHE_DTYPES,
    "cache_scales": CACHE_SCALES,
}
MOST_THREADS = 1024  # PyTorch crashes with too many
MOST_RANKS = 64  # each rank is a process
RANKS_TIMEOUT = "ATTNBENCH_RANKS_TIMEOUT"
"""The environment variable for the timeout of a call over several ranks, in seconds."""
FROM_1 = ("batch_size", "seq_len", "num_heads", "world_size")
"""Axes of whole numbers from 1 to LARGEST; `world_size` only to MOST_RANKS."""
FROM_0 = ("kv_len", "num_kv_heads", "head_dim", "value_dim", "embed_dim", "num_threads", "seed", "shared_prefix")
"""Axes of whole numbers from 0 to LARGEST; `num_threads` only to MOST_THREADS."""
DEFAULT_HEAD_DIM = 64
FOLLOWS = {
    "kv_len": "seq_len",
    "num_kv_heads": "num_heads",
    "value_dim": "head_dim",
    "embed_dim": "num_heads * head_dim",
}
"""Axes whose value, if given as 0, is computed from other axes, and the rule of each."""
HEAD_AXES = {"scope", "direction", "device", "dtype", "batch_size", "seq_len", "num_heads", "head_dim"}
"""Axes that appear in every id."""
SHORT_NAMES = {
    "kv_len": "s",
    "num_kv_heads": "g",
    "value_dim": "v",
    "embed_dim": "d",
    "mask": "",
    "float32_matmul_precision": "matmul_",
    "cache_scales": "",
}
"""By axis, the prefix of its value in an id; for any other axis, the prefix is its name."""
MASKS_BETWEEN = "|"
"""Separator of masks in a value of the axis mask, as in "none|causal": a check uses one of them on each workload."""
LONGEST_PART = 40  # characters; a longer part of an id is truncated
FEW_SCORES = 2**18  # up to this many scores, waking a second thread takes longer than it saves
DEFAULT_ROTARY_BASE = 1e4
_BIASES = re.compile(r"all|none|(?=[qkv])q?k?v?(\+out)?|out")
_ROTARY = re.compile(rf"({'|'.join(ROTARIES)})(?:\(([0-9.]+(?:e[0-9]+)?)\))?")


def rotary_text(style: str, base: float) -> str:
    """Return the text of a rotary embedding, as in "halves(1000000)"; parsing it again loses no digit of the base."""
    return f"{style}({int(base) if base.is_integer() else base})"


class Workload(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a sweep. If a length, count or width is 0, the comment at its field gives its value.

    Raises:
        ValueError: a value or a combination that no attention can have; the message lists the allowed ones.
    """

    batch_size: int = 1
    seq_len: int = 512
    kv_len: int = 0  # 0: the value of seq_len
    num_heads: int = 8
    num_kv_heads: int = 0  # 0: the value of num_heads
    head_dim: int = 0  # 0: embed_dim / num_heads, or 64 if embed_dim is 0 too
    value_dim: int = 0  # 0: the value of head_dim
    embed_dim: int = 0  # 0: num_heads * head_dim
    dtype: str = "float32"
    device: str = "cpu"  # name of a file in devices/, or NAME:N for the one with index N; checked when a run is planned
    mask: str = "none"
    dropout: float = 0.0
    direction: str = "forward"
    scope: str = "attention"
    bias: str = "all"  # projections with a bias: all, none, qkv, qv, qv+out; always all in scope attention
    num_threads: int = 0  # 0: one per physical core
    seed: int = 0
    layout: str = "contiguous"  # memory layout of query, key and value; always contiguous in scope module
    float32_matmul_precision: str = "highest"  # as in torch.set_float32_matmul_precision; for float32 only
    scale: float = 0.0  # factor of the products of query and key; 0: 1 / sqrt(head_dim)
    rotary: str = "none"  # halves(BASE) or interleaved(BASE): query and key are rotated by their positions
    sinks: str = "none"  # learned: a number for each head, the score of an extra key with value 0
    batch: str = NO_BATCH  # requests, as in 2q2k_32q1kv1k; replaces batch_size, seq_len and kv_len
    page_size: int = 0  # tokens in a page of the cache of keys and values: 16, 64, 256, ...; 0: no pages
    shared_prefix: int = 0  # number of first tokens that all requests share, with their pages
    cache_dtype: str = SAME  # dtype of stored keys and values: the call's, or 8 bits with scales
    cache_scales: str = PER_HEAD  # scales of an 8-bit cache: one for each head, or one for the tensor
    world_size: int = 1  # number of ranks that compute one call together

    def __post_init__(self) -> None:
        self._require_allowed_values()
        self._fill_sizes()
        self._fill_scale_bias_and_rotary()
        self._fill_layout()
        if self.num_heads % self.num_kv_heads:
            message = f"num_heads={self.num_heads} does not divide into num_kv_heads={self.num_kv_heads} equal groups"
            raise ValueError(f"{message}; choose num_kv_heads among the divisors of num_heads")
        if self.batch != NO_BATCH or self.page_size:
            self._fill_batch()
        elif self.shared_prefix:
            raise ValueError(f"shared_prefix={self.shared_prefix} is not allowed without pages: give page_size=16, too")
        mask = parse_mask(self.mask)
        mask.check(self.batch_size, self.seq_len, self.kv_len)
        msgspec.structs.force_setattr(self, "mask", str(mask))

    def _require_allowed_values(self) -> None:
        """Check the values of single axes, and whether the matmul precision fits the dtype."""
        axes = msgspec.structs.asdict(self)
        rules = [
            *((axis, 1 <= axes[axis] <= LARGEST, "a whole number from 1 to 2^31") for axis in FROM_1),
            *((axis, 0 <= axes[axis] <= LARGEST, "a whole number from 0 to 2^31") for axis in FROM_0),
            ("world_size", axes["world_size"] <= MOST_RANKS, f"a whole number from 1 to {MOST_RANKS}"),
            ("num_threads", axes["num_threads"] <= MOST_THREADS, f"a whole number from 0 to {MOST_THREADS}"),
            *(
                (axis, axes[axis] in choices, f"one of {', '.join(choices)}")
                for axis, choices in CHOICES.items()
                if axis != "bias"
            ),
            ("bias", _BIASES.fullmatch(self.bias) is not None, "all, none, or which have one: qkv, qv, qv+out, out"),
            ("rotary", self.rotary == "none" or self.rotary_base > 0, "none, halves(BASE) or interleaved(BASE)"),
            ("device", re.fullmatch(r"[a-z]\w*(:\d+)?", self.device), "NAME or NAME:N, as in cuda:1"),
            ("dropout", 0.0 <= self.dropout < 1.0, "a probability from 0 up to, not including, 1"),
            ("page_size", self.page_size == 0 or is_power_of_2(self.page_size), "0 for no pages, or a power of 2"),
            ("scale", 0.0 <= self.scale < math.inf, "a number above 0, or 0 for 1 / sqrt(head_dim)"),
        ]
        for axis, holds, allowed in rules:
            if not holds:
                hint = did_you_mean(str(axes[axis]), CHOICES.get(axis, ()))
                raise ValueError(f"{axis}={axes[axis]} is not allowed{hint}: {axis} is {allowed}")
        given, highest = self.float32_matmul_precision, MATMUL_PRECISIONS[0]
        if given != highest and self.dtype != "float32":
            message = (
                f"float32_matmul_precision={given} is not allowed with dtype={self.dtype}, which it does not affect"
            )
            raise ValueError(f"{message}; choose dtype=float32, or float32_matmul_precision={highest}")

    def _fill_sizes(self) -> None:
        """Replace each size of 0 by the value that follows from other sizes."""
        if self.embed_dim and not self.head_dim and self.embed_dim % self.num_heads:
            message = f"embed_dim={self.embed_dim} does not divide into num_heads={self.num_heads} heads"
            raise ValueError(f"{message}; choose num_heads among the divisors of embed_dim, or give head_dim")
        fill = partial(msgspec.structs.force_setattr, self)
        fill("head_dim", self.head_dim or self.embed_dim // self.num_heads or DEFAULT_HEAD_DIM)
        for axis, value in following(self.axes()).items():
            fill(axis, getattr(self, axis) or value)
            if axis in FROM_0 and getattr(self, axis) > LARGEST:
                parts = f"num_heads={self.num_heads} and head_dim={self.head_dim}"
                raise ValueError(f"{axis}={getattr(self, axis)} follows from {parts} and is more than 2^31: give less")

    def _fill_scale_bias_and_rotary(self) -> None:
        """Write scale, bias and rotary in a canonical form, so that equal workloads have the same id."""
        fill = partial(msgspec.structs.force_setattr, self)
        if math.isclose(self.scale, 1 / math.sqrt(self.head_dim), rel_tol=1e-9):
            fill("scale", 0.0)
        fill("bias", "all" if self.scope == "attention" or self.bias == "qkv+out" else self.bias)
        if self.rotary != "none":
            fill("rotary", rotary_text(self.rotary.partition("(")[0], self.rotary_base))
            if self.head_dim % 2 or self.kv_len != self.seq_len:
                given = f"rotary={self.rotary} with head_dim={self.head_dim}, seq_len={self.seq_len}"
                needed = "it needs an even head_dim, and kv_len = seq_len"
                raise ValueError(f"{given} and kv_len={self.kv_len} is not allowed: {needed}")

    def _fill_layout(self) -> None:
        """Check the layout; replace it, and the scales of the cache, by the default where they make no difference."""
        if self.layout == "value_in_key" and self.value_dim > self.head_dim:
            widths = f"head_dim={self.head_dim} and value_dim={self.value_dim}"
            raise ValueError(f"layout=value_in_key with {widths} is not allowed: a value is the first part of its key")
        shares = {"expanded": self.num_kv_heads, "broadcast": self.batch_size}.get(self.layout, 0)
        if self.scope == "module" or shares == 1:  # one head or batch row has nothing to share
            msgspec.structs.force_setattr(self, "layout", "contiguous")
        if self.cache_dtype == SAME:
            msgspec.structs.force_setattr(self, "cache_scales", PER_HEAD)

    def _fill_batch(self) -> None:
        """Check the axes that must fit a batch of requests, and set the axes that follow from it."""
        fill = partial(msgspec.structs.force_setattr, self)
        if self.batch == NO_BATCH and self.kv_len < self.seq_len:
            sizes = f"seq_len={self.seq_len} and kv_len={self.kv_len}"
            raise ValueError(f"page_size={self.page_size} with {sizes} is not allowed: give kv_len of at least seq_len")
        requests = parse_batch(self.batch) or (Request(self.seq_len, self.kv_len),) * self.batch_size
        needed = {"scope": "attention", "rotary": "none", "world_size": 1} | ({} if self.window else {"mask": "none"})
        for axis, value in needed.items():
            if getattr(self, axis) != value:
                why = "a query sees the keys of its request up to its own, or those of a sliding_window(n)"
                raise ValueError(
                    f"{axis}={getattr(self, axis)} with a batch of requests is not allowed: {why}; leave it out"
                )
        if self.direction not in {"inference", "forward"}:
            why = "a cache has no gradient: give direction=inference"
            raise ValueError(f"direction={self.direction} with a batch of requests is not allowed: {why}")
        shortest = min(each.total for each in requests if each.total)
        if self.shared_prefix and (not self.page_size or self.shared_prefix % self.page_size):
            given = f"shared_prefix={self.shared_prefix} with page_size={self.page_size}"
            raise ValueError(f"{given} is not allowed: give a page_size and a multiple of it, as in shared_prefix=32")
        if self.shared_prefix > shortest:
            given = f"shared_prefix={self.shared_prefix} with batch={written(requests)}"
            raise ValueError(f"{given} is not allowed: the shortest request has {shortest} keys; give at most that")
        for axis, value in {
            "batch": written(requests),
            "batch_size": 1,
            "seq_len": sum(each.new for each in requests),
            "kv_len": sum(each.total for each in requests),
            "direction": "inference",
            "layout": "contiguous",
        }.items():
            fill(axis, value)
        if self.kv_len > LARGEST:
            raise ValueError(f"batch={self.batch} is not allowed: it has more than 2^31 keys; give fewer")

    @property
    def id(self) -> str:
        """A stable name, usable in a path: the axes in HEAD_AXES, and other axes if they differ from their default.

        `padding(3,4)` becomes padding.3.4; a value that is too long is truncated and ends in a digest.
        """
        return _id(self)

    @property
    def place(self) -> tuple[str, str, int]:
        """Device, dtype and number of threads: the key of the measured hardware ceilings for this workload."""
        return self.device, self.dtype, self.num_threads

    @property
    def score_scale(self) -> float:
        """The factor of the products of query and key."""
        return float(self.scale or self.head_dim**-0.5)

    @property
    def biased(self) -> frozenset[str]:
        """The projections that have a bias: a subset of q, k, v and out."""
        bias = {"all": "qkv+out", "none": ""}.get(self.bias, self.bias)
        return frozenset(re.findall(r"out|[qkv]", bias))

    @property
    def rotary_base(self) -> float:
        """The base of the rotary angles, 10000 if `rotary` names none; 0 if `rotary` cannot be parsed."""
        match = _ROTARY.fullmatch(self.rotary)
        return float(match[2] or DEFAULT_ROTARY_BASE) if match else 0.0

    @property
    def requests(self) -> tuple[Request, ...]:
        """The requests in order; empty if the workload is not a batch of requests."""
        return parse_batch(self.batch)

    @property
    def cache(self) -> Cache | None:
        """The memory layout of the keys and values of a batch; None if the workload is not a batch of requests."""
        if not self.requests:
            return None
        return Cache(
            batch=self.batch,
            page_size=self.page_size,
            num_heads=self.num_kv_heads,
            shared_prefix=self.shared_prefix,
            dtype=self.cache_dtype,
            seed=self.seed,
            window=self.window,
            has_one_scale=self.cache_scales == PER_TENSOR,
        )

    @property
    def window(self) -> int:
        """The most keys that a query sees, its own included, if the mask is just `sliding_window`; otherwise 0."""
        mask = parse_mask(self.mask)
        return mask.arguments[0] if type(mask) is SlidingWindow else 0

    def groups(self) -> "dict[Request, Workload]":
        """Return, for each distinct request with new tokens, a dense workload with a batch row per equal request."""
        counts = Counter(each for each in self.requests if each.new)
        dense = {"batch": NO_BATCH, "page_size": 0, "shared_prefix": 0, "cache_dtype": SAME}
        return {
            request: msgspec.structs.replace(
                self,
                **dense,
                batch_size=count,
                seq_len=request.new,
                kv_len=request.total,
                mask=dense_mask(request, self.window),
            )
            for request, count in counts.items()
        }

    @property
    def operands(self) -> dict[str, tuple[int, ...]]:
        """Shapes, by name, of a call's inputs apart from query, key and value: sinks (H,) and learned biases."""
        sizes = (self.batch_size, self.seq_len, self.kv_len)
        sinks = {} if self.sinks == "none" else {"sinks": (self.num_heads,)}
        return sinks | self.mask_rule.parameters(sizes, self.num_heads)

    @property
    def mask_rule(self) -> Mask:
        """The parsed mask; in a batch of requests, the mask that separates them."""
        return rule_of(self.batch, self.window) if self.requests else parse_mask(self.mask)

    @property
    def longest(self) -> int:
        """The longer of the query and key lengths; in a batch of requests, the largest number of keys of a request."""
        return max(each.total for each in self.requests) if self.requests else max(self.seq_len, self.kv_len)

    @property
    def num_scores(self) -> int:
        """The number of scores: B * H * T * S."""
        return self.batch_size * self.num_heads * self.seq_len * self.kv_len

    def at_length(self, length: int) -> "Workload":
        """Scale the longer of seq_len and kv_len to `length` and the other in proportion, and adapt the mask.

        In a batch of requests, the longest request gets `length` keys, and the others are scaled in proportion.
        """
        if self.requests:
            batch = at_longest(self.requests, length)
            fewest = min(each.total - each.new for each in batch if each.total)
            prefix = min(self.shared_prefix, fewest // self.page_size * self.page_size) if self.page_size else 0
            return msgspec.structs.replace(self, batch=written(batch), shared_prefix=prefix)
        query_len, key_len = (max(1, round(length * each / self.longest)) for each in (self.seq_len, self.kv_len))
        mask = str(self.mask_rule.at_other_length())
        return msgspec.structs.replace(self, seq_len=query_len, kv_len=key_len, mask=mask)

    def with_axes(self, axes: Mapping[str, int | float | str]) -> "Workload":
        """Return the workload with other values of these axes; sizes that follow from others (FOLLOWS) are recomputed.

        Raises:
            ValueError: a value or a combination is not allowed.
        """
        given, follows = self.axes(), following(self.axes())
        kept = {axis: 0 if follows.get(axis) == value else value for axis, value in given.items()}
        return msgspec.structs.replace(self, **(kept | dict(axes)))

    def axes(self) -> dict[str, int | float | str]:
        """Return every axis and its value, in the order of the fields."""
        return msgspec.structs.asdict(self)


def dense_mask(request: Request, window: int = 0) -> str:
    """Return the mask of a dense call on one request: causal, aligned at the end; a single query sees every key.

    With a `window` above 0, a query sees only the last `window` keys up to its own.
    """
    at_end = "" if request.new == request.total else "_bottom_right"
    if window:
        return f"sliding_window{at_end}({window})"
    return "none" if request.new == 1 else f"causal{at_end}"


@lru_cache(maxsize=4096)
def _id(workload: Workload) -> str:
    """Return the id, memoized because many rows of a table share a workload."""
    head = f"{workload.scope}-{workload.direction}-{workload.device.replace(':', '')}-{workload.dtype}"
    parts = [head, f"b{workload.batch_size}-t{workload.seq_len}-h{workload.num_heads}-k{workload.head_dim}"]
    axes = workload.axes()
    usual = dict(zip(Workload.__struct_fields__, Workload.__struct_defaults__, strict=True)) | following(axes)
    for axis, value in axes.items():
        if axis not in HEAD_AXES and value != usual[axis]:
            part = f"{SHORT_NAMES.get(axis, axis)}{value}"
            name = re.sub(r"[^a-z0-9_.]", "", re.sub(r"[(,+]", ".", part))
            digest = hashlib.sha256(part.encode()).hexdigest()[:12]
            parts.append(name if len(name) <= LONGEST_PART else f"{name[:24]}.{digest}")
    return "-".join(parts)


def following(axes: Mapping[str, Any]) -> dict[str, int]:
    """Compute the values of the axes in FOLLOWS from the other axes, whose values are in `axes`."""

    def product(rule: str) -> int:
        return math.prod(axes[factor] for factor in rule.split(" * "))

    return {axis: product(rule) for axis, rule in FOLLOWS.items()}
