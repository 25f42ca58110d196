"""The project's building blocks as the tutorials use them: single steps of attention, and whole implementations.

Shapes: B batch, T query length, S key length, H heads, G key/value heads, K head width, V value width, D embedding
width.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attnbench.checking import mistakes, oracle, steps
from attnbench.checking.oracle import RowMask
from attnbench.contract import BoundMask, Implementation, Weights
from attnbench.contract.loading import named
from attnbench.plugins import PACKAGE, stems
from attnbench.workloads.masks import parse_mask
from attnbench.workloads.workload import Workload

IMPLEMENTATIONS: dict[str, Implementation] = {name: named(name) for name in stems(PACKAGE)}


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator within the context with `torch.manual_seed`; restore its state afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def row_mask(query_len: int, key_len: int, mask: str = "none", batch_size: int = 1) -> RowMask:
    """Build the mask named `mask`, with rows for all queries."""
    sizes = (batch_size, query_len, key_len)
    return RowMask(rule=parse_mask(mask), sizes=sizes, num_heads=1, rows=torch.arange(query_len))


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: str = "none", changes: steps.Changes | None = None
) -> dict[str, Tensor]:
    """Compute every step, by name, for one sequence: query (H, T, K), key (H, S, K), value (H, S, V)."""
    rows = row_mask(query.shape[1], key.shape[1], mask)
    made = steps.attend(query[None], key[None], value[None], rows, changes)
    return {name: tensor[0] for name, tensor in made.items()}


def attend_tokens(
    x: Tensor, weights: Weights, mask: str = "none", context: Tensor | None = None, changes: steps.Changes | None = None
) -> dict[str, Tensor]:
    """Compute every step, by name, for one sequence: x (T, D) and, for cross-attention, context (S, D)."""
    source = x if context is None else context
    step = {**steps.DEFAULTS, **(changes or {})}
    query, key, value = step["projection"](x[None], source[None], weights)
    made = steps.attend(query, key, value, row_mask(len(x), len(source), mask), changes)
    made["output"] = step["output"](made["context"], weights)
    return {name: tensor[0] for name, tensor in made.items()}


def unscaled(made: dict[str, Tensor]) -> Tensor:
    """Compute the scores (H, T, S) before the division by sqrt(K), from the steps of `attend` or `attend_tokens`."""
    return oracle.product(made["query"], made["key"].transpose(-2, -1))


def planted(mistake: str, workload: Workload) -> steps.Changes:
    """Return the steps that a mistake of the catalogue replaces, by name."""
    return next(found.changes for found in mistakes.catalogue(workload) if found.name == mistake)


def output(name: str, weights: Weights, x: Tensor, mask: str = "none", context: Tensor | None = None) -> Tensor:
    """Compute the output of an implementation for x (B, T, D): (B, T, D), or (B, T, H*V) without `weights.out`."""
    key_len = x.shape[1] if context is None else context.shape[1]
    bound = BoundMask(parse_mask(mask), (x.shape[0], x.shape[1], key_len), "cpu")
    with torch.no_grad(), seeded(0):  # new layers draw random weights before they get these
        made: Tensor = IMPLEMENTATIONS[name].build(weights).eval()(x, context, mask=bound)
    return made
