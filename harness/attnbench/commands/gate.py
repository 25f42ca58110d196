"""`attnbench gate`: compare two runs, or a run with its stored baseline, and pass or fail."""

from pathlib import Path

import typer

from attnbench.analysis.conclusion import Conclusion
from attnbench.analysis.gate import outputs, stored
from attnbench.analysis.gate.decision import judge, judge_sides
from attnbench.analysis.gate.rulings import load
from attnbench.analysis.results import read
from attnbench.commands import Command, ExitCode
from attnbench.commands.frame import present
from attnbench.storage.journal import find_run


def gate(
    runs: list[str] | None = None,
    *,
    is_accepted: bool = False,
    reason: str = "",
    thresholds: Path | None = None,
    results: Path = Path("results"),
    to: Path | None = None,
) -> Conclusion | ExitCode:
    """Compare two stored runs, or a run and its stored baseline: pass or fail. Needs no torch.

    With --accept, the run becomes the baseline that later runs are compared with.

    Options:
        runs ([BASE] [CANDIDATE]): Runs or journals. Two: BASE and CANDIDATE. One: against the stored baseline of its
            machine, or its own base if it compared two sides. None: the newest run.
        is_accepted (--accept): Judge nothing: store the run as the baseline of its machine.
        reason (TEXT): With --accept: why this is the new normal; kept in the file.
        thresholds (FILE): Allowed changes. Default: the table gate of ./attnbench.toml, if any.
        to (DIR): Write gate.md and gate.json here.
    """
    allowed = load(thresholds)
    paths = [
        Path(name) if name.endswith(".jsonl") and Path(name).is_file() else find_run(name, results)
        for name in runs or ()
    ] or [find_run(None, results)]
    if is_accepted:
        if len(paths) > 1 or to is not None:
            raise ValueError("--accept takes one run: leave out the others and --to")
        written = stored.accept(paths[0], results, reason)
        present(lambda: {"baseline": str(written)}, lambda: typer.echo(f"Baseline: {written}; commit it"))
        return ExitCode.passed
    if reason:
        raise ValueError("--reason explains a new baseline: give --accept, too")
    *before, after = map(read, paths)
    if len(before) > 1:
        raise ValueError(f"gate compares two runs, but {len(paths)} were given: give BASE and CANDIDATE")
    if not before and after.plan.sides is not None:
        decision = judge_sides(after, allowed)
    else:
        decision = judge(before[0] if before else read(stored.find(after, results)), after, allowed)
    if to is not None:
        outputs.write(decision, to)
    present(lambda: decision, lambda: typer.echo("\n".join(outputs.screen_lines(decision))))
    return decision.conclusion


COMMAND = Command(gate, order=130)
