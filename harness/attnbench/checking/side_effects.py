"""Forbidden side effects of a call: writing into its inputs or the mask, or setting the random seed.

`watch_call` wraps one call of a candidate (the implementation under test), forward or backward, in the candidate's
process, and describes the forbidden changes. The module imports no other part of the check, so other processes can
use it, too. Before the call `watch_call` fills free memory with NaN: an answer read from uninitialized memory is wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Generator, Tensor

from attnbench.contract import BoundMask
from attnbench.devices import device, names

INPUTS, MASK, SEED = "inputs kept", "mask kept", "seed kept"  # names of the rules about side effects
NAN_BYTE = 255  # a number whose bytes all have this value is NaN, in every floating-point dtype
POISON_BYTES = 2**20
"""Larger blocks are not filled with NaN, because the system provides them fresh, filled with zeros."""
POISON_COPIES, CACHED_BYTES, CACHED_COPIES = 2, 2**11, 8
"""Blocks of each size to fill with NaN: CACHED_COPIES if they have at most CACHED_BYTES, because glibc caches up to 7
free blocks of each small size for each thread; POISON_COPIES if they are larger."""


class SideEffectError(ValueError):
    """A call changed shared state; `rule` is the broken rule, and the message describes the change."""

    def __init__(self, rule: str, found: str) -> None:
        super().__init__(found)
        self.rule = rule


def require_faultless(faults: Mapping[str, str]) -> None:
    """Raise SideEffectError for the first forbidden change in `faults`, if any; `faults` maps rules to descriptions."""
    for rule, found in faults.items():
        raise SideEffectError(rule, found)


def poison(inputs: Iterable[Tensor], mask: BoundMask | None) -> None:
    """Fill with NaN the free blocks that allocators reuse first for tensors as large as inputs, scores or row sums."""
    tensors = list(inputs)
    if not tensors:
        return
    itemsize = tensors[0].itemsize
    sizes = {tensor.numel() * tensor.itemsize for tensor in tensors}
    if mask is not None:
        batch, queries, keys = mask.sizes
        rows = batch * (mask.num_heads or 1) * queries
        sizes |= {rows * itemsize, rows * keys * itemsize}
    blocks = []  # kept until all are filled, so that no block is filled twice
    for size in sorted((size for size in sizes if size <= POISON_BYTES), reverse=True):
        for _ in range(POISON_COPIES if size > CACHED_BYTES else CACHED_COPIES):
            blocks.append(torch.full((size,), NAN_BYTE, dtype=torch.uint8, device=tensors[0].device))  # noqa: PERF401


@contextmanager
def watch_call(
    given: Mapping[str, Tensor], mask: BoundMask | None = None, *, name: str = "call"
) -> Iterator[dict[str, str]]:
    """Watch one call, named `name` in messages, which must not change the tensors `given`, the `mask` or a random seed.

    Yields a mapping from rules to descriptions of forbidden changes, which is filled in after the call. Before the
    call, `poison` fills free memory with NaN. After the call, changes of the mask are undone, and generators whose seed
    the call has set get their earlier state back. The call's exceptions propagate.
    """
    faults = dict[str, str]()
    if mask is not None:
        mask.lent = {}
        mask.restore()  # earlier changes are not this call's fault
    copies = {id(tensor): _stored(tensor.detach()).clone() for tensor in given.values()}  # one for each tensor
    seeds = _seeds()
    poison(given.values(), mask)
    try:
        yield faults
    finally:
        forms, now = [] if mask is None else mask.restore(), _seeds()
        reseeded = [each for each, (_, seed, _) in seeds.items() if now[each][1] != seed]
        for generator, _, state in (seeds[each] for each in reseeded):
            generator.set_state(state)
    lent = {} if mask is None else mask.lent
    changed = [each for each, tensor in given.items() if not _is_same(_stored(tensor.detach()), copies[id(tensor)])]
    if changed := [*changed, *(each for each, (tensor, copy) in lent.items() if not _has_same_bytes(tensor, copy))]:
        faults[INPUTS] = f"the {name} changed its input {', '.join(changed)}"
    if forms:
        faults[MASK] = f"the {name} changed the mask that it was given ({', '.join(forms)}), which others share"
    if reseeded:
        faults[SEED] = f"the {name} set the seed of {', '.join(reseeded)}: what others draw repeats after it"


def _stored(tensor: Tensor) -> Tensor:
    """Return a tensor without the repetitions of expanded axes, whose stride is 0."""
    for axis, stride in enumerate(tensor.stride()):
        tensor = tensor if stride else tensor.narrow(axis, 0, min(1, tensor.shape[axis]))
    return tensor


def _is_same(tensor: Tensor, kept: Tensor) -> bool:
    """Return whether shape, dtype and every value are equal; NaN equals NaN."""
    if tensor.shape != kept.shape or tensor.dtype != kept.dtype:
        return False
    return torch.equal(tensor, kept) or torch.allclose(tensor, kept, rtol=0.0, atol=0.0, equal_nan=True)


def _has_same_bytes(tensor: Tensor, kept: Tensor) -> bool:
    """Return whether every byte is equal, also in NaN and in 8-bit floating-point numbers."""
    return torch.equal(as_bytes(tensor), as_bytes(kept))


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor with at least one axis, as uint8."""
    return tensor.contiguous().view(torch.uint8)


def _seeds() -> dict[str, tuple[Generator, int, Tensor]]:
    """Return (generator, seed, state) for each of torch's global random generators, by name."""
    generators = {"torch's generator": torch.default_generator}
    for name in names():
        generators |= device(name).generators()
    return {name: (each, each.initial_seed(), each.get_state()) for name, each in generators.items()}
