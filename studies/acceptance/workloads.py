"""What is timed: eight operations from 20 us to 20 ms, with one thread and with two, made in the process that measures.

All are torch's own, in float32 without gradients, so that no tool is helped or hindered by what it times.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import repeat

import torch
from torch import Tensor
from torch.nn import functional

Call = Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """An operation and how many threads it may use."""

    workload: str
    num_threads: int

    @property
    def id(self) -> str:
        """A short name."""
        return f"{self.workload}, {self.num_threads} thread{'s' if self.num_threads > 1 else ''}"


def textbook(num_heads: int, length: int) -> Call:
    """The textbook form of attention: two batched products and a softmax; width 64 per head."""
    query, key, value = _heads(num_heads, length)
    scale = 1 / math.sqrt(query.shape[-1])
    return lambda: torch.softmax(query @ key.transpose(-1, -2) * scale, -1) @ value


def sdpa(num_heads: int, length: int) -> Call:
    """The scaled_dot_product_attention of torch, width 64 per head."""
    query, key, value = _heads(num_heads, length)
    return lambda: functional.scaled_dot_product_attention(query, key, value)


def _heads(num_heads: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    draws = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, num_heads, length, 64, generator=draws).unbind()
    return query, key, value


def matmul(size: int) -> Call:
    """A product of two square matrices."""
    left, right = torch.randn(2, size, size, generator=torch.Generator().manual_seed(0)).unbind()
    return lambda: left @ right


def softmax(num_rows: int, num_columns: int) -> Call:
    """A softmax over rows."""
    scores = torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(0))
    return lambda: torch.softmax(scores, -1)


WORKLOADS: dict[str, Callable[[], Call]] = {  # times on two cores of an EPYC 9004 with one thread
    "softmax 128x256": lambda: softmax(128, 256),  # 20 us
    "matmul 128": lambda: matmul(128),  # 45 us
    "SDPA 4 heads 64": lambda: sdpa(4, 64),  # 70 us
    "textbook 4 heads 128": lambda: textbook(4, 128),  # 240 us
    "matmul 256": lambda: matmul(256),  # 330 us
    "textbook 8 heads 256": lambda: textbook(8, 256),  # 1.7 ms
    "SDPA 8 heads 512": lambda: sdpa(8, 512),  # 6.5 ms
    "matmul 1024": lambda: matmul(1024),  # 20 ms
}
MILLISECOND = Cell(workload="textbook 8 heads 256", num_threads=1)
HUNDRED_US = Cell(workload="SDPA 4 heads 64", num_threads=1)


def cells(number: int) -> list[Cell]:
    """The first `number` of sixteen: each operation once, threads in turn, then each with the other number."""
    names = list(WORKLOADS)
    once = [Cell(workload=name, num_threads=1 + place % 2) for place, name in enumerate(names)]
    again = [Cell(workload=name, num_threads=2 - place % 2) for place, name in enumerate(names)]
    return spread(once + again, number)


def spread(every: list[Cell], number: int) -> list[Cell]:
    """So many of them: all of a half where there are enough, evenly spaced from short to long where not."""
    half = len(every) // 2
    if number >= half:
        return every[:number]
    return [every[round(place * (half - 1) / max(1, number - 1))] for place in range(number)]


@contextmanager
def ready(cell: Cell) -> Iterator[Call]:
    """The cell's call, warm, with its threads and without gradients."""
    before = torch.get_num_threads()
    torch.set_num_threads(cell.num_threads)
    try:
        with torch.inference_mode():
            call = WORKLOADS[cell.workload]()
            for _ in range(3):
                call()
            yield call
    finally:
        torch.set_num_threads(before)


def heads(share: float) -> tuple[Call, Call]:
    """Textbook attention with n heads and with n + 1, where one more is about that share of the work."""
    number = round(1 / share)
    return textbook(number, 128), textbook(number + 1, 128)


def spin(num_turns: int) -> None:
    """An empty loop of the interpreter: about 10 ns a turn."""
    for _ in repeat(None, num_turns):
        pass


def with_more(call: Call, share: float) -> Call:
    """The call and then an empty loop that takes about that share of its time, measured now and interleaved."""
    from time import perf_counter

    num_turns, num_calls = 20_000, 1
    call_s, spin_s = [], []
    for _ in range(15):
        start = perf_counter()
        for _ in repeat(None, num_calls):
            call()
        middle = perf_counter()
        spin(num_turns)
        call_s.append((middle - start) / num_calls)
        spin_s.append((perf_counter() - middle) / num_turns)
        num_calls = max(1, int(5e-4 / call_s[-1]))
    turns = max(1, round(share * sorted(call_s)[7] / sorted(spin_s)[7]))

    def slower() -> None:
        call()
        spin(turns)

    return slower


def copies(call: Call) -> tuple[Call, Call]:
    """The same call as two objects that cost the same, for a clock that distinguishes them."""
    return partial(call), partial(call)
