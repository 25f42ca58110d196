"""`attnbench growth`: fit how memory grows with length or requests, and predict where a limit is reached."""

from dataclasses import replace
from pathlib import Path

from attnbench.analysis.conclusion import HOW_FAST, Conclusion, Ending, conclude, marks
from attnbench.analysis.growth import REQUESTS, Growth, growths
from attnbench.commands import Command, running
from attnbench.commands.frame import present
from attnbench.commands.options import SelectionOptions
from attnbench.console import say
from attnbench.processes.execution import new_folder
from attnbench.reports import titles
from attnbench.units import grouped

DIRECTION = "direction=inference"  # default direction of the calls
OPTIONS = SelectionOptions(sweep="growth", call_limit_s=20.0)


def growth(
    *, options: SelectionOptions = OPTIONS, memory_limit: float = 0.0, results: Path = Path("results")
) -> Conclusion:
    """Fit how memory grows with length, and predict where a limit is reached.

    Calls are those of inference, unless --set direction says otherwise: training keeps more. For batches of 4, 8, ...
    equal requests it is growth with their number, and their cache counts, too.

    Options:
        memory_limit (SIZE): The limit on memory, as in 2GiB; 0: three quarters of the free memory on the CPU.

    Examples:
        attnbench growth mine.py:attention --set seq_len=512,1024,2048 --memory-limit 2GiB
        attnbench growth paged_gather --set batch=4q1kv1k,8q1kv1k,16q1kv1k --set page_size=16
    """
    if options.has_shapes and "direction" not in options.axes:
        options = replace(options, settings=[*(options.settings or ()), DIRECTION])
    planned = options.plan(with_baseline=False)
    measured = running.execute(planned, new_folder(results, planned.sweep), stages=("check", "metrics"))
    grown = growths(measured, memory_limit)

    def show() -> None:
        panels = grouped(grown, _title)
        for title, members in panels.items():
            say(f"\n{title}")
            for each in members:
                say(f"  {each.sentence}")

    present(lambda: [each.facts() for each in grown], show)
    end = conclude(marks(measured), HOW_FAST)
    if end.ending is Ending.passed and not any(each.fit for each in grown):
        few = "no growth could be fitted: give three lengths or more, or three numbers of equal requests"
        return replace(end, ending=Ending.inconclusive, words=few)
    return end


def _title(each: Growth) -> str:
    """Return the title of a group of fits: the fixed axes, and the fixed length or a description of the requests."""
    if each.axis == REQUESTS:
        return f"{titles.title(each.workload.axes(), leave_out=('batch',))}, {each.other}"
    return f"{titles.title(each.workload.axes())} {each.other}".rstrip()


COMMAND = Command(growth, order=30)
