"""Rules for functions that read a paged cache, about errors that no single call shows; they join those of rules.py."""

import dataclasses
from collections.abc import Iterator

import msgspec

from attnbench.case import bind, draw_normal, place
from attnbench.checking.reference import Reference
from attnbench.checking.rules import ANOTHER_BATCH, POOLS, USUAL, Candidate, Outcome, rule
from attnbench.contract.pages import MOVED, STRIDED
from attnbench.workloads.batch import Request, written

MORE_KEYS = 600
"""Keys that requests of an earlier call have in addition: more than one part of a kernel that splits the keys."""


@rule(ANOTHER_BATCH, *USUAL)
def _another_batch(candidate: Candidate) -> Iterator[Outcome]:
    """A call is right after one with its pages elsewhere, with longer requests, or with these in another order."""
    workload, case = candidate.workload, candidate.case()
    if workload.cache is None or candidate.off(candidate.output, candidate.normal):
        return
    kept = "is a block table, or a plan made of it, kept by its shape or its address?"
    with case.grad_mode():
        case.output()
        moved = bind(workload)
        moved.cache = msgspec.structs.replace(workload.cache, form=MOVED)
        found = candidate.off(dataclasses.replace(case, mask=moved).output(), candidate.normal)
        if workload.page_size:
            yield found and f"after a call of the same batch with its pages elsewhere, {found}: {kept}"
        longer = written(tuple(Request(each.new, each.total + MORE_KEYS) for each in workload.requests))
        before = msgspec.structs.replace(workload, batch=longer)
        tensors = place(draw_normal(before, candidate.normal.seed), before).tensors
        dataclasses.replace(case, workload=before, mask=bind(before), tensors=tensors).output()
        found = candidate.off(case.output(), candidate.normal)
        yield found and f"after a call of as many, longer requests, {found}: is a workspace kept and not cleared?"
        batch = written(workload.requests[::-1])
        other = msgspec.structs.replace(workload, batch=batch)
        if other == workload:
            return
        seed = candidate.normal.seed
        reference = Reference(other, draw_normal(other, seed), seed, has_gradients=False)
        output = dataclasses.replace(case, workload=other, mask=bind(other), tensors=reference.inputs.tensors).output()
        found = candidate.off(output, reference)
        yield found and f"after a call of the same requests in another order, {found}: {kept}"


@rule(POOLS, *USUAL, may_refuse=True)
def _pools_in_memory(candidate: Candidate) -> Iterator[Outcome]:
    """Pools of keys and values that are views of one buffer, alternating page by page, give the same answer."""
    if candidate.workload.page_size and candidate.workload.cache is not None:
        views = msgspec.structs.replace(candidate.workload.cache, form=STRIDED)
        words = "pools that are views of one buffer, page by page, give"
        yield candidate.compare(words, candidate.output, cache=views)
