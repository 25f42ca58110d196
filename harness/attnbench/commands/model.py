"""`attnbench model`: attention inside a real model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from attnbench.commands import Command
from attnbench.commands.options import AsJson, require_extra

if TYPE_CHECKING:
    from attnbench.models.records import Difference, Judged
    from attnbench.processes.asides import ModelOutcome

USUAL = ("sdpa", "eager")
MOST_PLACES = 3


def model(
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="A model's config.json, or the folder it lies in.")],
    *,
    attention: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME|FILE.py:NAME",
            help="May be repeated; times are compared with the first. eager, sdpa and flex_attention are those of "
            "transformers; any other is an implementation of attnbench, or yours. Default: sdpa, eager.",
        ),
    ] = None,
    num_layers: Annotated[int, typer.Option("--layers", min=0, metavar="N", help="0: as many as fit.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, metavar="B", help="Sequences.")] = 2,
    seq_len: Annotated[int, typer.Option(min=2, metavar="T", help="Tokens; no more than the model can take.")] = 128,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], typer.Option(help="Of weights and inputs.")
    ] = "float32",
    gradients: Annotated[bool, typer.Option("--gradients/--no-gradients", help="Also check and time backward.")] = True,
    budget_s: Annotated[
        float, typer.Option("--budget", min=0.0, metavar="SECONDS", help="For timing; 0: only check.")
    ] = 30.0,
    timeout_s: Annotated[float, typer.Option("--timeout", min=1.0, metavar="SECONDS", help="Of one step.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of weights and inputs.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Swap the attention of a transformers model with random weights, check every layer, time the whole step.

    Outputs of each attention layer, logits and gradients are compared with the model in float64. Nothing is downloaded.
    """
    import msgspec

    from attnbench import plugins
    from attnbench.commands import running
    from attnbench.models.records import OWN, ModelSpec
    from attnbench.processes import asides
    from attnbench.reports import endings

    require_extra("transformers", "transformers")
    if not Path(config).exists():
        raise ValueError(f"{config} does not exist: give a config.json, or the folder it lies in")
    attentions = tuple(dict.fromkeys(attention or USUAL))
    plugins.check_specs([each for each in attentions if each not in OWN])
    spec = ModelSpec(
        config=config,
        num_layers=num_layers,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype=dtype,
        seed=seed,
        has_gradients=gradients,
    )
    outcome = asides.check_in_model(spec, attentions, budget_s=budget_s, timeout_s=timeout_s, note=running.note)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(outcome), indent=2).decode())
    else:
        _print(outcome)
    running.finish(endings.of_model(outcome.judged, outcome.trouble), is_silent=as_json)


def _print(outcome: "ModelOutcome") -> None:
    """Print times, then verdicts, then a description of the model."""
    from attnbench.commands.terminal import say

    for line in _times(outcome):
        say(line, "bold")
    for judged in outcome.judged.values():
        say(_verdict(judged), "bold red" if judged.is_finding else "")
        for place in judged.differences[1:MOST_PLACES]:
            say(f"  also {_place(place)}")
        if len(judged.differences) > MOST_PLACES:
            say(f"  and {len(judged.differences) - MOST_PLACES} more")
    if outcome.built is not None:
        built = outcome.built
        layers = f"{built.num_layers} layers"
        if built.num_layers < built.all_layers:
            layers = f"reduced to {built.num_layers} of {built.all_layers} layers"
        sizes = f"B={built.batch_size} T={built.seq_len} {built.dtype}"
        weights = f"{built.num_parameters / 1e6:.3g} M random weights"
        say(f"{built.architecture}, {layers}, {weights}; {sizes}; batches: {', '.join(built.batches)}")


def _times(outcome: "ModelOutcome") -> list[str]:
    from attnbench.analysis.conclusion import factor
    from attnbench.units import show

    if not outcome.timed:
        return [f"nothing was timed: {outcome.trouble}"] if outcome.trouble else []
    base, *others = outcome.timed
    compared = [(one, one.ratio) for one in others if one.ratio is not None]
    lines = [
        f"A step with {one.attention} is {factor(ratio, one.low, one.high, f'with {base.attention}')}: {one.verdict}."
        for one, ratio in compared
    ]
    times = ", ".join(f"{one.attention} {show(one.seconds, 's')}" for one in outcome.timed)
    return [*lines, f"A step: {times}."]


def _verdict(judged: "Judged") -> str:
    from attnbench.units import percent, plain

    if judged.reason:
        return plain(f"{judged.attention}: {'not tried' if judged.is_refused else 'FAILED'}: {judged.reason}")
    if judged.differences:
        return plain(f"{judged.attention}: WRONG, first at {_place(judged.differences[0])}")
    share = "" if judged.error_ratio is None else f", errors up to {percent(judged.error_ratio)} of the tolerance"
    return plain(f"{judged.attention}: right in all {judged.num_compared} tensors{share}")


def _place(difference: "Difference") -> str:
    size = "not finite" if difference.error is None else f"off by {difference.error:.3g}"
    return f"{difference.place} ({difference.batch} batch): {size}, allowed {difference.allowed:.3g}"


COMMAND = Command(
    function=model,
    order=55,
    examples=(
        "attnbench model config.json",
        "attnbench model llama/config.json --attention sdpa --attention mine.py:mine",
        "attnbench model config.json --layers 2 --dtype bfloat16 --no-gradients",
    ),
)
