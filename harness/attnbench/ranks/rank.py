"""One rank of a call: its tokens, and its communication with the other ranks.

Shapes are as in contract/__init__.py. T and S are equal here; one rank has t of the T queries and s of the S keys.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Share = Callable[[Tensor, Tensor, Tensor, "Rank"], Tensor]
"""Function of one rank's query (B, H, t, K), key (B, G, s, K), value (B, G, s, V) and Rank; returns (B, H, t, V)."""


def tokens_of(order: str, rank: int, world_size: int, length: int) -> list[range]:
    """Return the tokens of a rank as ranges: one part (`contiguous`), two parts (`zigzag`), or all parts (`whole`).

    With `zigzag`, the tokens are split into 2W parts for W ranks, and each rank has one early and one late part, so
    that under a causal mask all ranks have about the same number of visible pairs of a query and a key. The lengths of
    parts differ by at most one token; some parts are empty if there are fewer tokens than parts.

    Source: zigzag, https://github.com/zhuzilin/ring-flash-attention.
    """
    num_parts = world_size * (2 if order == "zigzag" else 1)
    bounds = [part * length // num_parts for part in range(num_parts + 1)]
    chosen = {"contiguous": [rank], "zigzag": [rank, num_parts - 1 - rank], "whole": [*range(num_parts)]}[order]
    return [range(bounds[part], bounds[part + 1]) for part in chosen]


class CommunicationError(RuntimeError):
    """A rank could not send or receive, because another rank is late or has died."""


@dataclass(kw_only=True)
class Rank:
    """One rank of a call: its tokens, and methods to exchange tensors with the other ranks, with counters.

    `bytes_sent` counts the bytes of tensors sent to other ranks, and `waited_s` the seconds spent in sending and
    receiving.
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
        """Return the tokens of a rank, by default of this rank (see `tokens_of`)."""
        return tokens_of(self.order, self.rank if rank is None else rank, self.world_size, self.length)

    def num_tokens(self, rank: int) -> int:
        """Return the number of tokens of a rank."""
        return sum(map(len, self.tokens(rank)))

    def pass_on(self, tensors: Sequence[Tensor], num_tokens: int) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank and receiving from the previous one.

        Returns a function that waits until all is sent and received, and returns the received tensors. A received
        tensor has the shape of the sent one, except that its axis 2 has `num_tokens`.
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
            del sent[:]  # the tensors are kept until they have been sent
            return received

        return wait

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Collect every rank's tensor (B, G, t, K), in order of the ranks.

        If t differs between ranks, tensors are padded for sending; the result has no padding.
        """
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
        """Send `tensors[n]` to rank n, and receive from rank n a tensor of the shape `shapes[n]` (all to all).

        Returns the received tensors in order of the ranks, this rank's own included.
        """
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
        """Add the seconds spent inside the context to `waited_s`, and turn exceptions into CommunicationError."""
        start = time.perf_counter()
        try:
            yield
        except Exception as error:
            raise CommunicationError(f"{type(error).__name__}: {error}") from error
        finally:
            self.waited_s += time.perf_counter() - start


def as_bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes, uint8 (N,), which every backend can send, whatever the dtype."""
    return tensor.view(-1).view(torch.uint8)


def num_bytes(tensor: Tensor) -> int:
    """Return the size of all elements of a tensor in bytes."""
    return tensor.numel() * tensor.element_size()
