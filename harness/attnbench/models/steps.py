"""Time a whole model's step with different attention implementations."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace

from attnbench.models.in_model import NAME, Model, arguments, function_name
from attnbench.models.records import StepTime
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Arm
from attnbench.timing.functions import FunctionComparison


def time_steps(model: Model, attentions: tuple[str, ...], budget_s: float) -> list[StepTime]:
    """Time a step of the whole model with each attention implementation, for about `budget_s` seconds in all.

    The implementations take turns in interleaved blocks, and the first one is the baseline. A step includes a backward
    pass if `model.spec.has_gradients` is true. Each implementation is registered under a name of its own, so that
    switching is quick.
    """
    batch, _ = model.batches["whole"]
    words = arguments(model.model, {key: value for key, value in batch.items() if key != "attention_mask"})
    configs: dict[int, Any] = {
        id(each): each for module in model.model.modules() if (each := getattr(module, "config", None)) is not None
    }

    def step(name: str) -> object:
        for config in configs.values():
            config._attn_implementation_internal = name  # noqa: SLF001 - set_attn_implementation walks all modules
        with torch.set_grad_enabled(model.spec.has_gradients):
            output = model.model(**words)
            if not model.spec.has_gradients:
                return output
            final = output.logits if hasattr(output, "logits") else output.last_hidden_state
            learned = [each for each in model.model.parameters() if each.requires_grad]
            return torch.autograd.grad(final.sum(), learned, allow_unused=True)

    names = {attention: function_name(attention, f"{NAME}_{place}") for place, attention in enumerate(attentions)}
    calls: dict[str, Callable[[], object]] = {attention: partial(step, name) for attention, name in names.items()}
    for call in calls.values():
        call()
    compared = FunctionComparison(calls, attentions[0], num_blocks=2, seed=model.spec.seed)
    compared.run(budget_s)
    found = []
    for attention in attentions:
        seconds = median_estimate(compared.samples[Arm(implementation=attention)]).point
        time = StepTime(attention=attention, seconds=seconds)
        if (judged := compared.judgements.get(attention)) is not None:
            time = replace(time, ratio=judged.ratio, low=judged.low, high=judged.high, verdict=str(judged.verdict))
        found.append(time)
    return found
