"""Which cells a calibration runs, and where those of this environment are found again.

Sizes are spread in the logarithms of B * H, T, S and K: combinations of batch size, heads and width in turns, each with
lengths that follow Halton's sequence, between a small call and one of some hundred million multiply-adds. Every other
shape has as many keys as queries. Where several tensors are of one size, it does not show which of them a peak is made
of; the others show it.

Source: J. H. Halton, On the efficiency of certain quasi-random sequences of points, 1960.
"""

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from attnbench.analysis.prediction import Family, Predictor, family, fit
from attnbench.analysis.results import read
from attnbench.analysis.table import table
from attnbench.storage.events import Plan
from attnbench.storage.journal import has_journal
from attnbench.storage.records import Environment
from attnbench.units import percent
from attnbench.workloads.workload import SIZES, Workload

FOLDER = "calibration"
BUDGET_S = 57.0
"""With the start of the command and the fit it takes less than a minute."""
STAGES = ("calibrate",)
HEADS, WIDTHS = ((1, 4), (2, 12), (1, 8), (1, 2), (2, 8), (1, 1), (2, 16)), (128, 64, 32)
"""Batch size and heads, in turns, as many as are no multiple of a base of the sequence; and widths of a head."""
MOST_KEYS = 24.0
"""For each query, where there are not as many; or queries for each key."""
LEAST_PRODUCTS, MOST_PRODUCTS = 8e5, 2e8
"""Multiply-adds of queries and keys of the smallest and the largest call."""
GRAIN, LEAST_LENGTH, MOST_LENGTH = 16, 32, 1024
NUM_ROUNDS = 8
"""Visits of a cell after its first, where there is time."""
MOST_CELLS = 60
"""Of one implementation and kind of workload; a minute sees fewer."""
FIRST, APART = 3, 28
"""Kinds of workload begin so far apart in the sequence of shapes, since those that differ in the mask share a law; each
with a small one, since it is checked in full."""
MALLOC = "MALLOC_"
"""Settings that begin so follow from the plan's allocator."""


def halton(number: int, base: int) -> float:
    """The term of Halton's sequence in a prime base, 2: 0.5, 0.25, 0.75, 0.125, ..."""
    found, share = 0.0, 1 / base
    number += 1
    while number:
        found += share * (number % base)
        number, share = number // base, share / base
    return found


def shapes(like: Workload, kept: Collection[str], start: int = 0, number: int = MOST_CELLS) -> Iterator[Workload]:
    """Workloads like one, in other sizes; axes in `kept` stay. Any first few are spread, from whatever start."""
    low, high = math.log(LEAST_PRODUCTS), math.log(MOST_PRODUCTS)
    seen = set()
    for count in range(start, start + number):
        (batch, heads), width = HEADS[count % len(HEADS)], WIDTHS[(count + count // len(HEADS)) % len(WIDTHS)]
        sizes = {"batch_size": batch, "num_heads": heads, "head_dim": width, "seq_len": 0, "kv_len": 0}
        sizes |= dict.fromkeys(("num_kv_heads", "value_dim", "embed_dim"), 0)
        sizes |= {axis: getattr(like, axis) for axis in kept if axis in sizes}
        share = halton(count, 2)
        pairs = math.exp(low + (high - low) * share) / (sizes["batch_size"] * sizes["num_heads"] * sizes["head_dim"])
        ratio = 1.0 if halton(count, 5) < 1 / 2 else MOST_KEYS ** (2 * halton(count, 3) - 1)
        spread = LEAST_LENGTH * (MOST_LENGTH / LEAST_LENGTH) ** share
        queries, keys = sizes["seq_len"], sizes["kv_len"]
        if not queries:
            queries = _length(min(pairs / keys, spread) if keys else math.sqrt(pairs / ratio))
        if not keys:
            keys = _length(min(pairs / queries, spread) if "seq_len" in kept else ratio * queries)
        mask = str(like.mask_rule.at_other_length())
        made = msgspec.structs.replace(like, **(sizes | {"seq_len": queries, "kv_len": keys, "mask": mask}))
        if made not in seen:
            seen.add(made)
            yield made


def _length(exact: float) -> int:
    """The nearest multiple of the grain that is allowed."""
    return min(MOST_LENGTH, max(LEAST_LENGTH, GRAIN * round(exact / GRAIN)))


def planned(plan: Plan, settings: Collection[str], budget_s: float = BUDGET_S) -> Plan:
    """The calibration for the workloads of a plan: their kinds in spread sizes; axes in `settings` stay as they are.

    Kinds that differ in the mask alone share their turns, since they share laws.
    """
    kept = SIZES & set(settings)
    kinds = {tuple(value for axis, value in each.axes().items() if axis not in SIZES): each for each in plan.workloads}
    sharing = defaultdict[Family, list[list[Workload]]](list)
    for place, each in enumerate(kinds.values()):
        sharing[family(each, "")].append(list(shapes(each, kept, FIRST + APART * place)))
    mixed = in_turns([in_turns(turns) for turns in sharing.values()])
    return msgspec.structs.replace(
        plan,
        sweep=FOLDER,
        workloads=tuple(dict.fromkeys(mixed)),
        metrics=("latency", "peak_memory"),
        stages=STAGES,
        budget_s=budget_s,
        num_blocks=3,
        num_rounds=NUM_ROUNDS,
        left_out={},
        mixes=(),
        traced={},
    )


def in_turns(lists: Sequence[Sequence[Workload]]) -> list[Workload]:
    """The first of each list, then the second of each, and so on."""
    return [own[number] for number in range(max(map(len, lists))) for own in lists if number < len(own)]


def is_same(one: Environment, other: Environment) -> bool:
    """Whether times of one hold in the other; what a plan's allocator sets may differ."""

    def compared(environment: Environment) -> dict[str, object]:
        fields = environment.must_match()
        return fields | {"settings": {name: value for name, value in fields["settings"].items() if MALLOC not in name}}

    return compared(one) == compared(other)


def stored(results: Path, environment: Environment) -> Iterator[Path]:
    """The calibrations of an environment below a results folder, the newest first; those that can be read."""
    for folder in filter(has_journal, sorted((results / FOLDER).glob("*"), reverse=True)):
        with suppress(ValueError):
            if any(is_same(environment, each) for each in read(folder).environments.values()):
                yield folder


def known(results: Path, environment: Environment) -> Predictor | None:
    """What is learnt from the calibrations of an environment below a results folder; None where that is nothing."""
    folders = list(stored(results, environment))
    with suppress(ValueError):
        return load(folders) if folders else None
    return None


def load(folders: Sequence[Path]) -> Predictor:
    """What is learnt from stored calibrations together; the same cell of a newer one, which comes first, counts.

    Raises:
        ValueError: no cell of them was timed.
    """
    import pandas as pd

    cells = pd.concat([table(read(folder)) for folder in folders])
    return fit(cells.drop_duplicates(["workload", "implementation"]))


def facts(predictor: Predictor) -> dict[str, float]:
    """What a predictor knows, and how wrong it is about cells that it did not know."""
    errors = np.abs(np.expm1(predictor.errors))
    return {
        "cells": predictor.num_cells,
        "families": len(predictor.laws),
        "left_out_median": float(np.median(errors)),
        "left_out_95": float(np.quantile(errors, 0.95)),
    }


def sentence(found: Mapping[str, float]) -> str:
    """The answer: from what is predicted, and how well."""
    return (
        f"{found['cells']} cells were timed; each predicted from the others, times are off by "
        f"{percent(found['left_out_median'])} in the median and {percent(found['left_out_95'])} at the 95th percentile."
    )
