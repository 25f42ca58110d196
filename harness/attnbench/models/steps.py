"""The time of a whole model's step with different attentions."""

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from msgspec.structs import replace
from torch import nn

from attnbench.models.in_model import NAME, Model, arguments, function_name
from attnbench.models.records import StepTime
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Arm
from attnbench.timing.functions import FunctionComparison


def time_steps(model: Model, attentions: tuple[str, ...], budget_s: float) -> list[StepTime]:
    """Time the step of the whole model, forward or with backward, in interleaved blocks; the first is the baseline.

    Each attention is registered under a name of its own, so that switching costs nothing inside a call.
    """
    batch, _ = model.batches["whole"]
    words = arguments(model.model, {key: value for key, value in batch.items() if key != "attention_mask"})
    configs = {
        id(each): each for module in model.model.modules() if (each := getattr(module, "config", None)) is not None
    }
    take = functools.partial(_step, model.model, configs.values())
    calls: dict[str, Callable[[], object]] = {}
    for place, attention in enumerate(attentions):
        name = function_name(attention, f"{NAME}_{place}")
        calls[attention] = functools.partial(take, name, words, model.spec.has_gradients)
    for call in calls.values():
        call()
    compared = FunctionComparison(calls, attentions[0], num_blocks=2, seed=model.spec.seed)
    compared.run(budget_s)
    found = []
    for attention in attentions:
        seconds = median_estimate(compared.samples[Arm(implementation=attention)]).point
        step = StepTime(attention=attention, seconds=seconds)
        if (judged := compared.judgements.get(attention)) is not None:
            step = replace(step, ratio=judged.ratio, low=judged.low, high=judged.high, verdict=str(judged.verdict))
        found.append(step)
    return found


def _step(
    model: nn.Module,
    configs: Collection[Any],
    name: str,
    given: Mapping[str, Any],
    grads: bool,  # noqa: FBT001 - see `time_steps`
) -> object:
    for config in configs:
        config._attn_implementation_internal = name  # noqa: SLF001 - set_attn_implementation walks all modules
    with torch.set_grad_enabled(grads):
        output = model(**given)
        if not grads:
            return output
        final = output.logits if hasattr(output, "logits") else output.last_hidden_state
        learned = [each for each in model.parameters() if each.requires_grad]
        return torch.autograd.grad(final.sum(), learned, allow_unused=True)
