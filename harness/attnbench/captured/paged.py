"""Captured calls on a paged cache: check their form, and gather each request's keys and values by the block table.

The file has the names and shapes of docs/serving.md. The check gathers the captured numbers and lays them out in pools
of its own, in which unused slots contain NaN. Shapes: N requests, T query tokens and S keys of all requests.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from attnbench.contract.declared import kind
from attnbench.contract.pages import TABLE
from attnbench.plugins import PAGED
from attnbench.workloads.batch import Request, is_power_of_2, written

FORMS = {
    "query": "tokens, H, K",
    "key_cache": "pages, page_size, G, K",
    "value_cache": "pages, page_size, G, V",
    TABLE: "N, most pages",
    "seqused_k": "N",
    "cu_seqlens_q": "N + 1",
}
"""Axes of the tensors of a capture, by their first names in PAGED. `cu_seqlens_q` may be left out, and nothing else."""
WHOLE = (TABLE, "seqused_k", "cu_seqlens_q")  # tensors of whole numbers; the others have floating-point numbers


def is_paged(saved: object) -> bool:
    """Return whether captured inputs have a block table, by any of its names."""
    return isinstance(saved, dict) and any(name in PAGED[TABLE] for name in saved)


def gathered(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the captured inputs of a paged call as those of a dense one, and the `axes` of its batch of requests.

    These are query (1, H, T, K), key (1, G, S, K), value (1, G, S, V), the scale (None by default), and the axes batch,
    page_size, scale and mask by name. Entries of the block table beyond a request's length are not read.

    Raises:
        ValueError: an entry has another name, type or shape, or the entries do not fit together; the message is one
            line that names the entry and the way out.
    """
    names = _names(saved)
    given = {known: saved[name] for known, name in names.items()}
    _require_forms(given, names)
    _require_sizes(given, names)
    requests = _requests(given, names)
    page_size = given["key_cache"].shape[1]
    scale, window = _scale(given, names), _window(given, names, requests)
    axes: dict[str, Any] = {"batch": written(requests), "page_size": page_size, "scale": scale or 0.0}
    rows = _rows(given, names, requests)
    return {
        "query": given["query"].transpose(0, 1)[None].contiguous(),  # (T,H,K) -> (1,H,T,K)
        "key": _keys(given["key_cache"], rows, requests),
        "value": _keys(given["value_cache"], rows, requests),
        "scale": scale,
        "axes": axes | {"mask": "none" if window is None else f"sliding_window({window})"},
    }


def _names(saved: dict[str, Any]) -> dict[str, str]:
    """Map members of PAGED to the names in the file; an entry of None counts as missing."""
    names = dict[str, str]()
    known = {alias: name for name, aliases in PAGED.items() for alias in aliases}
    for alias in (each for each, value in saved.items() if value is not None):
        if alias not in known:
            every = ", ".join("/".join(aliases) for aliases in PAGED.values())
            raise ValueError(f"{alias} is no entry of a paged call: leave it out, or give it as one of {every}")
        if (other := names.setdefault(known[alias], alias)) != alias:
            raise ValueError(f"{alias} and {other} are two names of one entry: leave one out")
    return names


def _require_forms(given: dict[str, Any], names: dict[str, str]) -> None:
    """Require that each tensor is there, and has its number of axes and kind of numbers."""
    for name, axes in FORMS.items():
        numbers = "whole" if name in WHOLE else "floating-point"
        way_out = f"give ({axes}), {numbers} numbers"
        if name not in given:
            if name != "cu_seqlens_q":
                raise ValueError(f"{'/'.join(PAGED[name])} is missing next to {names[TABLE]}: {way_out}")
            continue
        tensor = given[name]
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{names[name]} is {kind(tensor)}: {way_out}")  # noqa: TRY004 - bad input
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        if tensor.dim() != axes.count(",") + 1 or is_whole != (name in WHOLE):
            raise ValueError(f"{names[name]} is {tuple(tensor.shape)} of {tensor.dtype}: {way_out}")


def _require_sizes(given: dict[str, Any], names: dict[str, str]) -> None:
    """Require that the query, the two pools and the block table fit together, and that no pool has scales."""
    query, key, value = (given[name] for name in ("query", "key_cache", "value_cache"))
    keys, values = names["key_cache"], names["value_cache"]
    for axis, words in enumerate(("page", "token in a page", "head")):
        if key.shape[axis] != value.shape[axis]:
            sizes = f"{values} has {_count(value.shape[axis], words)}, and {keys} has {key.shape[axis]}"
            raise ValueError(f"{sizes}: give two pools with the same pages, page_size and heads")
    if not is_power_of_2(key.shape[1]):
        raise ValueError(f"{keys} has {_count(key.shape[1], 'token in a page')}: give a page_size of a power of 2")
    (_, heads, width), groups = query.shape, key.shape[2]
    if width != key.shape[3] or not groups or heads % groups:
        sizes = f"{names['query']} has {_count(heads, 'head')} of {width}, and {keys} has {groups} of {key.shape[3]}"
        raise ValueError(f"{sizes}: give one width K, and a number of query heads H that is a multiple of G")
    way_out = "multiply 8-bit keys and values by their scales, convert them to the query's dtype, and leave out scales"
    for name in ("key_cache", "value_cache"):
        if given[name].dtype != query.dtype:
            raise ValueError(f"{names[name]} is {given[name].dtype}, and the query is {query.dtype}: {way_out}")
    for name in ("k_scale", "v_scale"):
        scale = given.get(name, 1.0)
        if not isinstance(scale, Tensor | float | int) or (torch.as_tensor(scale) != 1).any():
            raise ValueError(f"{names[name]} is not 1: {way_out}")
    if len(given[TABLE]) != len(given["seqused_k"]):
        counts = f"{names[TABLE]} has {_count(len(given[TABLE]), 'row')}, and {names['seqused_k']} has"
        raise ValueError(f"{counts} {_count(len(given['seqused_k']), 'number')}: give one of each for a request")


def _count(number: int, words: str) -> str:
    """Return a number with its noun, as in "3 tokens in a page"."""
    noun, *rest = words.split(" ", 1)
    return " ".join([f"{number} {noun}{'s' * (number != 1)}", *rest])


def _requests(given: dict[str, Any], names: dict[str, str]) -> tuple[Request, ...]:
    """Return the requests, from the bounds of their queries and their lengths."""
    num_tokens, lengths, own = len(given["query"]), given["seqused_k"].tolist(), names["seqused_k"]
    if not num_tokens:
        raise ValueError(f"{names['query']} has no tokens: give at least one")
    if "cu_seqlens_q" not in given and num_tokens != len(lengths):
        counts = f"{names['query']} has {_count(num_tokens, 'token')}, and {own} {_count(len(lengths), 'request')}"
        raise ValueError(f"cu_seqlens_q is missing, but {counts}: give the bounds of the queries, (N + 1,)")
    bounds = given["cu_seqlens_q"].tolist() if "cu_seqlens_q" in given else list(range(num_tokens + 1))
    starts = names.get("cu_seqlens_q", "cu_seqlens_q")
    if len(bounds) != len(lengths) + 1:
        counts = f"{starts} has {_count(len(bounds), 'number')}, and {own} has {len(lengths)}"
        raise ValueError(f"{counts}: give N + 1 bounds for N requests")
    news = [end - start for start, end in itertools.pairwise(bounds)]
    if bounds[0] or any(new < 0 for new in news):
        place = 0 if bounds[0] else next(row + 1 for row, new in enumerate(news) if new < 0)
        raise ValueError(f"{starts}[{place}] is {bounds[place]}: give bounds that begin with 0 and never fall")
    if bounds[-1] != num_tokens:
        tokens = f"{names['query']} has {_count(num_tokens, 'token')}"
        raise ValueError(f"{starts} ends at {bounds[-1]}, and {tokens}: give bounds to {num_tokens}, or cut the query")
    page_size, num_pages = given["key_cache"].shape[1], given[TABLE].shape[1]
    for row, (new, length) in enumerate(zip(news, lengths, strict=True)):
        if length > num_pages * page_size:
            room = f"{names[TABLE]} has {_count(num_pages, 'page')} of {page_size} tokens for a request"
            raise ValueError(
                f"{own}[{row}] is {length}, and {room}: give at most {num_pages * page_size}, or a wider table"
            )
        if length < new:
            why = f"request {row} has {_count(new, 'query token')}, whose keys count, too"
            raise ValueError(f"{own}[{row}] is {length}, and {why}: give {new} or more")
    return tuple(map(Request, news, lengths))


def _rows(given: dict[str, Any], names: dict[str, str], requests: tuple[Request, ...]) -> list[Tensor]:
    """Return for each request the pages that its keys occupy, in order; each must be one of the pool."""
    num_pages, page_size, rows = len(given["key_cache"]), given["key_cache"].shape[1], list[Tensor]()
    for row, request in enumerate(requests):
        pages = given[TABLE][row, : -(-request.total // page_size)].long()
        outside = ((pages < 0) | (pages >= num_pages)).nonzero().flatten().tolist()
        if outside:
            entry = f"{names[TABLE]}[{row}, {outside[0]}] is {int(pages[outside[0]])}"
            pool = f"{names['key_cache']} has {_count(num_pages, 'page')}"
            raise ValueError(f"{entry}, and {pool}: give pages from 0 to {num_pages - 1}, or the whole pool")
        rows.append(pages)
    return rows


def _keys(pool: Tensor, rows: list[Tensor], requests: tuple[Request, ...]) -> Tensor:
    """Gather the keys or values of all requests: pool (pages, page_size, G, K) -> (1, G, S, K)."""
    parts = [
        pool[pages.to(pool.device)].flatten(0, 1)[: each.total] for pages, each in zip(rows, requests, strict=True)
    ]
    return torch.cat(parts).transpose(0, 1)[None].contiguous()  # (S,G,K) -> (1,G,S,K)


def _scale(given: dict[str, Any], names: dict[str, str]) -> float | None:
    """Return the factor of the scores; None if the call had none."""
    scale = given.get("softmax_scale")
    if scale is None:
        return None
    if not isinstance(scale, float | int) or scale <= 0:
        raise ValueError(f"{names['softmax_scale']} is {scale}: give a number above 0, or leave it out for K**-0.5")
    return float(scale)


def _window(given: dict[str, Any], names: dict[str, str], requests: tuple[Request, ...]) -> int | None:
    """Return the most keys that a query sees; None if there is no limit. Queries must be causal."""
    window = given.get("window_size", (-1, -1))
    is_pair = isinstance(window, tuple | list) and [type(each) for each in window] == [int, int]
    if not is_pair:
        raise ValueError(f"{names['window_size']} is {window}: give two whole numbers (left, right), -1 for no limit")
    left, right = window
    if given.get("causal", True) is not True and right != 0 and any(each.new > 1 for each in requests):
        why = "a check of a batch is causal, and some requests have several query tokens"
        raise ValueError(f"{names['causal']} is {given['causal']}: {why}; give True, or capture decodes")
    return None if left < 0 else left + 1
