"""Prepare a batch of requests for a function, outside of its timed call.

A function that has a parameter for a block table gets the pool of pages as in an inference service; `plugins.PAGED` has
the names of its parameters. A dense function of query, key and value is called once for each distinct request: equal
requests are gathered into one dense batch before the call. Shapes: N requests, P pages; see contract/__init__.py.
"""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation, Weights
from attnbench.contract.declared import Declared, kind
from attnbench.contract.outside import Bound, Prepared
from attnbench.plugins import PAGED
from attnbench.workloads.batch import LARGEST_FLOAT8, SAME, Cache
from attnbench.workloads.masks import UNLIMITED, parse_mask
from attnbench.workloads.workload import Workload, dense_mask

NAN, ZEROS, MOVED, STRIDED = "", "zeros", "moved", "strided"
"""Values of `form` in `batch.Cache`, whose docstring describes them. With NAN, unused slots and pages contain NaN."""
TABLE = "block_table"
EMPTY = inspect.Parameter.empty


def names_of(function: object) -> dict[str, str]:
    """Map the members of PAGED that a function takes to its parameter names; return {} if it takes no block table.

    A parameter `key` or `value` is a pool only if the function has no parameter with another name of that pool.
    """
    try:
        parameters = inspect.signature(function).parameters  # type: ignore[arg-type] # any object
    except (TypeError, ValueError):
        return {}
    own = {name: next(filter(parameters.__contains__, aliases), "") for name, aliases in PAGED.items()}
    return {name: alias for name, alias in own.items() if alias} if own[TABLE] else {}


@dataclass(frozen=True, kw_only=True)
class PageSignature:
    """A function that reads keys and values from pages.

    `spec` is its name in messages, and `names` maps members of PAGED to the function's own parameter names.
    """

    function: Callable[..., Any]
    spec: str
    names: dict[str, str]
    declared: Declared = field(default_factory=Declared)

    def __post_init__(self) -> None:
        """Check that the harness can call the function with arguments of these names.

        Raises:
            ValueError: the query or a pool has no parameter, one is positional-only, or a required one is not in PAGED.
        """
        if missing := [name for name in ("query", "key_cache", "value_cache") if name not in self.names]:
            known = ", ".join("/".join(PAGED[name]) for name in missing)
            raise ValueError(f"{self.spec} names a block table and no {', '.join(missing)}: give it parameters {known}")
        parameters, own = inspect.signature(self.function).parameters, {*self.names.values()}
        by_place = [each.name for each in parameters.values() if each.kind is each.POSITIONAL_ONLY]
        unknown = [
            name
            for name, each in parameters.items()
            if each.default is EMPTY and name not in own and each.kind not in {each.VAR_KEYWORD, each.VAR_POSITIONAL}
        ]
        if by_place:
            raise ValueError(
                f"{self.spec} takes {', '.join(by_place)} by position only, and a function of pages gets keyword "
                "arguments: remove the / from its signature (docs/serving.md)"
            )
        if unknown:
            every = ", ".join("/".join(aliases) for aliases in PAGED.values())
            raise ValueError(
                f"{self.spec} needs {', '.join(unknown)}, but a function of pages gets only the keyword arguments "
                f"{every}: give other parameters a default (docs/serving.md)"
            )

    @property
    def has_scales(self) -> bool:
        """Whether the function has parameters for the scales of 8-bit keys and values."""
        return {"k_scale", "v_scale"} <= self.names.keys()

    def reason_against(self, workload: Workload) -> str | None:
        """Return why the function cannot compute a workload with the arguments that it takes; None if it can."""
        if not workload.page_size:
            return "it reads pages: add --set page_size=16, and requests, as in --set batch=2q64_8q1kv256"
        if workload.cache_dtype != SAME and not self.has_scales:
            return f"cache_dtype={workload.cache_dtype} has scales: name parameters k_scale and v_scale"
        if "seqused_k" not in self.names:
            return f"it does not get the number of used keys: name a parameter {'/'.join(PAGED['seqused_k'])}"
        if "cu_seqlens_q" not in self.names and any(each.new != 1 for each in workload.requests):
            return f"some requests do not have one new token: name a parameter {'/'.join(PAGED['cu_seqlens_q'])}"
        if workload.window and "window_size" not in self.names:
            return f"mask={workload.mask} has a window: name a parameter {'/'.join(PAGED['window_size'])}"
        if workload.sinks != "none":
            return "functions of pages are passed no sinks"
        if workload.scale and "softmax_scale" not in self.names:
            return f"it takes no scale of the scores: name a parameter {'/'.join(PAGED['softmax_scale'])}"
        return self.declared.unsupported(workload)

    def arguments(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> dict[str, Any]:
        """Return a call's arguments by name, for query (1, H, T, K), key (1, G, S, K) and value (1, G, S, V)."""
        cache = mask.cache
        assert cache is not None
        news, totals = zip(*cache.requests, strict=True)
        layout = cache.layout()
        pools, scales = paged(key, value, cache, layout.num_pages, layout.slots)
        whole = partial(torch.tensor, dtype=torch.int32, device=key.device)
        values: dict[str, Any] = {
            "query": query[0].transpose(0, 1).contiguous(),  # (1,H,T,K) -> (T,H,K)
            "key_cache": pools[0],
            "value_cache": pools[1],
            TABLE: torch.from_numpy(layout.block_table).to(key.device),
            "seqused_k": whole(totals),
            "cu_seqlens_q": whole(np.cumsum([0, *news]).tolist()),
            "cu_seqlens_k": whole(np.cumsum([0, *totals]).tolist()),
            "max_seqlen_q": max(news),
            "max_seqlen_k": max(totals),
            "k_scale": scales[0] if cache.dtype != SAME else None,
            "v_scale": scales[1] if cache.dtype != SAME else None,
            "softmax_scale": mask.scale_for(query.shape[-1]),
            "causal": True,
            "window_size": (cache.window - 1, UNLIMITED if "causal" in self.names else 0),  # -1: no limit
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        return {name: values[known] for known, name in self.names.items()}


def paged(
    key: Tensor,
    value: Tensor,
    cache: Cache,
    num_pages: int,
    slots: Any,  # noqa: ANN401 - an array of numpy
) -> tuple[list[Tensor], list[Tensor]]:
    """Write key (1, G, S, K) and value (1, G, S, V) into pools; return the two pools, and their two scales.

    The pools are (P, page_size, G, K) and (P, page_size, G, V), and each scale is (G,) or (1,). `slots` (S,) has the
    slot of each key. Slots without a key contain NaN, or 0 if the cache's form is ZEROS.
    """
    at, pools, scales = torch.from_numpy(slots).to(key.device), list[Tensor](), list[Tensor]()
    dtype = key.dtype if cache.dtype == SAME else getattr(torch, cache.dtype)
    widest = max(key.shape[-1], value.shape[-1])
    shape = (num_pages, 2, cache.page_size, key.shape[1], widest)
    buffer = torch.empty(shape, dtype=dtype, device=key.device) if cache.form == STRIDED else None
    for place, (name, tensor) in enumerate({"key": key, "value": value}.items()):
        scale = torch.tensor(cache.scales(name), device=key.device)
        stored = encoded(tensor[0].transpose(0, 1), scale, cache.dtype)  # (1,G,S,K) -> (S,G,K)
        unused = 0.0 if cache.form == ZEROS else torch.nan
        pool = torch.full((num_pages * cache.page_size, *stored.shape[1:]), unused, device=key.device).to(dtype)
        bytes_of(pool).index_copy_(0, at, bytes_of(stored))
        pool = pool.unflatten(0, (num_pages, cache.page_size))
        if buffer is not None:
            inside = buffer[:, place, ..., : tensor.shape[-1]]
            bytes_of(inside).copy_(bytes_of(pool))
            pool = inside
        pools.append(pool)
        scales.append(scale)
    return pools, scales


def bytes_of(tensor: Tensor) -> Tensor:
    """View a float8 tensor as bytes, for operators without float8 support; return any other tensor unchanged."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


def encoded(tensor: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Convert keys or values (..., G, K) to the cache's dtype; for float8 divide by scales (G,) or (1,) and clamp."""
    if dtype == SAME:
        return tensor
    largest = LARGEST_FLOAT8[dtype]
    wide = tensor.double() / scale.double()[:, None]
    return wide.clamp(-largest, largest).float().to(getattr(torch, dtype))


def rounded(tensor: Tensor, name: str, cache: Cache) -> Tensor:
    """Return keys or values (1, G, S, K) as read from a cache: rounded to the cache's dtype.

    Requests that share a prefix get the same keys or values there.
    """
    tensor = tensor[:, :, torch.from_numpy(cache.sources()).to(tensor.device)]
    if cache.dtype == SAME:
        return tensor
    scale = torch.tensor(cache.scales(name), device=tensor.device)
    stored = encoded(tensor.transpose(1, 2), scale, cache.dtype)
    return (stored.double() * scale.double()[:, None]).to(tensor.dtype).transpose(1, 2)


class PagedAttention(Attention):
    """An `Attention` whose `attend` calls a function of pages; the pool is filled outside of the function's call."""

    signature: PageSignature

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._memory: dict[tuple[object, ...], Tensor] = {}

    def prepare(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Prepared:
        """Prepare the function's arguments from query (1, H, T, K), key (1, G, S, K) and value (1, G, S, V).

        As in a service, a tensor reuses the memory of an earlier call's tensor of the same name, dtype and layout.
        """
        passed = self.signature.arguments(query, key, value, mask)
        return Prepared(
            tensors=(), passed={name: self._written(name, each) for name, each in passed.items()}, is_packed=True
        )

    def _written(self, name: str, value: Any) -> Any:  # noqa: ANN401 - any argument
        """Copy a tensor into the first tensor of its name, dtype, shape and strides; return other values unchanged."""
        if not isinstance(value, Tensor):
            return value
        kept = self._memory.setdefault((name, value.dtype, value.shape, value.stride()), value)
        if kept is not value:
            bytes_of(kept).copy_(bytes_of(value))
        return kept

    def bind(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Bound:
        """Return the function's call, with the pool already filled."""
        return Bound(self.signature.function, partial(self.prepare, query, key, value, mask), [query, key, value])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
        """Compute the output (1, H, T, V) from query (1, H, T, K), key (1, G, S, K) and value (1, G, S, V).

        Raises:
            ValueError: the function returns anything but one tensor (T, H, V).
        """
        prepared = self.prepare(query, key, value, mask)
        tensors = {name: each for name, each in prepared.passed.items() if isinstance(each, Tensor)}
        mask.lent = {name: (each, each.clone()) for name, each in tensors.items()}
        output: object = self.signature.function(**prepared.passed)
        expected = (query.shape[2], query.shape[1], value.shape[3])
        if isinstance(output, Tensor) and output.shape == expected:
            return prepared.finish(output)
        hint = ": return its first entry" if isinstance(output, tuple) else ""
        shape = tuple(output.shape) if isinstance(output, Tensor) else kind(output)
        spec = self.signature.spec
        raise ValueError(f"{spec} returned {shape}: it must return one tensor (tokens, H, V), here {expected}{hint}")


def from_paged(function: Callable[..., Any], spec: str, declared: Declared) -> Implementation:
    """Create the implementation of a function that has a parameter for a block table; `spec` names it in messages.

    Raises:
        ValueError: the query or a pool has no parameter, one is positional-only, or a required one is not in PAGED.
    """
    signature = PageSignature(function=function, spec=spec, names=names_of(function), declared=declared)
    return Implementation(
        build=type("PagedAttention", (PagedAttention,), {"signature": signature}),
        source=f"{declared.source or spec}, given {', '.join(signature.names.values())}",
        unsupported=signature.reason_against,
        takes_batches="pages",
    )


class Groups:
    """A batch of requests as dense calls: equal requests form one call, with their tokens and keys gathered."""

    def __init__(self, mask: BoundMask) -> None:
        cache = mask.cache
        assert cache is not None
        first_query = first_key = 0
        queries, keys = dict[Any, list[int]](), dict[Any, list[int]]()
        for request in cache.requests:
            if request.new:
                queries.setdefault(request, []).extend(range(first_query, first_query + request.new))
                keys.setdefault(request, []).extend(range(first_key, first_key + request.total))
            first_query, first_key = first_query + request.new, first_key + request.total
        index = partial(torch.tensor, device=mask.device)
        self.places = [(request, index(queries[request]), index(keys[request])) for request in queries]
        self.masks = [self._bound(mask, request, len(queries[request]) // request.new) for request in queries]

    @staticmethod
    def _bound(mask: BoundMask, request: Any, count: int) -> BoundMask:  # noqa: ANN401 - a Request
        sizes, cache = (count, request.new, request.total), mask.cache
        rule = parse_mask(dense_mask(request, 0 if cache is None else cache.window))
        return BoundMask(rule, sizes, mask.device, num_heads=mask.num_heads, scale=mask.scale)

    def split(self, query: Tensor, key: Tensor, value: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Gather query (1, H, T, K), key (1, G, S, K) and value (1, G, S, V) for each distinct request.

        For n equal requests of t new tokens and s keys they become (n, H, t, K), (n, G, s, K) and (n, G, s, V).
        """

        def gathered(tensor: Tensor, places: Tensor, length: int) -> Tensor:
            apart: Tensor = tensor[0, :, places].unflatten(1, (-1, length))  # (G,n*s,K) -> (G,n,s,K)
            return apart.transpose(0, 1).contiguous()

        return [
            (gathered(query, rows, each.new), gathered(key, columns, each.total), gathered(value, columns, each.total))
            for each, rows, columns in self.places
        ]

    def join(self, outputs: Iterable[Tensor]) -> Tensor:
        """Join the outputs (n, H, t, V) of all groups to (1, H, T, V), in the order of the tokens."""
        packed = [each.transpose(0, 1).flatten(1, 2) for each in outputs]  # (n,H,t,V) -> (H,n*t,V)
        rows = torch.cat([rows for _, rows, _ in self.places])
        return torch.cat(packed, dim=1)[:, rows.argsort()][None]


class BoundGroups(Bound):
    """The prepared calls of a dense function, one for each distinct request, run one after the other."""

    def __init__(self, groups: Groups, bind: Callable[..., Bound], inputs: list[Tensor]) -> None:
        self._groups, self._inputs = groups, inputs
        self._tensors = groups.split(*inputs)
        self._calls = [bind(*tensors, mask) for tensors, mask in zip(self._tensors, groups.masks, strict=True)]
        self.call = lambda: [each.call() for each in self._calls]
        self.finish = lambda outputs: groups.join(
            each.finish(output) for each, output in zip(self._calls, outputs, strict=True)
        )
        self.prepare = self._prepare
        self.leaves, self.is_plain = [], False

    def _prepare(self) -> Prepared:
        """Gather all inputs again into the same memory."""
        for tensors, again in zip(self._tensors, self._groups.split(*self._inputs), strict=True):
            for tensor, right in zip(tensors, again, strict=True):
                tensor.copy_(right)
        return Prepared(tensors=(), passed={})

    def refresh(self) -> None:
        """Gather all arguments again, into the same memory, after the values of the inputs have changed."""
        with torch.no_grad():
            self._prepare()
            for each in self._calls:
                each.refresh()


def groups_of(mask: BoundMask) -> Groups:
    """Return the groups of the mask's batch of requests, memoized on the mask."""
    if "groups" not in vars(mask):
        vars(mask)["groups"] = Groups(mask)
    found: Groups = vars(mask)["groups"]
    return found
