"""`attnbench model`: check and time attention inside a real model."""

from pathlib import Path
from typing import Literal

from attnbench import plugins
from attnbench.analysis.conclusion import Conclusion, factor
from attnbench.commands import Command, running
from attnbench.commands.frame import present
from attnbench.commands.options import require_extra
from attnbench.console import say
from attnbench.models.records import OWN, Judged, ModelSpec
from attnbench.processes import one_off_tasks
from attnbench.processes.one_off_tasks import ModelOutcome
from attnbench.reports import exit_status
from attnbench.units import percent, sanitize_line, show

USUAL = ("sdpa", "eager")
TIMEOUT_S = 600.0  # of one step


def model(
    config: str,
    *,
    attention: list[str] | None = None,
    num_layers: int = 0,
    batch_size: int = 2,
    seq_len: int = 128,
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32",
    gradients: bool = True,
    budget_s: float = 30.0,
) -> Conclusion:
    """Swap the attention of a transformers model with random weights, check every layer, time the whole step.

    Outputs of each attention layer, logits and gradients are compared with the model in float64. Nothing is downloaded.

    Options:
        config (CONFIG): A model's config.json, or the folder it lies in.
        attention (NAME|FILE.py:NAME): May be repeated; times are compared with the first. eager, sdpa and
            flex_attention are those of transformers; any other is an implementation of attnbench, or yours. Default:
            sdpa, eager.
        num_layers (--layers N): 0: as many as fit.
        batch_size (B): Sequences.
        seq_len (T): Tokens; no more than the model can take.
        dtype: Of weights and inputs.
        gradients (--gradients/--no-gradients): Also check and time backward.
        budget_s (--budget SECONDS): For timing; 0: only check.
    """
    require_extra("transformers", "transformers")
    if not Path(config).exists():
        raise ValueError(f"{config} does not exist: give a config.json, or the folder it lies in")
    attentions = tuple(dict.fromkeys(attention or USUAL))
    plugins.check_specs([each for each in attentions if each not in OWN])
    sizes = {"num_layers": num_layers, "batch_size": batch_size, "seq_len": seq_len}
    spec = ModelSpec(config=config, dtype=dtype, seed=0, has_gradients=gradients, **sizes)
    outcome = one_off_tasks.check_in_model(
        spec, attentions, budget_s=budget_s, timeout_s=TIMEOUT_S, note=running.print_note
    )
    present(lambda: outcome, lambda: _print(outcome))
    return exit_status.of_model(outcome.judged, outcome.trouble)


def _print(outcome: ModelOutcome) -> None:
    for line in _times(outcome):
        say(line, "bold")
    for judged in outcome.judged.values():
        say(_verdict(judged), "bold red" if judged.is_finding else "")
    built = outcome.built
    layers = f"{built.num_layers} of {built.all_layers} layers"
    weights = f"{built.num_parameters / 1e6:.3g} M random weights"
    sizes = f"B={built.batch_size} T={built.seq_len} {built.dtype}"
    say(f"{built.architecture}, {layers}, {weights}; {sizes}; batches: {', '.join(built.batches)}")


def _times(outcome: ModelOutcome) -> list[str]:
    if not outcome.timed:
        return [f"nothing was timed: {outcome.trouble}"] if outcome.trouble else []
    base, *others = outcome.timed
    lines = [
        f"A step with {one.attention} is {factor(ratio, one.low, one.high, f'with {base.attention}')}: {one.verdict}."
        for one in others
        if (ratio := one.ratio) is not None
    ]
    times = ", ".join(f"{one.attention} {show(one.seconds, 's')}" for one in outcome.timed)
    return [*lines, f"A step: {times}."]


def _verdict(judged: Judged) -> str:
    if judged.reason:
        return sanitize_line(f"{judged.attention}: {'not judged' if judged.is_refused else 'failed'}: {judged.reason}")
    if judged.differences:
        first = judged.differences[0]
        size = "not finite" if first.error is None else f"off by {first.error:.3g}"
        where = f"{first.place} ({first.batch} batch): {size}, allowed {first.allowed:.3g}"
        return sanitize_line(f"{judged.attention}: WRONG, first at {where}; {len(judged.differences)} tensors differ")
    share = "" if judged.error_ratio is None else f", errors up to {percent(judged.error_ratio)} of the tolerance"
    return sanitize_line(f"{judged.attention}: right in all {judged.num_compared} tensors{share}")


COMMAND = Command(model, order=35)
