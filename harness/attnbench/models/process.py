"""A check inside a model of the package transformers, in a process of its own: `python -m ... ASKED FILE`.

It is asked by JSON, and writes a line for each event to the file: what somebody's code prints goes elsewhere.
"""

import functools
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from attnbench.checking.tolerance import Tolerance
from attnbench.devices import environment
from attnbench.models import in_model
from attnbench.models.events import OWN, AnyEvent, Asked, Impossible, Timed, Trying
from attnbench.models.in_model import NAME, Candidate, Model
from attnbench.statistics.intervals import median_estimate
from attnbench.storage.records import Arm
from attnbench.timing.functions import FunctionComparison


def main() -> None:
    """Build, check each attention, time those that agree."""
    asked = msgspec.json.decode(sys.argv[1], type=Asked)
    place = Path(sys.argv[2])

    def say(event: AnyEvent) -> None:
        with place.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")

    warnings.filterwarnings("ignore", module="transformers")
    torch.set_num_threads(environment.physical_cores())
    say(Trying(step="building"))
    try:
        model, expected = _prepared(asked)
    except ValueError as error:
        say(Impossible(reason=str(error)))
        return
    say(model.built)
    right = [attention for attention in asked.attentions if attention in asked.timed]
    for attention in asked.attentions:
        if attention not in asked.checked:
            say(Trying(step="checking", attention=attention))
            judged = in_model.judge(asked, model, expected, attention)
            say(judged)
            right += [attention] * judged.is_right
    ordered = tuple(attention for attention in asked.attentions if attention in right)
    if len(ordered) > 1 and asked.budget_s > 0:
        say(Trying(step="timing"))
        for timed in time_steps(asked, model, ordered):
            say(timed)


def _prepared(asked: Asked) -> tuple[Model, dict[str, dict[str, Tolerance]]]:
    """The model and what is expected of it.

    Raises:
        ValueError: the package cannot read the configuration, or there is no such model here.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    in_model.register()
    try:
        config = AutoConfig.from_pretrained(asked.config, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"transformers cannot read {asked.config}: {(str(error).splitlines() or ['?'])[0]}") from None
    model = in_model.build(asked, config)
    return model, in_model.expect(model, grads=asked.has_gradients)


def time_steps(asked: Asked, model: Model, attentions: tuple[str, ...]) -> list[Timed]:
    """The step of the whole model, forward or forward and backward, in interleaved blocks; the first is the baseline.

    The package is asked for every attention by a name of its own, so that a call pays nothing for the exchange.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    batch, _ = model.batches["whole"]
    given = {key: value for key, value in batch.items() if key != "attention_mask"}
    dtype = next(model.model.parameters()).dtype
    given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in given.items()}
    more = {"use_cache": False} if "input_ids" in given else {}
    calls: dict[str, Callable[[], object]] = {}
    spent: dict[str, list[float]] = {}
    for place, attention in enumerate(attentions):
        name = attention
        if attention not in OWN:
            name = f"{NAME}_{place}"
            AttentionInterface.register(name, _timed(Candidate(attention), spent.setdefault(attention, [])))
            AttentionMaskInterface.register(name, sdpa_mask)
        calls[attention] = functools.partial(_step, model.model, name, {**given, **more}, asked.has_gradients)
    for call in calls.values():
        call()
    shares = {}
    for attention, call in calls.items():
        if attention in spent:
            spent[attention].clear()
            start = time.perf_counter()
            call()
            shares[attention] = sum(spent[attention]) / (time.perf_counter() - start)
    compared = FunctionComparison(calls, attentions[0], num_blocks=2, seed=asked.seed)
    compared.run(asked.budget_s)
    found = []
    for attention in attentions:
        seconds = median_estimate(compared.samples[Arm(implementation=attention)]).point
        judged = compared.judgements.get(attention)
        found.append(
            Timed(
                attention=attention,
                seconds=seconds,
                ratio=None if judged is None else judged.ratio,
                low=None if judged is None else judged.low,
                high=None if judged is None else judged.high,
                verdict="" if judged is None else str(judged.verdict),
                attention_share=shares.get(attention),
            )
        )
    return found


def _timed(attend: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """The same function, its seconds noted: those of its forward pass."""

    def call(*given: Any, **more: Any) -> Any:  # noqa: ANN401 - the package's own signature
        start = time.perf_counter()
        made = attend(*given, **more)
        spent.append(time.perf_counter() - start)
        return made

    return call


def _step(model: nn.Module, name: str, given: Mapping[str, Any], grads: bool) -> object:  # noqa: FBT001 - see `time_steps`
    """One step with the attention of that name."""
    for config in _configs(model):
        config._attn_implementation_internal = name  # noqa: SLF001 - set_attn_implementation walks all modules
    with torch.set_grad_enabled(grads):
        output = model(**given)
        if not grads:
            return output
        final = output.logits if hasattr(output, "logits") else output.last_hidden_state
        learned = [each for each in model.parameters() if each.requires_grad]
        return torch.autograd.grad(final.sum(), learned, allow_unused=True)


def _configs(model: nn.Module) -> list[Any]:
    """Every configuration that a module of the model reads, once."""
    found = getattr(model, "_attnbench_configs", None)
    if found is None:
        every = {id(each): each for module in model.modules() if (each := getattr(module, "config", None)) is not None}
        found = list(every.values())
        object.__setattr__(model, "_attnbench_configs", found)
    return found


if __name__ == "__main__":
    main()
