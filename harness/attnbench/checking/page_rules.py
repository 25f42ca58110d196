"""Rules for functions that read a paged cache; importing this module adds them to the RULES of rules.py."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from attnbench.case import bind, draw_normal, place
from attnbench.checking.reference import Reference
from attnbench.checking.rules import ANOTHER_BATCH, NEIGHBOURS, OTHER_SETTINGS, POOLS, USUAL, Candidate, Outcome, rule
from attnbench.contract.pages import MOVED, STRIDED
from attnbench.workloads.batch import SAME, Request, written
from attnbench.workloads.workload import Workload

MORE_KEYS = 600
"""Extra keys of each request in some calls: enough for kernels that split the keys to use more than one part."""
MOST_ALONE = 3  # the rule `neighbours` calls at most this many requests of a batch alone


@rule(ANOTHER_BATCH, *USUAL)
def _another_batch(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a call is right if the call before it had other pages, longer requests, or another request order."""
    workload, call = candidate.workload, candidate.new_call()
    if workload.cache is None or candidate.off(candidate.usual_output, candidate.normal):
        return
    kept = "is a block table, or a plan made of it, kept by its shape or its address?"
    candidate.output(call)
    moved = call.under(cache=msgspec.structs.replace(workload.cache, form=MOVED))
    found = candidate.off(candidate.output(moved), candidate.normal)
    if workload.page_size:
        yield found and f"after a call of the same batch with its pages elsewhere, {found}: {kept}"
    longer = written(tuple(Request(each.new, each.total + MORE_KEYS) for each in workload.requests))
    before = msgspec.structs.replace(workload, batch=longer)
    tensors = place(draw_normal(before, candidate.normal.seed), before).tensors
    candidate.output(call, workload=before, mask=bind(before), tensors=tensors)
    found = candidate.off(candidate.output(call), candidate.normal)
    yield found and f"after a call of as many, longer requests, {found}: is a workspace kept and not cleared?"
    batch = written(workload.requests[::-1])
    other = msgspec.structs.replace(workload, batch=batch)
    if other == workload:
        return
    seed = candidate.normal.seed
    reference = Reference(other, draw_normal(other, seed), seed, has_gradients=False)
    tensors = candidate.new_call(reference).tensors
    found = candidate.off(candidate.output(call, workload=other, mask=bind(other), tensors=tensors), reference)
    yield found and f"after a call of the same requests in another order, {found}: {kept}"


@rule(OTHER_SETTINGS, *USUAL)
def _other_settings(candidate: Candidate) -> Iterator[Outcome]:
    """Check that a call is right if the calls before it, of the same batch, had another scale, window or cache scales.

    Plans that are made once for all layers keep such numbers. A setting that the function does not take is left out.
    """
    workload, seed = candidate.workload, candidate.normal.seed
    if workload.cache is None or candidate.off(candidate.usual_output, candidate.normal):
        return
    changes: dict[str, dict[str, object]] = {"scale of the scores": {"scale": workload.score_scale / 2}}
    if workload.cache_dtype != SAME:
        changes["scale of the cache"] = {"seed": workload.seed + 1}  # it decides the scales of keys and values
    if workload.window:
        changes["window"] = {"mask": f"sliding_window({workload.window // 2 + 1})"}
    for words, change in changes.items():
        other = msgspec.structs.replace(workload, **change)
        if candidate.caller.unsupported(other):
            continue
        reference = Reference(other, draw_normal(other, seed), seed, has_gradients=False)
        call = candidate.new_call(reference)
        try:
            found = candidate.off(candidate.output(call), reference)
        except Exception as error:
            if type(error).__name__ != NotImplementedError.__name__:
                raise
            continue
        yield found and f"after calls of the same batch with another {words}, {found}: is it kept in a plan?"


@rule(POOLS, *USUAL, may_refuse=True)
def _pools_in_memory(candidate: Candidate) -> Iterator[Outcome]:
    """Check that pools that are views of one buffer, in which key and value pages alternate, give the same answer."""
    if candidate.workload.page_size and candidate.workload.cache is not None:
        views = msgspec.structs.replace(candidate.workload.cache, form=STRIDED)
        words = "pools that are views of one buffer, page by page, give"
        yield candidate.compare(words, candidate.usual_output, cache=views)


@rule(NEIGHBOURS, *USUAL, is_noted=True)
def _neighbours(candidate: Candidate) -> Iterator[Outcome]:
    """Check that the output for a request has the same bits alone, and in reverse order, as in a batch.

    The rule applies only if these bits do not depend on where the pages are in the pool.
    """
    if not candidate.workload.page_size or candidate.off(candidate.usual_output, candidate.normal):
        return
    requests = tuple(Request(each.new, each.total + MORE_KEYS) for each in candidate.workload.requests)
    whole = msgspec.structs.replace(candidate.workload, batch=written(requests))
    tensors, call = place(draw_normal(whole, candidate.normal.seed), whole).tensors, candidate.new_call()

    def answer(workload: Workload, tensors: Mapping[str, Tensor], form: str = "") -> Tensor:
        made = dataclasses.replace(call, workload=workload, tensors=dict(tensors))
        cache = workload.cache and msgspec.structs.replace(workload.cache, form=form)
        return candidate.output(made.under(cache=cache))

    beside = answer(whole, tensors)
    if not torch.equal(beside, answer(whole, tensors, MOVED)):
        return
    news, totals = zip(*requests, strict=True)
    ends = [*itertools.accumulate(news)], [*itertools.accumulate(totals)]
    distinct = {request: index for index, request in enumerate(requests) if request.new}
    for request, index in [*distinct.items()][:MOST_ALONE]:
        batch = written((request,))
        queries, keys = (slice(end[index] - size, end[index]) for end, size in zip(ends, request, strict=True))
        rows = {"query": queries, "key": keys, "value": keys}
        own = {name: tensors[name][:, :, part].clone() for name, part in rows.items()}
        alone = answer(msgspec.structs.replace(whole, batch=batch, shared_prefix=0), {**tensors, **own})
        apart = float((alone.double() - beside[:, :, queries].double()).abs().max())
        yield f"the request {batch} alone is {apart:.2g} apart from the same request in {whole.batch}" * bool(apart)
    parts = {"query": news, "key": totals, "value": totals}
    turned = {name: _turned(tensors[name], sizes) for name, sizes in parts.items()}
    reverse = msgspec.structs.replace(whole, batch=written(requests[::-1]))
    if not whole.shared_prefix:
        again = _turned(answer(reverse, {**tensors, **turned}), news[::-1])
        apart = float((again.double() - beside.double()).abs().max())
        yield f"in reverse order the requests of {whole.batch} are {apart:.2g} apart" * bool(apart)


def _turned(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return a tensor (1, H, tokens, width) with its requests, of `sizes` tokens each, in reverse order."""
    return torch.cat(tensor.split([*sizes], dim=2)[::-1], dim=2)
