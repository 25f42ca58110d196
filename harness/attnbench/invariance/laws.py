"""Laws of invariance: a query's output is bitwise equal, whatever else the same call computes.

If a kernel splits the keys among its threads according to the sizes of the call, other sizes change the order of sums.
A served model then answers differently under another load. Source: Thinking Machines Lab, "Defeating Nondeterminism in
LLM Inference", https://thinkingmachines.ai/blog/defeating-nondeterminism-in-llm-inference/

The expected output comes from causal attention on one sequence alone, with all queries in one call. For a batch that
decodes, it comes from decoding each sequence alone. A batch of requests has separate laws: the expected output comes
from one call on the whole batch. Letters of shapes: see attnbench.contract; N is the largest batch size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import msgspec
import torch
from torch import Tensor

from attnbench.case import TORCH_DTYPES, Case, Inputs, bind, build, draw_normal, draw_weights, place, reason_against
from attnbench.contract import Implementation
from attnbench.contract.pages import MOVED
from attnbench.devices import device
from attnbench.invariance.records import LawTried
from attnbench.workloads.batch import Request, written
from attnbench.workloads.workload import Workload

BATCHES = (2, 3, 8)  # batch sizes that `batched` tries
PADDED_BY = (1, 17, 64, 300)  # numbers of hidden keys that `padded` appends
FIRST = slice(0, 1)  # selects the first sequence alone
EXAMPLE: dict[str, Any] = {"batch": "q20kv90_q1kv4100_2q1kv700_q1kv33_q7", "page_size": 16, "mask": "none"}
EXAMPLE |= {"rotary": "none", "world_size": 1}
"""Axes of the default batch of requests for functions that read pages. It has long requests, which kernels split."""
FEWEST_REQUESTS = 2
LARGE_PAGES = {"page_size": 256}  # for functions that do not support small pages


@dataclass(frozen=True)
class Subject:
    """An implementation at a shape; each law sets its own batch size, T and mask, and some vary S or the heads."""

    implementation: Implementation
    shape: Workload
    seed: int

    @cached_property
    def drawn(self) -> Inputs:
        """Inputs of N sequences with S + max(PADDED_BY) keys, in the shape's dtype and on its device."""
        where, dtype = device(self.shape.device).torch_device, TORCH_DTYPES[self.shape.dtype]
        asked = self.at(batch_size=max(BATCHES), seq_len=self.shape.kv_len, mask="causal")
        longest = msgspec.structs.replace(asked, kv_len=self.shape.kv_len + max(PADDED_BY))
        return draw_normal(longest, self.seed).map(lambda tensor: tensor.to(where, dtype))

    def at(self, **axes: object) -> Workload:
        """Return the shape with these axes changed; the batch size is 1 unless it is given."""
        return msgspec.structs.replace(self.shape, **({"batch_size": 1} | axes))

    def answer(self, workload: Workload, *, rows: slice, queries: slice) -> Tensor:
        """Return the output (B, H, T, V) of a workload on the sequences `rows`, their `queries` and their first S keys.

        Raises:
            UntriedError: the implementation does not support the workload.
        """
        if reason := reason_against(self.implementation, workload):
            raise UntriedError(reason)
        heads, groups = workload.num_heads, workload.num_kv_heads
        given = {
            "query": self.drawn.tensors["query"][rows, :heads, queries],
            "key": self.drawn.tensors["key"][rows, :groups, : workload.kv_len],
            "value": self.drawn.tensors["value"][rows, :groups, : workload.kv_len],
        }
        if "sinks" in self.drawn.tensors:
            given["sinks"] = self.drawn.tensors["sinks"][:heads]
        weights = draw_weights(workload).map(lambda tensor: tensor.to(given["query"].device, given["query"].dtype))
        inputs = Inputs(tensors={name: each.contiguous() for name, each in given.items()}, weights=weights)
        case: Case = build(workload, self.implementation, inputs)
        with case.grad_mode():
            return case.output()

    def whole(self, rows: slice = FIRST, **axes: object) -> Tensor:
        """Return the output (B, H, S, V) of a causal call on the sequences `rows`; `axes` replace axes of the shape."""
        length = self.shape.kv_len
        asked = self.at(**({"seq_len": length, "kv_len": length, "mask": "causal"} | axes))
        return self.answer(asked, rows=rows, queries=slice(0, length))

    @cached_property
    def alone(self) -> list[Tensor]:
        """The expected outputs (H, S, V) of the N sequences, each from a causal call on it alone, with all queries."""
        return [self.whole(slice(row, row + 1))[0] for row in range(max(BATCHES))]


class UntriedError(Exception):
    """A comparison of a law cannot be made, for example because the implementation does not support its workload."""


Comparison = tuple[str, Tensor, Tensor]
"""A variation of a call in words, its output, and the expected output, each (B, H, T, V)."""


def repeated(subject: Subject) -> Iterator[Comparison]:
    """Compare repetitions of one call."""
    for number in (2, 3):
        yield f"call {number}", subject.whole(), subject.alone[0][None]


def batched(subject: Subject) -> Iterator[Comparison]:
    """Compare calls on several sequences with calls on each alone: for all queries, and for the last query only."""
    length = subject.shape.kv_len
    for batch in BATCHES:
        right = torch.stack(subject.alone[:batch])
        yield f"batch {batch}, prefill", subject.whole(slice(0, batch), batch_size=batch), right
    one = subject.at(seq_len=1, kv_len=length, mask="none")
    last = slice(length - 1, length)
    alone = [subject.answer(one, rows=slice(row, row + 1), queries=last) for row in range(max(BATCHES))]
    for batch in BATCHES:
        several = msgspec.structs.replace(one, batch_size=batch)
        made = subject.answer(several, rows=slice(0, batch), queries=last)
        yield f"batch {batch}, decode", made, torch.cat(alone[:batch])


def padded(subject: Subject) -> Iterator[Comparison]:
    """Compare calls with appended keys, which are hidden from every query, with the call without these keys."""
    for more in PADDED_BY:
        made = subject.whole(kv_len=subject.shape.kv_len + more)
        yield f"{more} hidden keys appended", made, subject.alone[0][None]


def ragged(subject: Subject) -> Iterator[Comparison]:
    """Compare decoding of sequences with different lengths in one call with decoding of each sequence alone."""
    length = subject.shape.kv_len
    lengths = [length, length - length // 3, length // 2]
    lengths = [max(1, each) for each in lengths]
    asked = subject.at(batch_size=3, seq_len=1, kv_len=length, mask=f"padding({','.join(map(str, lengths))})")
    made = subject.answer(asked, rows=slice(0, 3), queries=slice(length - 1, length))
    for row, own in enumerate(lengths):
        one = subject.at(seq_len=1, kv_len=own, mask="none")
        alone = subject.answer(one, rows=slice(row, row + 1), queries=slice(length - 1, length))
        yield f"a cache of {own} keys in a batch of caches up to {length}", made[row : row + 1], alone


def in_chunks(subject: Subject) -> Iterator[Comparison]:
    """Compare calls on only the last queries (half of them, 17, 2 and 1) with the call on all queries."""
    length = subject.shape.kv_len
    for number in sorted({length // 2, 17, 2, 1} & set(range(1, length)), reverse=True):
        mask = "causal_bottom_right" if number > 1 else "none"
        asked = subject.at(seq_len=number, kv_len=length, mask=mask)
        made = subject.answer(asked, rows=FIRST, queries=slice(length - number, length))
        words = f"the last {number} queries" if number > 1 else "decode: the last query"
        yield f"{words} alone", made, subject.alone[0][None, :, length - number :]


def fewer_heads(subject: Subject) -> Iterator[Comparison]:
    """Compare a call on half of the heads, as in a model split over two devices, with the call on all heads.

    Raises:
        UntriedError: there is one key/value head.
    """
    groups = subject.shape.num_kv_heads
    if groups == 1:
        raise UntriedError("there is only one key/value head")
    some = groups // 2
    heads = some * (subject.shape.num_heads // groups)
    made = subject.whole(num_heads=heads, num_kv_heads=some, embed_dim=0)
    yield f"{heads} of {subject.shape.num_heads} heads", made, subject.alone[0][None, :heads]


@dataclass(frozen=True)
class Batch:
    """An implementation at a batch of requests: the counterpart of `Subject` for LAWS_OF_REQUESTS."""

    implementation: Implementation
    workload: Workload
    seed: int

    @cached_property
    def drawn(self) -> Inputs:
        """The batch's inputs, in its dtype and on its device."""
        return place(draw_normal(self.workload, self.seed), self.workload)

    @cached_property
    def places(self) -> list[tuple[Request, Tensor, Tensor]]:
        """Each request with the indices of its t queries, a tensor (t,), and of its s keys, a tensor (s,)."""
        news, totals = map(list, zip(*self.workload.requests, strict=True))
        queries, keys = (torch.arange(sum(sizes)).split(sizes) for sizes in (news, totals))
        return [*zip(self.workload.requests, queries, keys, strict=True)]

    def answer(self, chosen: list[int], form: str = "") -> Tensor:
        """Return the output (1, H, T, V) of a call on the requests with the indices `chosen`, in their order.

        `form` replaces the form of the cache (`Cache` in workloads/batch.py).

        Raises:
            UntriedError: the implementation does not support the batch.
        """
        some = (self.places[index] for index in chosen)
        requests, *indices = zip(*some, strict=True)
        queries, keys = map(torch.cat, indices)
        own = {} if len(chosen) > 1 else {"shared_prefix": 0}
        workload = msgspec.structs.replace(self.workload, batch=written(requests), **own)
        if reason := reason_against(self.implementation, workload):
            raise UntriedError(reason)
        tensors = dict(self.drawn.tensors)
        for name, rows in {"query": queries, "key": keys, "value": keys}.items():
            tensors[name] = tensors[name][:, :, rows.to(tensors[name].device)]
        mask = bind(workload)
        if mask.cache is not None and form:
            mask.cache = msgspec.structs.replace(mask.cache, form=form)
        case = build(workload, self.implementation, Inputs(tensors=tensors, weights=self.drawn.weights), mask)
        with case.grad_mode():
            return case.output()

    @cached_property
    def whole(self) -> Tensor:
        """The output (1, H, T, V) of a call on the whole batch."""
        return self.answer([*range(len(self.places))])

    def right(self, chosen: list[int]) -> Tensor:
        """Return the expected output (1, H, T, V) of a call on the requests with the indices `chosen`."""
        queries = torch.cat([self.places[index][1] for index in chosen])
        return self.whole[:, :, queries.to(self.whole.device)]


def requests_repeated(batch: Batch) -> Iterator[Comparison]:
    """Compare repetitions of the call on the whole batch."""
    every = [*range(len(batch.places))]
    for number in (2, 3):
        yield f"call {number}", batch.answer(every), batch.whole


def requests_alone(batch: Batch) -> Iterator[Comparison]:
    """Compare a call on each distinct request alone with the call on the whole batch.

    Raises:
        UntriedError: the batch has one request.
    """
    if len(batch.places) < FEWEST_REQUESTS:
        raise UntriedError("the batch has one request")
    distinct = {request: index for index, (request, _, _) in enumerate(batch.places) if request.new}
    for request, index in distinct.items():
        yield f"the request {written((request,))} alone", batch.answer([index]), batch.right([index])


def requests_reordered(batch: Batch) -> Iterator[Comparison]:
    """Compare calls on the requests in reverse order, and on the first half of them, with the call on the whole batch.

    Raises:
        UntriedError: the batch has one request.
    """
    if len(batch.places) < FEWEST_REQUESTS:
        raise UntriedError("the batch has one request")
    every = [*range(len(batch.places))]
    yield "the requests in reverse order", batch.answer(every[::-1]), batch.right(every[::-1])
    half = every[: len(every) // 2]
    if any(batch.places[index][0].new for index in half):
        yield "the first half of the requests", batch.answer(half), batch.right(half)


def pages_moved(batch: Batch) -> Iterator[Comparison]:
    """Compare a call whose pages lie at other places of the pool with the call on the original pages.

    Raises:
        UntriedError: the implementation gets no pages.
    """
    if not batch.workload.page_size or batch.implementation.takes_batches != "pages":
        raise UntriedError("it gets no pages")
    every = [*range(len(batch.places))]
    yield "pages elsewhere in the pool", batch.answer(every, MOVED), batch.whole


LAWS_OF_REQUESTS: dict[str, Callable[[Batch], Iterator[Comparison]]] = {
    "run to run": requests_repeated,
    "neighbours": requests_alone,
    "order of requests": requests_reordered,
    "place of pages": pages_moved,
}
"""The function of each law for a batch of requests, by the law's name: it varies the call and yields comparisons."""
LAWS: dict[str, Callable[[Subject], Iterator[Comparison]]] = {
    "run to run": repeated,
    "batch size": batched,
    "padding": padded,
    "ragged batch": ragged,
    "prefill, chunks, decode": in_chunks,
    "heads": fewer_heads,
}
"""The function of each law for other shapes, by the law's name."""


def example(implementation: Implementation, shape: Workload) -> Workload:
    """Return the shape or, if it has no batch of requests and the implementation reads pages, the shape with EXAMPLE.

    If the implementation does not support the small pages of EXAMPLE, they are replaced by LARGE_PAGES.
    """
    if implementation.takes_batches != "pages" or shape.requests:
        return shape
    batch = shape.with_axes(EXAMPLE)
    is_refused = reason_against(implementation, batch) is not None
    return batch.with_axes(LARGE_PAGES) if is_refused else batch


def tried(
    implementation: Implementation, workload: Workload, seed: int, on_step: Callable[[], object] = lambda: None
) -> Iterator[LawTried]:
    """Test the laws one after the other, each until an output differs, and yield the result of each.

    An exception of the implementation breaks the law. `on_step` is called before each comparison.
    """
    subject, batch = Subject(implementation, workload, seed), Batch(implementation, workload, seed)
    laws = {law: partial(compare, subject) for law, compare in LAWS.items()}
    if workload.requests:
        laws = {law: partial(compare, batch) for law, compare in LAWS_OF_REQUESTS.items()}
    for law, compared in laws.items():
        number = 0
        try:
            for varied, made, right in compared():
                on_step()
                number += 1
                if words := difference(made, right):
                    yield LawTried(law=law, num_tried=number, broken=f"{varied}: {words}")
                    break
            else:
                yield LawTried(law=law, num_tried=number)
        except UntriedError as untried:
            yield LawTried(law=law, num_tried=number, reason=str(untried))
        except Exception as error:  # noqa: BLE001 - foreign code
            text = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}"
            yield LawTried(law=law, num_tried=number, broken=text)


def difference(made: Tensor, right: Tensor) -> str:
    """Describe how two outputs (B, H, T, V) differ: largest difference, and share and first index of unequal numbers.

    If shapes or dtypes differ, these are described instead. Returns "" if the outputs are equal; NaN equals NaN.
    """
    if made.shape != right.shape or made.dtype != right.dtype:
        return f"shape {tuple(made.shape)} of {made.dtype}, not {tuple(right.shape)} of {right.dtype}"
    differs = (made != right) & ~(made.isnan() & right.isnan())
    if not differs.any():
        return ""
    row, head, query, column = differs.nonzero()[0].tolist()
    one, other = float(made[row, head, query, column]), float(right[row, head, query, column])
    share = float(differs.double().mean())
    apart = float((made.double() - right.double()).abs().max())
    place = f"first at sequence {row}, head {head}, query {query}, column {column}: {one:.9g}, not {other:.9g}"
    return f"{share:.0%} of the numbers differ, by up to {apart:.2g}; {place}"
