"""An inspection for a program to read."""

import math

from attnbench.inspection.found import Beside, Compared, Found, Numbers, Walk
from attnbench.inspection.tables import first_difference

Json = dict[str, object]


def summary(found: Found, files: list[str]) -> Json:
    """Everything, as JSON can hold it: a number that is not finite is the text "-inf", "inf" or "nan"."""
    return {
        "implementation": found.implementation,
        "differs": found.differs,
        "first_difference": first_difference(found),
        "sentences": [
            {**_walk(walk), **_beside(beside)} for walk, beside in zip(found.walks, found.besides, strict=True)
        ],
        "examples": [{"scores": each.scores, "weights": each.weights} for each in found.examples],
        "growth": {
            "head_dim": found.growth.widths,
            "num_keys": found.growth.num_keys,
            "largest_weight_with_scale": _listed(found.growth.with_scale[:, 1]),
            "largest_weight_without": _listed(found.growth.without[:, 1]),
        },
        "files": files,
    }


def _walk(walk: Walk) -> Json:
    return {
        "words": walk.words,
        "workload": walk.workload.axes(),
        "steps": [{"name": step.name, "shape": step.shape, "values": _listed(step.values)} for step in walk.steps],
        "mask": walk.masking.mask,
        "weights_without_mask": _listed(walk.masking.without),
        "weights_under_mask": _listed(walk.masking.under),
        "softness": [
            {"softmax_of": each.name, "largest": each.largest, "entropy_bits": each.entropy} for each in walk.scaling
        ],
    }


def _beside(beside: Beside) -> Json:
    return {"unseen": beside.unseen, "compared": [_compared(each, beside.words) for each in beside.compared]}


def _compared(each: Compared, words: tuple[str, ...]) -> Json:
    return {
        "name": each.name,
        "step": each.step,
        "outcome": str(each.outcome).lower(),
        "trouble": each.trouble,
        "largest_difference": _number(each.largest),
        "allowed": each.allowed,
        "place": each.place,
        "where": each.where(words),
        "values": None if each.here is None else _listed(each.here),
        "oracle": _listed(each.oracle),
    }


def _listed(values: Numbers) -> object:
    """Nested lists."""
    return [_listed(part) for part in values] if values.ndim else _number(float(values))


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
