"""Attention over several ranks: how the tokens are shared out, and what a rank does and sends.

A call hands query, key and value to `over_ranks` with a function of one rank's share. With one rank it is called here;
with more it is called in each process of a group (rank_group.py), each with its own tokens.

Shapes as in contract/__init__.py; t and s are the tokens of one rank's share of T and S, which are equal here.
"""

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnbench.contract.bound_mask import BoundMask
from attnbench.contract.rank_group import Asked, RankGroup, group_of
from attnbench.devices import device
from attnbench.workloads.workload import Workload

ORDERS = ("contiguous", "zigzag", "whole")
Share = Callable[[Tensor, Tensor, Tensor, "Rank"], Tensor]
"""Query (B, H, t, K), key (B, G, s, K), value (B, G, s, V) of one rank -> its output (B, H, t, V)."""


def tokens_of(order: str, rank: int, world_size: int, length: int) -> list[range]:
    """The tokens of a rank, in its order: one part of all (`contiguous`), two (`zigzag`), or all of them (`whole`).

    A zigzag rank has one of the first and one of the last of twice as many parts, so that under a causal mask each has
    as many visible pairs. Parts differ by a token where the length does not divide, and are empty where it is short.

    Source: zigzag, https://github.com/zhuzilin/ring-flash-attention.
    """
    num_parts = world_size * (2 if order == "zigzag" else 1)
    bounds = [part * length // num_parts for part in range(num_parts + 1)]
    chosen = {"contiguous": [rank], "zigzag": [rank, num_parts - 1 - rank], "whole": [*range(num_parts)]}[order]
    return [range(bounds[part], bounds[part + 1]) for part in chosen]


class CommunicationError(RuntimeError):
    """What one rank could not send or receive: another one is late, or gone."""


@dataclass(kw_only=True)
class Rank:
    """One of the ranks of a call: its place, and what it sends to the others, counted where it is sent.

    `bytes_sent` are those of tensors addressed to other ranks; `waited_s` is the time spent in sending and receiving.
    """

    rank: int = 0
    world_size: int = 1
    length: int  # T
    order: str = "contiguous"
    is_causal: bool = False
    scale: float = 1.0
    bytes_sent: int = 0
    waited_s: float = 0.0

    def tokens(self, rank: int | None = None) -> list[range]:
        """The tokens of this rank, or of another one."""
        return tokens_of(self.order, self.rank if rank is None else rank, self.world_size, self.length)

    def num_tokens(self, rank: int) -> int:
        """How many tokens a rank has."""
        return sum(map(len, self.tokens(rank)))

    def pass_on(self, tensors: Sequence[Tensor], num_tokens: int) -> Callable[[], list[Tensor]]:
        """Begin to send to the next rank, and to receive from the one before; what is returned waits for it.

        What comes has the same shapes but for axis 2, of `num_tokens`.
        """
        sent = [tensor.contiguous() for tensor in tensors]
        received = [each.new_empty((*each.shape[:2], num_tokens, *each.shape[3:])) for each in sent]
        after, before = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        operations = [dist.P2POp(dist.isend, as_bytes(each), after) for each in sent if each.numel()]
        operations += [dist.P2POp(dist.irecv, as_bytes(each), before) for each in received if each.numel()]
        self.bytes_sent += sum(map(num_bytes, sent))
        with self.waiting():
            under_way = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> list[Tensor]:
            with self.waiting():
                for each in under_way:
                    each.wait()
            del sent[:]  # kept until it has left
            return received

        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor (B, G, t, K), in order of the ranks; the shorter are sent as long as the longest."""
        if self.world_size == 1:
            return [tensor]
        numbers = [self.num_tokens(rank) for rank in range(self.world_size)]
        longest = max(numbers)
        padded = torch.nn.functional.pad(tensor, (0, 0, 0, longest - tensor.shape[2])).contiguous()
        found = [torch.empty_like(padded) for _ in numbers]
        self.bytes_sent += (self.world_size - 1) * num_bytes(padded)
        with self.waiting():
            dist.all_gather([as_bytes(each) for each in found], as_bytes(padded))
        return [each[:, :, :number] for each, number in zip(found, numbers, strict=True)]

    def exchange(self, tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
        """Send one tensor to each rank, this one included, and receive one of each, of these shapes (all to all)."""
        if self.world_size == 1:
            return [tensors[0]]
        flat = [as_bytes(tensor.contiguous()) for tensor in tensors]
        given = torch.cat(flat)
        received = [tensors[0].new_empty(tuple(shape)) for shape in shapes]
        lengths = [num_bytes(each) for each in received]
        taken = given.new_empty(sum(lengths))
        self.bytes_sent += given.numel() - flat[self.rank].numel()
        with self.waiting():
            dist.all_to_all_single(taken, given, lengths, [each.numel() for each in flat])
        for each, part in zip(received, taken.split(lengths), strict=True):
            as_bytes(each).copy_(part)
        return received

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time; an error is one of communication."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            raise CommunicationError(f"{type(error).__name__}: {error}") from error
        finally:
            self.waited_s += time.perf_counter() - start


def as_bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's numbers as bytes, in the same memory: whatever the dtype, every backend can send it."""
    return tensor.view(-1).view(torch.uint8)


def num_bytes(tensor: Tensor) -> int:
    """What its numbers take."""
    return tensor.numel() * tensor.element_size()


def not_over_ranks(workload: Workload) -> str | None:
    """Why no implementation over ranks computes the workload, in words, or None."""
    if workload.mask not in {"none", "causal"}:
        return f"it takes the masks none and causal, and not {workload.mask}"
    if workload.seq_len != workload.kv_len:
        return "its ranks share out queries and keys alike: give kv_len the value of seq_len"
    if workload.world_size == 1:
        return None
    if workload.scope == "module":
        return "over several ranks the projections would run in one process: choose scope=attention"
    if workload.num_threads > 1:
        return "each of several ranks has one thread: set num_threads to 1, or leave it at 0"
    found = device(workload.device).number()
    if found is not None and found < workload.world_size:
        return f"world_size={workload.world_size} needs a device for each rank, and {found} were found"
    return None


class _OverRanks(torch.autograd.Function):
    """A call whose graph is in the ranks."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - every tensor that has a gradient
        ctx: Any,  # noqa: ANN401
        query: Tensor,
        key: Tensor,
        value: Tensor,
        group: RankGroup,
        asked: Asked,
    ) -> Tensor:
        """The output of the ranks."""
        call, output = group.forward((query, key, value), asked)
        if asked.keeps_graph:
            ctx.group, ctx.call = group, call
            ctx.like = [(each.dtype, tuple(each.shape)) for each in (query, key, value)]
            weakref.finalize(ctx, group.forget, call)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """The gradients that the ranks have made."""
        made = ctx.group.backward(ctx.call, grad_output, ctx.like)
        needed = zip(made, ctx.needs_input_grad[:3], strict=True)
        return (*(each if needs else None for each, needs in needed), None, None)


def over_ranks(  # noqa: PLR0913 - the operands of `attend`, and how they are shared out
    share: Share, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask, *, order: str = "contiguous"
) -> Tensor:
    """Query (B, H, T, K), key (B, G, T, K), value (B, G, T, V) -> (B, H, T, V), computed by `mask.world_size` ranks.

    `share` is a function of a module, which each rank imports.

    Raises:
        RankLostError: a rank is gone; the message says which.
        RankSilentError: a rank did not answer in time.
        RuntimeError: a rank raised an error.
    """
    scale = mask.scale_for(query.shape[-1])
    if mask.world_size == 1:
        alone = Rank(length=query.shape[2], order=order, is_causal=mask.is_causal, scale=scale)
        return share(query, key, value, alone)
    asked = Asked(
        module=share.__module__,
        function=share.__qualname__,
        file=share.__code__.co_filename,
        length=query.shape[2],
        order=order,
        is_causal=mask.is_causal,
        scale=scale,
        keeps_graph=torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value)),
    )
    group = group_of(mask.world_size, query.device.type)
    output: Tensor = _OverRanks.apply(query, key, value, group, asked)  # type: ignore[no-untyped-call]
    return output
