"""`python -m studies.scaling.agreement --to DIR`: what the check says of attention over ranks, in agreement.md.

Each implementation at each number of ranks, mask, direction and kind of sizes, by the check of `attnbench check`: where
it does not agree, its own words are the reason. Answers are kept in DIR/parts as they come, so that what was stopped
goes on.
"""

import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
import typer

from attnbench.checking.agreement import ask_oracle, check
from attnbench.checking.case import reason_against
from attnbench.contract import Implementation
from attnbench.contract.rank_group import group_of
from attnbench.plugins import DISTRIBUTING, plugs
from attnbench.processes.worker.attempts import describe
from attnbench.storage.records import Status
from attnbench.units import MISSING, markdown_table
from attnbench.workloads.workload import Workload

WORLDS = (1, 2, 4)
MASKS = ("none", "causal")
DIRECTIONS = ("inference", "forward_backward")
SIZES: dict[str, dict[str, Any]] = {
    "G = H": {"seq_len": 16},
    "G < H": {"seq_len": 16, "num_kv_heads": 4},
    "V < K": {"seq_len": 16, "value_dim": 32},
    "T = 13": {"seq_len": 13},
}
"""Of eight heads of width 64 in float32; T is 16 where it is not said. Ranks have unequal shares of 13 tokens."""
AGREES = "agrees"
FOLDER = "parts"
PYTORCH = "context_parallel"
"""Its first call computes for long: it is asked last, and patiently."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the check says of one implementation at one workload."""

    name: str
    sizes: str
    workload: Workload
    status: str  # AGREES, or how else its cell would end
    reason: str = ""

    @property
    def text(self) -> str:
        """In a cell of the table."""
        return self.status if not self.reason else f"{self.status}: {self.reason}"


def cases(worlds: Sequence[int]) -> Iterator[tuple[str, str, Workload]]:
    """Each implementation over ranks, the kind of sizes and the workload."""
    for name in sorted(DISTRIBUTING, key=PYTORCH.__eq__):
        for world_size in worlds:
            for mask in MASKS:
                for direction in DIRECTIONS:
                    for sizes, axes in SIZES.items():
                        yield name, sizes, Workload(world_size=world_size, mask=mask, direction=direction, **axes)


def ask(name: str, made: Implementation, sizes: str, workload: Workload) -> Answer:
    """Run the check; whatever is raised has the status that it has in a run."""

    def answer(status: str, reason: str = "") -> Answer:
        return Answer(name=name, sizes=sizes, workload=workload, status=status, reason=reason)

    if reason := reason_against(made, workload):
        return answer(Status.unsupported, reason)
    try:
        found = check(ask_oracle(workload, 0), made)
    except Exception as error:  # noqa: BLE001 - whatever somebody's code raises is a finding
        return answer(*describe(error))
    return answer(AGREES) if found.agrees else answer(Status.disagrees, found.diagnosis)


def table(answers: Sequence[Answer]) -> str:
    """How often each agrees, what those say that do not everywhere, and every reason once, by number."""
    reasons = list(dict.fromkeys(_said(each) for each in answers if each.reason))
    sizes = list(dict.fromkeys(each.sizes for each in answers))
    counts: dict[tuple[str, int], Counter[str]] = {}
    rows: dict[tuple[str, int, str, str], dict[str, str]] = {}
    for each in answers:
        point = each.workload
        counts.setdefault((each.name, point.world_size), Counter())[each.status] += 1
        cell = each.status if not each.reason else f"{each.status} ({reasons.index(_said(each)) + 1})"
        key = (each.name, point.world_size, point.mask, point.direction)
        rows.setdefault(key, dict.fromkeys(sizes, MISSING))[each.sizes] = cell
    worlds = sorted({world_size for _, world_size in counts})
    summary = [
        {"implementation": name} | {f"{world} rank{'s' * (world > 1)}": _count(counts[name, world]) for world in worlds}
        for name in dict.fromkeys(name for name, _ in counts)
    ]
    heads = ("implementation", "ranks", "mask", "direction")
    others = {each.name for each in answers if each.status != AGREES}
    every = [dict(zip(heads, map(str, key), strict=True)) | cells for key, cells in rows.items() if key[0] in others]
    parts = [markdown_table(summary)]
    if every:
        parts += ["## Who does not agree everywhere", markdown_table(every)]
    if reasons:
        listed = [{"number": str(number), "what was said": text} for number, text in enumerate(reasons, start=1)]
        parts += ["## Reasons", markdown_table(listed)]
    return "\n\n".join(parts)


def _said(answer: Answer) -> str:
    """The words; which of the ranks was the first to say them is chance."""
    return re.sub(r"rank \d+ of \d+", "a rank", answer.text)


def _count(found: Counter[str]) -> str:
    if found.keys() == {Status.unsupported}:
        return Status.unsupported
    return f"{found[AGREES]} of {found.total() - found[Status.unsupported]} agree"


def page(answers: Sequence[Answer], timeout_s: float) -> str:
    """The text of agreement.md."""
    made = f"""Made by `python -m studies.scaling.agreement` with PyTorch {torch.__version__} and gloo on one machine:
float32, H=8, K=64, and T=16 where it is not said. Every probe and every rule of the check; a call of several ranks that
takes more than {timeout_s:g} s has failed."""
    return "\n\n".join(["# Attention over ranks: does it agree?", made, table(answers)]) + "\n"


def agreement(
    to: Annotated[Path, typer.Option(help="The folder to write agreement.md to.")],
    ranks: Annotated[str, typer.Option(help="Numbers of ranks.")] = ",".join(map(str, WORLDS)),
    timeout_s: Annotated[float, typer.Option("--timeout", help="Seconds that a call of ranks may take.")] = 60.0,
) -> None:
    """Ask the check, and write the table; 1 where another than PyTorch's own does not agree."""
    torch.set_num_threads(1)
    worlds = [int(each) for each in ranks.split(",")]
    known = plugs("attnbench.implementations", "IMPLEMENTATION")
    folder = to / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for world_size in worlds:
        group_of(world_size, "cpu").timeout_s = timeout_s
    answers = []
    for name, sizes, workload in cases(worlds):
        file = folder / f"{name}-{workload.id}.json"
        if not file.exists():
            draft = file.with_suffix(".draft")
            draft.write_bytes(msgspec.json.encode(ask(name, known[name], sizes, workload)))
            draft.rename(file)
        answers.append(msgspec.json.decode(file.read_bytes(), type=Answer))
        print(f"{file.stem}: {answers[-1].text}", file=sys.stderr, flush=True)  # noqa: T201 - progress
    (to / "agreement.md").write_text(page(answers, timeout_s), encoding="utf-8")
    shutil.rmtree(folder)
    if any(each.status not in {AGREES, Status.unsupported} for each in answers if each.name != PYTORCH):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(agreement)
