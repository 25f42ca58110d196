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
    _require_sizes(given, names, found=_require_forms(given, names))
    requests = _requests(given, names)
    scale, mask = _scale(given, names), _mask(given, names, requests)
    axes = {"batch": written(requests), "page_size": given["key_cache"].shape[1], "scale": scale or 0.0, "mask": mask}
    rows = _rows(given, names, requests)
    pools = {"key": given["key_cache"], "value": given["value_cache"]}
    return {
        "query": given["query"].transpose(0, 1)[None].contiguous(),  # (T,H,K) -> (1,H,T,K)
        **{name: _keys(pool, rows, requests) for name, pool in pools.items()},
        "scale": scale,
        "axes": axes,
    }


def _require(holds: object, said: str, way_out: str) -> None:
    """Raise ValueError with a line of what was found and of the way out, unless `holds` is true."""
    if not holds:
        raise ValueError(f"{' '.join(said.split())}: {way_out}")


def _names(saved: dict[str, Any]) -> dict[str, str]:
    """Map members of PAGED to the names in the file; an entry of None counts as missing."""
    names = dict[str, str]()
    known = {alias: name for name, aliases in PAGED.items() for alias in aliases}
    every = ", ".join("/".join(aliases) for aliases in PAGED.values())
    for alias in (each for each, value in saved.items() if value is not None):
        _require(alias in known, f"{alias} is no entry of a paged call", f"leave it out, or give it as one of {every}")
        other = names.setdefault(known[alias], alias)
        _require(other == alias, f"{alias} and {other} are two names of one entry", "leave one out")
    return names


def _require_forms(given: dict[str, Any], names: dict[str, str]) -> dict[str, str]:
    """Require that each tensor is there, with its number of axes and kind of numbers; return what each is, in words."""
    found = dict[str, str]()
    for name, axes in FORMS.items():
        way_out = f"give ({axes}), {'whole' if name in WHOLE else 'floating-point'} numbers"
        if name not in given and name == "cu_seqlens_q":
            continue
        _require(name in given, f"{'/'.join(PAGED[name])} is missing next to {names[TABLE]}", way_out)
        tensor = given[name]
        _require(isinstance(tensor, Tensor), f"{names[name]} is {kind(tensor)}", way_out)
        found[name] = f"{names[name]} is {tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
        is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
        _require(tensor.dim() == axes.count(",") + 1 and is_whole == (name in WHOLE), found[name], way_out)
    return found


def _require_sizes(given: dict[str, Any], names: dict[str, str], found: dict[str, str]) -> None:
    """Require that the tensors fit together, and that no scales belong to the pools; `found` describes each tensor."""
    query, key, value, table, lengths = (given[name] for name in (*FORMS,)[:5])
    num_bounds = len(given["cu_seqlens_q"]) if "cu_seqlens_q" in given else len(query) + 1
    is_grouped = key.shape[2] and query.shape[1] % key.shape[2] == 0
    way_out = "multiply 8-bit keys and values by their scales, convert them to the query's dtype, and leave out scales"
    for holds, about, rule in (
        (key.shape[:3] == value.shape[:3], ("value_cache", "key_cache"), "give the same pages, page_size and heads"),
        (is_power_of_2(key.shape[1]), ("key_cache",), "give a page_size of a power of 2"),
        (is_grouped and query.shape[2] == key.shape[3], ("query", "key_cache"), "give one K, and an H that G divides"),
        (key.dtype == query.dtype, ("key_cache", "query"), way_out),
        (value.dtype == query.dtype, ("value_cache", "query"), way_out),
        (len(query), ("query",), "give at least one token"),
        (len(table) == len(lengths), (TABLE, "seqused_k"), "give a row and a length for each request"),
        (num_bounds == len(lengths) + 1, ("cu_seqlens_q", "query", "seqused_k"), "give cu_seqlens_q (N + 1)"),
    ):
        _require(holds, ", and ".join(found[name] for name in about if name in found), rule)
    for name in ("k_scale", "v_scale"):
        scale = given.get(name, 1.0)
        is_one = isinstance(scale, Tensor | float | int) and bool((torch.as_tensor(scale) == 1).all())
        _require(is_one, f"{names.get(name)} is not 1", way_out)


def _requests(given: dict[str, Any], names: dict[str, str]) -> tuple[Request, ...]:
    """Return the requests, from the bounds of their queries (by default, one query each) and their lengths."""
    num_tokens, lengths, own = len(given["query"]), given["seqused_k"].tolist(), names["seqused_k"]
    bounds = given.get("cu_seqlens_q", torch.arange(num_tokens + 1)).tolist()
    starts, (page_size, num_pages) = names.get("cu_seqlens_q"), (given["key_cache"].shape[1], given[TABLE].shape[1])
    for place, (before, bound) in enumerate(itertools.pairwise([0, *bounds])):
        is_fine = bound >= before if place else bound == 0
        _require(is_fine, f"{starts}[{place}] is {bound}", "give bounds that begin with 0 and never fall")
    said = f"{starts} ends at {bounds[-1]}, and {names['query']} has {num_tokens} tokens"
    _require(bounds[-1] == num_tokens, said, f"give bounds up to {num_tokens}, or cut the query")
    requests = tuple(
        Request(end - start, total) for (start, end), total in zip(itertools.pairwise(bounds), lengths, strict=True)
    )
    most = num_pages * page_size
    for row, (new, length) in enumerate(requests):
        room = f"{names[TABLE]} has {num_pages} pages of {page_size} tokens for a request"
        _require(length <= most, f"{own}[{row}] is {length}, and {room}", f"give at most {most}, or a wider table")
        why = f"request {row} has {new} query tokens, whose keys count, too"
        _require(length >= new, f"{own}[{row}] is {length}, and {why}", f"give {new} or more")
    return requests


def _rows(given: dict[str, Any], names: dict[str, str], requests: tuple[Request, ...]) -> list[Tensor]:
    """Return for each request the pages that its keys occupy, in order; each must be one of the pool."""
    num_pages, page_size, *_ = given["key_cache"].shape
    rows = [pages[: -(-each.total // page_size)].long() for pages, each in zip(given[TABLE], requests, strict=True)]
    pool, way_out = f"{names['key_cache']} has {num_pages} pages", f"give pages from 0 to {num_pages - 1}"
    for row, pages in enumerate(rows):
        for place, page in enumerate(pages.tolist()):
            _require(0 <= page < num_pages, f"{names[TABLE]}[{row}, {place}] is {page}, and {pool}", way_out)
    return rows


def _keys(pool: Tensor, rows: list[Tensor], requests: tuple[Request, ...]) -> Tensor:
    """Gather the keys or values of all requests: pool (pages, page_size, G, K) -> (1, G, S, K)."""
    slots = (pool[pages.to(pool.device)].flatten(0, 1) for pages in rows)
    keys = torch.cat([own[: each.total] for own, each in zip(slots, requests, strict=True)])  # (S,G,K)
    return keys.transpose(0, 1)[None].contiguous()


def _scale(given: dict[str, Any], names: dict[str, str]) -> float | None:
    """Return the factor of the scores; None if the call had none."""
    if (scale := given.get("softmax_scale")) is None:
        return None
    said = f"{names['softmax_scale']} is {scale}"
    _require(isinstance(scale, float | int) and scale > 0, said, "give a number above 0, or leave it out for K**-0.5")
    return float(scale)


def _mask(given: dict[str, Any], names: dict[str, str], requests: tuple[Request, ...]) -> str:
    """Return the axis mask of the call, `none` or a window. Queries must be causal."""
    window = given.get("window_size", (-1, -1))
    is_pair = isinstance(window, tuple | list) and [type(each) for each in window] == [int, int]
    said = f"{names.get('window_size')} is {window}"
    _require(is_pair, said, "give two whole numbers (left, right), -1 for no limit")
    is_causal = given.get("causal", True) is True or window[1] == 0 or all(each.new <= 1 for each in requests)
    why = f"{names.get('causal')} is {given.get('causal')}, and a check of several query tokens of a request is causal"
    _require(is_causal, why, "give True, or capture decodes")
    return "none" if window[0] < 0 else f"sliding_window({window[0] + 1})"
