"""`attnbench demo`: two minutes, step by step, from a wrong function to a report."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnbench.commands import Command, ExitCode
from attnbench.commands.options import AsJson, OpenPage, ResultsFolder

if TYPE_CHECKING:
    from attnbench.analysis.results import Results

SOURCE = '''\
def mine(query, key, value, *, mask=None):
    """All (B, H, T, K); mask is None or boolean, True where a key is visible."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(dim=-1) @ value
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0) @ value  # a query that sees no key gets 0, not NaN


def mistaken(query, key, value, *, mask=None):
    """The same, but the softmax is over the queries."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-2).nan_to_num(0.0) @ value
'''
"""The README has it, too."""
FOLDER, FILE = "demo", "mine.py"
SETTINGS = ("seq_len=128,512,1024", "mask=causal")
BUDGET_S = 45.0


def demo(
    *,
    budget_s: Annotated[
        float, typer.Option("--budget", min=0.0, metavar="SECONDS", help="Wall time of the comparison in it.")
    ] = BUDGET_S,
    results: ResultsFolder = Path("results"),
    open_page: OpenPage = False,
    as_json: AsJson = False,
) -> None:
    """See it work, in two minutes: check a wrong function and a right one, time that one, and write a report.

    Before each step stands the command that does the same. The functions are written to results/demo/mine.py, unless
    that is there: change it, and run the demo again. Stop it by Ctrl-C at any time.
    """
    from attnbench.commands import terminal

    file = results / FOLDER / FILE
    if "=" in str(file):  # else it would read as LABEL=FILE
        file = file.resolve()
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(SOURCE, encoding="utf-8")
    _say("1/3", f"Is it right? {file} has a function with a mistake.", f"attnbench check {file}:mistaken")
    wrong = _checked(f"{file}:mistaken")
    if not as_json:
        terminal.print_check(wrong, {})
    _say("2/3", "The other function of that file has none.", f"attnbench check {file}:mine")
    right = _checked(f"{file}:mine")
    if not as_json:
        terminal.print_check(right, {})
    shapes = " ".join(f"--set {each}" for each in SETTINGS)
    command = f"attnbench run {file}:mine fused {shapes} --budget {budget_s:g}"
    _say("3/3", "How fast is it, next to PyTorch's own and the textbook form?", command)
    measured = _measured(file, budget_s, results)
    report = measured.folder / "report.html"
    if as_json:
        verdicts = terminal.verdicts(wrong) | terminal.verdicts(right)
        typer.echo(json.dumps({"verdicts": verdicts, "report": str(report)} | terminal.summary(measured), indent=2))
    else:
        terminal.print_results(measured)
        typer.echo(f"\nThe report, one file that opens anywhere: {report}")
        typer.echo("Next: attnbench check YOUR.py, attnbench run --help, attnbench list axes")
    if open_page:
        typer.launch(str(report.resolve()))
    raise typer.Exit(_code(wrong, right))


def _code(wrong: "Results", right: "Results") -> ExitCode:
    """Passed, where the mistake is found, and none in the other function."""
    is_found = any(record.is_wrong for record in wrong.records)
    is_clean = not any(record.is_wrong for record in right.records)
    return ExitCode.passed if is_found and is_clean else ExitCode.finding


def _say(number: str, text: str, command: str) -> None:
    from attnbench.commands import running

    running.note(f"\n{number}  {text}\n     $ {command}\n")


def _checked(spec: str) -> "Results":
    import tempfile

    from attnbench.commands import running
    from attnbench.processes.planning import Selection, plan

    planned = plan(Selection(sweep="check", implementations=(spec,), metrics=()), with_baseline=False)
    with tempfile.TemporaryDirectory(prefix="attnbench-check-") as folder:
        return running.execute(planned, Path(folder), stages=("check",), stops_when_wrong=True)


def _measured(file: Path, budget_s: float, results: Path) -> "Results":
    import secrets

    from attnbench.commands import running
    from attnbench.commands.options import MOST_SEEDS
    from attnbench.processes.execution import new_folder
    from attnbench.processes.planning import Selection, plan

    selection = Selection(
        sweep="quick",
        settings=SETTINGS,
        is_exact=True,
        implementations=(f"{file}:mine", "fused"),
        budget_s=budget_s,
        seed=secrets.randbelow(MOST_SEEDS),
    )
    planned, folder = plan(selection), new_folder(results, "demo")
    measured = running.execute(planned, folder, kept=running.kept(planned, folder))
    with running.finished(folder):
        running.write_reports(measured, folder)
    return measured


COMMAND = Command(
    function=demo,
    order=5,
    examples=("attnbench demo", "attnbench demo --open", "attnbench demo --budget 20 --results there"),
)
