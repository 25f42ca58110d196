"""`python -m studies.dispatch`: what `attnbench.attention` adds to a call of the implementation that it chooses.

Both call the same bound implementation on the same tiny tensors, in interleaved blocks, with the engine that times
everything else (timing/functions.py); the difference of their least times in a visit is the dispatch. Its
interval is that of the median over visits, by ranks. The direct call's A/A control shows what no difference looks like.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray

from attnbench.contract import dispatch as dispatching
from attnbench.devices import environment
from attnbench.statistics.intervals import Block
from attnbench.statistics.verdict import half_widths
from attnbench.storage.records import Arm, Sample
from attnbench.timing.functions import FunctionComparison
from attnbench.workloads.policy import Evidence, Policy, Regret, Row

CHOICES = ("sdpa", "bmm")
DIRECT, DISPATCHED = "direct", "dispatched"
Floats = NDArray[np.float64]
SHAPE = (1, 2, 8, 16)
"""B, H, T, K: of so little work that a call is nearly all overhead."""


def dispatch(
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/dispatch"),
    budget: Annotated[float, typer.Option(min=1.0, help="Seconds for each choice.")] = 30.0,
) -> None:
    """Measure the dispatch for each choice."""
    torch.set_num_threads(1)
    rows = [row(name, budget) for name in CHOICES]
    heads = ["chosen", "direct call", "through attention", "dispatch", "95 % interval", "A/A control", "visits"]
    lines = [heads, ["---"] * len(heads), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    to.mkdir(parents=True, exist_ok=True)
    shape = "B={}, H={}, T=S={}, K={}".format(*SHAPE)
    found = environment.collect()
    text = (
        "# What `attnbench.attention` adds to a call\n\n"
        f"{shape}, float32, causal, no gradients, one thread; {found.cpu}, torch {found.versions['torch']}. Of each "
        "visit the least time of an undisturbed block counts; shown are medians over visits.\n\n" + table
    )
    (to / "dispatch.md").write_text(text, encoding="utf-8")
    typer.echo(text)


def row(name: str, budget_s: float) -> list[str]:
    """The cells of a choice."""
    compared = FunctionComparison(calls(name), DIRECT)
    compared.run(budget_s, stops=False)
    visits = {arm: least(samples, compared.discarded) for arm, samples in compared.samples.items()}
    direct, dispatched = visits[compared.reference], visits[Arm(implementation=DISPATCHED)]
    added, same = interval(apart(dispatched, direct)), interval(apart(visits[compared.reference.as_control()], direct))
    return [
        f"`{name}`",
        f"{np.median([*direct.values()]):.2f} us",
        f"{np.median([*dispatched.values()]):.2f} us",
        f"{added[1]:.2f} us",
        f"{added[0]:.2f} to {added[2]:.2f} us",
        f"{same[0]:.2f} to {same[2]:.2f} us",
        str(len(compared.visits)),
    ]


def calls(name: str) -> Mapping[str, Callable[[], object]]:
    """The call through `attention`, and the call of the function to which it is bound."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(SHAPE) for _ in range(3))
    policy, attention = always(name), dispatching.attention
    shapes, dtypes = [torch.Size(SHAPE)] * 3, (torch.float32,) * 3
    bound = dispatching.bound(*shapes, dtypes, query.device, False, torch.get_num_threads(), True, None, policy)  # noqa: FBT003 - positional, as `attention` calls it

    def dispatched() -> object:
        return attention(query, key, value, is_causal=True, policy=policy)

    def direct() -> object:
        return bound(query, key, value)

    return {DISPATCHED: dispatched, DIRECT: direct}


def always(name: str) -> Policy:
    """A policy of this machine by which one implementation is the fastest for such calls."""
    batch_size, num_heads, seq_len, head_dim = SHAPE
    row = Row(
        device="cpu",
        dtype="float32",
        direction="inference",
        queries="many",
        mask="causal",
        is_grouped=False,
        num_threads=1,
        batch_heads=batch_size * num_heads,
        seq_len=seq_len,
        kv_len=seq_len,
        head_dim=head_dim,
        winner=name,
        ratio=0.5,
    )
    return Policy(
        machine=environment.collect().machine_fingerprint,
        date="",
        environment={},
        num_threads=1,
        evidence=Evidence(runs=(), candidates=(name,)),
        regret=Regret(mean=0.0, worst=0.0, sdpa_mean=0.0, sdpa_worst=0.0),
        rows=(row,),
    )


def least(samples: Sequence[Sample], discarded: set[Block]) -> dict[tuple[int, int], float]:
    """The least of each visit in us, of the blocks that were not disturbed: whatever interrupts a call adds to it."""
    found: dict[tuple[int, int], list[float]] = {}
    for each in samples:
        if (each.epoch, each.visit, each.block) not in discarded:
            found.setdefault((each.epoch, each.visit), []).append(each.value * 1e6)
    return {place: min(values) for place, values in found.items()}


def apart(one: Mapping[tuple[int, int], float], other: Mapping[tuple[int, int], float]) -> Floats:
    """By how much `one` takes longer in each visit."""
    return np.array([one[place] - other[place] for place in one.keys() & other.keys()])


def interval(differences: Floats) -> tuple[float, float, float]:
    """The lower end, the middle and the upper end of the 95 % interval of the median over visits, by ranks."""
    ordered = np.sort(differences)
    half = float(half_widths(1.0, 1e6, 0.05)) * math.sqrt(len(ordered)) / 2
    low = max(0, math.floor(len(ordered) / 2 - half) - 1)
    return float(ordered[low]), float(np.median(ordered)), float(ordered[len(ordered) - 1 - low])


if __name__ == "__main__":
    typer.run(dispatch)
