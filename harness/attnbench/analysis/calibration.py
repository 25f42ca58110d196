"""Which cells a calibration runs, and where those of this environment are found again.

Sizes are spread in the logarithms of B * H, T, S and K: a few combinations of batch size, heads and width, each with
lengths that follow van der Corput's sequence between a small call and one of some hundred million multiply-adds. Few
combinations, since the rules of the check are tried once for each (checking/agreement.py).
"""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from attnbench.analysis.prediction import Predictor, fit
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
COMBINATIONS = ((1, 4, 128), (1, 1, 64), (1, 12, 64), (2, 2, 32), (2, 16, 32), (1, 8, 64), (1, 2, 128))
"""Batch size, heads, and width of a head."""
SHAPES_OF_KEYS = (1.0, 1.0, 0.25, 1.0, 1.0, 4.0, 1.0)
"""Keys for each query, in turns."""
LEAST_PRODUCTS, MOST_PRODUCTS = 1.5e6, 1.5e8
"""Multiply-adds of queries and keys of the smallest and the largest call."""
GRAIN, LEAST_LENGTH, MOST_LENGTH = 16, 32, 1024
MOST_CELLS = 60
"""Of one implementation and kind of workload; a minute sees fewer."""
APART = 5
"""Kinds of workload begin so far apart in the sequence of shapes, since those that differ in the mask share a law."""
MALLOC = "MALLOC_"
"""Settings that begin so follow from the plan's allocator."""


def halves(number: int) -> float:
    """The term of van der Corput's sequence: 0.5, 0.25, 0.75, 0.125, ..."""
    found, share = 0.0, 0.5
    number += 1
    while number:
        found += share * (number % 2)
        number, share = number // 2, share / 2
    return found


def shapes(like: Workload, kept: Collection[str], start: int = 0, number: int = MOST_CELLS) -> Iterator[Workload]:
    """Workloads like one, in other sizes; axes in `kept` stay. Any first few are spread, from whatever start."""
    low, high = math.log(LEAST_PRODUCTS), math.log(MOST_PRODUCTS)
    seen = set()
    for count in range(start, start + number):
        batch, heads, width = COMBINATIONS[count % len(COMBINATIONS)]
        sizes = {"batch_size": batch, "num_heads": heads, "head_dim": width, "seq_len": 0, "kv_len": 0}
        sizes |= dict.fromkeys(("num_kv_heads", "value_dim", "embed_dim"), 0)
        sizes |= {axis: getattr(like, axis) for axis in kept if axis in sizes}
        share = halves(count)
        pairs = math.exp(low + (high - low) * share) / (sizes["batch_size"] * sizes["num_heads"] * sizes["head_dim"])
        ratio = SHAPES_OF_KEYS[(count + count // len(SHAPES_OF_KEYS)) % len(SHAPES_OF_KEYS)]
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
    """The calibration for the workloads of a plan: their kinds in spread sizes; axes in `settings` stay as they are."""
    kept = SIZES & set(settings)
    kinds = {tuple(value for axis, value in each.axes().items() if axis not in SIZES): each for each in plan.workloads}
    turns = [list(shapes(each, kept, APART * place)) for place, each in enumerate(kinds.values())]
    mixed = [own[number] for number in range(max(map(len, turns))) for own in turns if number < len(own)]
    return msgspec.structs.replace(
        plan,
        sweep=FOLDER,
        workloads=tuple(dict.fromkeys(mixed)),
        metrics=("latency", "peak_memory"),
        stages=STAGES,
        budget_s=budget_s,
        num_blocks=2,
        left_out={},
        mixes=(),
        traced={},
    )


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
