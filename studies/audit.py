"""Measure the cost of always choosing the same implementation, on the shapes of known models and on random shapes.

    python -m studies.audit --run DIR train held_out     measures; rerun it to resume
    python -m studies.audit --run DIR table --to results/gallery/fastest

A chooser picks an implementation for each shape. Its regret is the time of its choice relative to that of the fastest
implementation. One chooser is a policy, learned from the training shapes alone. All choosers are judged on the held-out
shapes: those of all model presets, and random ones. Every process times all implementations of a shape. Every second
process selects the fastest one; only the other processes measure the regret, so that lucky times do not count twice.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from attnbench.analysis.comparisons import doubts
from attnbench.analysis.policy import learn
from attnbench.analysis.recommendation import recommend
from attnbench.analysis.results import Results, read
from attnbench.commands import running
from attnbench.processes.planning import build_plan
from attnbench.statistics.verdict import half_widths
from attnbench.storage.events import Plan
from attnbench.units import markdown_table, percent, significant
from attnbench.workloads import models
from attnbench.workloads.counts import dense_flops, score_matrix_bytes
from attnbench.workloads.workload import Workload
from studies import frame

CHOOSERS = {
    "PyTorch's automatic choice": "sdpa",
    "transformers, default": "transformers_sdpa",
    "transformers, eager": "transformers_eager",
    "always flash": "sdpa_flash",
    "always math": "sdpa_math",
}
"""Choosers by name, each with the implementation that it always takes."""
OTHERS = ("fused", "bmm", "einsum")
"""Further implementations that are timed: the fastest may be one of them, and our policy may choose them."""
OURS = "our policy"
NAMES = (*CHOOSERS.values(), *OTHERS)
STEPS = ("train", "held_out", "table")
NUM_TRAINED, NUM_DRAWN = 500, 200
SEED_TRAINED, SEED_DRAWN = 11, 18
DECODE, TRAINING = 0.25, 0.3
"""Share of random shapes with a single query, and share of training shapes among the rest."""
KINDS = (("none", "decode"), ("none", "prefill"), ("causal", "prefill"), ("none", "training"), ("causal", "training"))
"""Pairs (mask, kind of work) of the shapes from which the policy is learned; each pair occurs with both dtypes."""
VISITS_TRAINED, VISITS_HELD_OUT = 4, 12
LARGEST_MEAN, LARGEST_WORST = 0.01, 0.05
"""Limits of our policy's regret, as shares: of the mean over all shapes, and of the part beyond noise on any one."""
CALL_LIMIT_S = 0.25
MOST_FLOPS, MOST_SCORE_BYTES = 4e9, 2.0**28
"""Limits of a random shape: FLOPs of a call, and bytes of the score matrix. They keep calls short on one core."""
POINTS = {"prefill": {"seq_len": ["256"]}, "decode": {"batch_size": ["1"], "kv_len": ["1024"]}}
"""Phases in which the presets are measured, each with the axis values for presets of decoders."""


def drawn(number: int, seed: int, num_threads: int, *, of_each_kind: bool = False) -> list[Workload]:
    """Draw at least `number` different random workloads; they vary in length, heads, dtype, mask and direction.

    Workloads above MOST_FLOPS or MOST_SCORE_BYTES are dropped. If `of_each_kind` is true, each combination of mask,
    kind of work and dtype is drawn equally often, so that the policy learns rare ones, too.
    """
    draws, found = random.Random(seed), dict[str, Workload]()
    kinds = list(itertools.product(("float32", "bfloat16"), KINDS))
    while len(found) < number:
        for dtype, (mask, kind) in kinds if of_each_kind else [_any_kind(draws)]:
            workload = _drawn(draws, kind, mask=mask, dtype=dtype, num_threads=num_threads)
            if dense_flops(workload) <= MOST_FLOPS and score_matrix_bytes(workload) <= MOST_SCORE_BYTES:
                found.setdefault(workload.id, workload)
    return list(found.values())


def _any_kind(draws: random.Random) -> tuple[str, tuple[str, str]]:
    """Draw (dtype, (mask, kind of work)); the kind is "decode", "prefill" or "training"."""
    is_decode = draws.random() < DECODE
    dtype = draws.choice(["float32", "float32", "float32", "bfloat16"])
    mask = "none" if is_decode else draws.choice(["none", "causal"])
    return dtype, (mask, "decode" if is_decode else "training" if draws.random() < TRAINING else "prefill")


def _drawn(draws: random.Random, kind: str, *, mask: str, dtype: str, num_threads: int) -> Workload:
    heads = draws.choice([1, 2, 4, 8, 12, 16, 32])
    length = round(math.exp(draws.uniform(math.log(8), math.log(2048))))
    return Workload(
        batch_size=draws.choice([1, 1, 2, 4, 8, 16]),
        seq_len=1 if kind == "decode" else length,
        kv_len=2 * length if kind == "decode" else length,
        num_heads=heads,
        num_kv_heads=draws.choice([each for each in (1, heads // 4, heads, heads) if each and heads % each == 0]),
        head_dim=draws.choice([32, 64, 64, 80, 128]),
        dtype=dtype,
        mask=mask,
        direction="forward_backward" if kind == "training" else "inference",
        num_threads=num_threads,
    )


def of_presets(num_threads: int) -> list[Workload]:
    """List a workload for each layer kind and phase of each preset; skip layers with a scale or further inputs."""
    found: dict[str, Workload] = {}
    for name in models.names():
        model = models.preset(name)
        for phase, settings in POINTS.items():
            if phase in model.phases:
                for each in models.workloads(model, phase, settings if model.kind == "decoder" else {}):
                    workload = msgspec.structs.replace(each, num_threads=num_threads)
                    if not workload.operands and not workload.scale:  # plain functions receive neither of the two
                        found.setdefault(workload.id, workload)
    return list(found.values())


def planned(workloads: Sequence[Workload], seed: int, num_visits: int) -> Plan:
    """Plan a run that checks all implementations on each workload, then times them in `num_visits` fresh processes."""
    limits = build_plan(sweep="fastest", implementations=NAMES, call_limit_s=CALL_LIMIT_S, seed=seed)
    return msgspec.structs.replace(
        limits,
        sweep="audit",
        workloads=tuple(workloads),
        metrics=("latency",),
        budget_s=0.0,
        num_rounds=num_visits,
        num_blocks=3,
    )


def measure(folder: Path, workloads: Sequence[Workload], seed: int, num_visits: int) -> None:
    """Run the plan of these workloads in `folder`; if a run is stored there, resume it with its stored plan."""
    plan = read(folder).plan if (folder / "journal.jsonl").exists() else planned(workloads, seed, num_visits)
    running.execute(plan, folder, stages=("check",))
    running.execute(plan, folder, stages=("time",))


@dataclass(frozen=True, kw_only=True)
class Regret:
    """Cost of a choice on one workload, measured in processes that did not select the fastest implementation.

    `log` is the logarithm of the choice's time over that of the fastest; None if the choice has no time. `half` and
    `half_reference` are half-widths of the intervals of `log` and `against_reference`: smaller differences are noise.
    """

    workload: Workload
    chosen: str
    best: str
    log: float | None
    half: float
    against_reference: float | None  # logarithm of the choice's time over that of PyTorch's own choice
    half_reference: float

    @property
    def beyond(self) -> float:
        """The part of `log` that exceeds the noise, at least 0."""
        return max(0.0, (self.log or 0.0) - self.half)

    @property
    def is_behind(self) -> bool:
        """Whether PyTorch's automatic choice is faster than `chosen` by more than the noise."""
        return self.against_reference is not None and self.against_reference > self.half_reference


def regrets(results: Results, choose: Callable[[Workload], str]) -> Iterator[Regret]:
    """Yield the regret of the chooser `choose` on each workload whose fastest implementation is known."""
    for found in recommend(results):
        stands = found.standing
        if stands is None:
            continue
        leads = {stands.leader: (0.0, 0.0)} | {
            name: (each.effect.log, each.half_width or 0.0) for name, each in stands.others.items()
        }
        name = choose(found.workload)
        log, half = leads.get(name, (None, 0.0))
        reference, half_reference = leads.get(found.reference, (None, 0.0))
        yield Regret(
            workload=found.workload,
            chosen=name,
            best=stands.leader,
            log=log,
            half=half,
            against_reference=None if log is None or reference is None else log - reference,
            half_reference=0.0 if name == found.reference else math.hypot(half, half_reference),
        )


def mean(logs: Sequence[float]) -> tuple[float, float]:
    """Return the mean of log ratios, one for each workload, and the half-width of its 95 % interval."""
    number = len(logs)
    centre = sum(logs) / number
    error = math.sqrt(sum((log - centre) ** 2 for log in logs) / max(1, number - 1) / number)
    return centre, float(half_widths(1.0, max(1, number - 1), 0.05)) * error


def row(name: str, found: Sequence[Regret]) -> dict[str, str]:
    """Build the table row of the chooser `name` from its regrets."""
    logs = [each.log for each in found if each.log is not None]
    centre, half = mean(logs)
    worst = max(found, key=lambda each: each.beyond)
    return {
        "chooser": name,
        "shapes": str(len(logs)),
        "no time": str(len(found) - len(logs)),
        "regret (mean, 95 %)": f"{_share(centre)} ({_share(centre - half)} to {_share(centre + half)})",
        "worst": f"{significant(math.exp(max(logs)), 3)}x",
        "worst beyond the noise": _share(worst.beyond),
        "5 % or more beyond the noise": str(sum(each.beyond > math.log1p(LARGEST_WORST) for each in found)),
        "behind PyTorch's choice beyond the noise": str(sum(each.is_behind for each in found)),
    }


def miss(found: Regret) -> str:
    """Describe a shape on which the policy missed a limit."""
    best, own = (significant(math.exp(log or 0.0), 3) for log in (found.log, found.against_reference))
    return f"{found.chosen} on {found.workload.id}: {best}x of {found.best}, {own}x of PyTorch's own choice"


def _share(log: float) -> str:
    return f"{100 * math.expm1(log):.2f} %"


def table(run: Path, to: Path) -> str:
    """Learn the policy, judge all choosers, and write policy.json and audit.md; return the text of audit.md."""
    trained, held_out = read(run / "train"), read(run / "held_out")
    policy = learn(trained)
    to.mkdir(parents=True, exist_ok=True)
    policy.save(to / "policy.json")
    choosers: dict[str, Callable[[Workload], str]] = {
        OURS: policy.choose,
        **{name: lambda _, fixed=fixed: fixed for name, fixed in CHOOSERS.items()},  # type: ignore[misc] # mypy knows no type of a default
    }
    judged = {name: list(regrets(held_out, choose)) for name, choose in choosers.items()}
    own = [each for each in judged[OURS] if each.log is not None]
    centre, half = mean([each.log or 0.0 for each in own])
    worst = max(each.beyond for each in own)
    behind = sum(each.is_behind for each in own)
    interval = f"{_share(centre)} ({_share(centre - half)} to {_share(centre + half)})"
    limits = [
        ("regret in the geometric mean", interval, percent(LARGEST_MEAN), math.expm1(centre) <= LARGEST_MEAN),
        ("worst, beyond the noise", _share(worst), percent(LARGEST_WORST), math.expm1(worst) <= LARGEST_WORST),
        ("behind PyTorch's choice beyond the noise", str(behind), "0", behind == 0),
    ]
    asked = [
        {"asked of our policy": what, "found": found, "limit": limit, "": "met" if met else "MISSED"}
        for what, found, limit, met in limits
    ]
    missed = [each for each in own if each.is_behind or each.beyond > math.log1p(LARGEST_WORST)]
    lines = "".join(f"- {miss(each)}\n" for each in missed)
    misses = f"Where it misses:\n\n{lines}\n" if missed else ""
    environment = next(iter(held_out.environments.values()))
    where = f"{environment.cpu}, {held_out.plan.workloads[0].num_threads} thread, torch {environment.versions['torch']}"
    disturbed = "".join(f"**Doubtful.** {each}\n\n" for each in doubts(held_out))
    text = f"""# What fixed choices of an implementation cost

{disturbed}{markdown_table(asked)}

{misses}{markdown_table([row(name, found) for name, found in judged.items()])}

Regret is the time of the choice over that of the best of {len(NAMES)} implementations on the same shape, in the
same blocks of {held_out.plan.num_rounds} visits, each in a fresh process; a mean is geometric, with a 95 % interval by
shapes. Noise is half the width of a ratio's own 95 % interval, or how far identical code seemed to be apart on that
shape, if it is more. What a dispatch adds is not in the times. The policy was learned from
{len(trained.plan.workloads)} other shapes. {len(held_out.plan.workloads)} shapes are held out: those of all presets and
{NUM_DRAWN} drawn at random with seed {held_out.plan.seed} ({where}).
"No time": not supported there, or too slow to try.

Made by `python -m studies.audit --run DIR train held_out table --to DIR`.
"""
    frame.save(to / "audit.md", text)
    return text


def main(
    steps: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(STEPS)}. Default: all.")] = None,
    *,
    run: Annotated[Path, typer.Option(metavar="DIR", help="Where both runs lie.")] = Path("results/audit"),
    to: Annotated[Path, typer.Option(metavar="DIR", help="Where the table goes.")] = Path("results/gallery/fastest"),
    num_threads: int = 1,
    number: Annotated[int, typer.Option(help="Of drawn shapes; 0: as in the gallery.")] = 0,
) -> None:
    """Run the named steps: measure the training shapes or the held-out shapes, or write the table."""
    if unknown := set(steps or ()) - set(STEPS):
        raise typer.BadParameter(f"{min(unknown)}: choose among {', '.join(STEPS)}")
    for step in steps or STEPS:
        if step == "table":
            typer.echo(table(run, to))
        elif step == "train":
            shapes = drawn(number or NUM_TRAINED, SEED_TRAINED, num_threads, of_each_kind=True)
            measure(run / step, shapes, SEED_TRAINED, VISITS_TRAINED)
        else:
            shapes = of_presets(num_threads) + drawn(number or NUM_DRAWN, SEED_DRAWN, num_threads)
            measure(run / step, shapes, SEED_DRAWN, VISITS_HELD_OUT)


if __name__ == "__main__":
    typer.run(main)
