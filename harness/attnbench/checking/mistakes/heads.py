"""Mistakes in which key/value head a query head reads."""

from torch import Tensor

from attnbench.checking.mistakes.kind import Mistake
from attnbench.checking.steps import Scene
from attnbench.contract import repeat_heads
from attnbench.workloads.workload import Workload

Pair = tuple[Tensor, Tensor]


def interleaved(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """Query head h reads key/value head h % G: `repeat` where `repeat_interleave` belongs."""
    times = query.shape[1] // key.shape[1]
    return key.repeat(1, times, 1, 1), value.repeat(1, times, 1, 1)


def first_for_all(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """Every query head reads key/value head 0."""
    shape = (-1, query.shape[1], -1, -1)
    return key[:, :1].expand(shape), value[:, :1].expand(shape)


def first_value_for_all(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """The keys are right; every head mixes the values of head 0."""
    return repeat_heads(key, query.shape[1]), value[:, :1].expand(-1, query.shape[1], -1, -1)


def last_key_value_shifted(query: Tensor, key: Tensor, value: Tensor, scene: Scene) -> Pair:
    """Each key is answered with the value of the key after it."""
    return repeat_heads(key, query.shape[1]), repeat_heads(value.roll(-1, dims=2), query.shape[1])


def _is_grouped(workload: Workload) -> bool:
    return 1 < workload.num_kv_heads < workload.num_heads


def _has_several(workload: Workload) -> bool:
    return workload.num_kv_heads > 1


MISTAKES = (
    Mistake(
        name="kv_heads_interleaved",
        words="query head h reads key/value head h % G instead of h // (H / G): repeat instead of repeat_interleave",
        changes={"heads": interleaved},
        fits=_is_grouped,
    ),
    Mistake(
        name="first_kv_head_for_all",
        words="every query head reads key/value head 0",
        changes={"heads": first_for_all},
        fits=_has_several,
    ),
    Mistake(
        name="first_value_head_for_all",
        words="every head mixes the values of head 0",
        changes={"heads": first_value_for_all},
        fits=_has_several,
    ),
    Mistake(
        name="value_of_next_key",
        words="each key is answered with the value of the key after it",
        changes={"heads": last_key_value_shifted},
        fits=lambda workload: workload.kv_len > 1,
    ),
)
