"""Check right implementations: every bundled one that is not compiled, on a new workload and inputs for every seed."""

from collections.abc import Iterable, Iterator
from random import Random

import msgspec
import torch

from attnbench import plugins
from attnbench.case import reason_against
from attnbench.checking import agreement
from attnbench.checking.reference import Reference, References, call_candidate
from attnbench.contract import Implementation
from attnbench.contract.loading import implementation
from attnbench.workloads.workload import DTYPES, Workload
from studies.detection.judges import OURS, Bar, bar, draw_uniform, verdicts
from studies.frame import Row

LENGTHS = (1, 2, 3, 16, 17, 33, 64, 67, 129)
MASKS = (
    "none",
    "causal",
    "causal_bottom_right",
    "padding",
    "sliding_window(5)",
    "prefix(3)",
    "boolean(40)",
    "additive",
    "causal+alibi",
    "sliding_window(5)+softcap(5)",
    "padding+softcap(20)+alibi",
    "window(2,5)",
    "causal+chunks(4)",
    "ragged",
    "relative_buckets(8,20)",
    "causal+relative_buckets_past(8,20)",
)
QUERIES_ARE_KEYS = {"ragged"}
HEADS = ((1, 1), (2, 2), (4, 2), (3, 1))
WIDTHS = (1, 4, 16, 40, 64)
OTHERS_TRY = {"normal", "needles"}


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """The verdict of one criterion for results (`rule`, see judges.py) on a right implementation.

    `inputs` is the kind of inputs; it is "all" for attnbench's own check.
    """

    implementation: str
    seed: int
    workload: str
    inputs: str
    rule: str
    is_right: bool
    error_ratio: float | None = None  # largest error / tolerance, for attnbench's own check


def workload_of(seed: int) -> Workload:
    """Draw a small workload, always the same one for a seed."""
    draws = Random(seed)
    heads, groups = draws.choice(HEADS)
    seq_len = draws.choice(LENGTHS)
    kv_len = seq_len if draws.random() < 0.7 else draws.choice(LENGTHS)  # noqa: PLR2004 - mostly self-attention
    width, mask = draws.choice(WIDTHS), draws.choice(MASKS)
    direction, scope = draws.choice(("inference", "forward_backward")), draws.choice(("attention", "module"))
    return Workload(
        batch_size=draws.choice((1, 2)),
        seq_len=seq_len,
        kv_len=max(seq_len, kv_len) if mask in QUERIES_ARE_KEYS else kv_len,
        num_heads=heads,
        num_kv_heads=groups,
        head_dim=width,
        dtype=draws.choice(DTYPES),
        mask=mask,
        direction=direction,
        scope=scope,
        sinks=draws.choice(("none", "none", "learned")),
        scale=draws.choice((0.0, 0.0, 0.3, 1.0)),
        seed=seed,
    )


def rows(first: int, last: int, _: int = 0) -> list[Row]:
    """Run all trials with the seeds range(first, last); return a row for each trial."""
    torch.set_num_threads(1)  # most tensors are small: a second thread would mostly wait
    return [msgspec.to_builtins(trial) for trial in trials(range(first, last))]


def trials(seeds: Iterable[int]) -> Iterator[Trial]:
    """Yield the trials of every implementation with each seed: by our check, and by other rules on three input kinds.

    Implementations that need a compiler are left out.
    """
    found = {name: implementation(name) for name in plugins.stems(plugins.PACKAGE)}
    every = {name: made for name, made in found.items() if not made.compiles}  # each seed has new sizes
    for seed in seeds:
        yield from _with_seed(seed, every)


def _with_seed(seed: int, every: dict[str, Implementation]) -> Iterator[Trial]:
    workload = workload_of(seed)
    supported = {name: found for name, found in every.items() if reason_against(found, workload) is None}
    try:
        references = References(workload, seed)
    except ValueError:  # nothing to compare: one query of width 1 that sees one key
        return
    bars: dict[str, Bar] = {"uniform": bar(Reference(workload, draw_uniform(workload, seed), seed))}
    bars |= {name: bar(made) for name, made in references.by_probe.items() if name in OTHERS_TRY}
    for name, found in supported.items():
        agreed = agreement.check(references, found)
        place = {"implementation": name, "seed": seed, "workload": workload.id}
        yield Trial(**place, inputs="all", rule=OURS, is_right=agreed.agrees, error_ratio=agreed.error_ratio)  # type: ignore[arg-type]
        for inputs, against in bars.items():
            for rule, is_right in verdicts(call_candidate(found, against.reference).compared, against):
                if rule != OURS:
                    yield Trial(**place, inputs=inputs, rule=rule, is_right=is_right)  # type: ignore[arg-type]
