"""What all comparisons say together: how many are decided, who is fastest, and the mean of the ratios."""

from attnbench.analysis.comparisons import comparisons, winners
from attnbench.analysis.overall import Suite, by_implementation
from attnbench.analysis.results import Results
from attnbench.reports import words
from attnbench.reports.table import absent, percent, span
from attnbench.statistics.interference import MANY
from attnbench.storage.records import Verdict
from attnbench.units import duration


def decided(results: Results) -> str:
    """How many comparisons have a verdict, and what more time would do for the others."""
    found = comparisons(results)
    if not found:
        return "nothing was compared"
    still_open = [each for each in found if each.verdict is Verdict.undecided]
    told = f"{len(found) - len(still_open)} of {len(found)} comparisons decided"
    within_floor = sum(
        each.verdict is Verdict.equivalent and each.sameness > results.plan.smallest_effect for each in found
    )
    if within_floor:
        told += f", {within_floor} of them as equivalent within a noise floor that more time may lower"
    within_reach = sorted(each.more_s for each in still_open if each.more_s is not None)
    if not still_open:
        return told
    if not within_reach:
        return f"{told}; no time that can be foreseen would decide the others"
    half = within_reach[: (len(within_reach) + 1) // 2]
    together = sum if results.plan.sides is None else max  # of two sides all that is open is visited in turn
    more = "" if len(half) == len(within_reach) else f", {duration(together(within_reach))} for {len(within_reach)}"
    return f"{told}; about {duration(together(half))} more would decide {len(half)} of the others{more}"


def disturbed(results: Results) -> str:
    """How many blocks are discarded because of interference, and how much of the machine other work took."""
    discarded = results.num_discarded
    if not results.num_blocks:
        return "not watched"
    told = f"{discarded} of {results.num_blocks} blocks discarded because of interference"
    if discarded > MANY * results.num_blocks:
        told += ": other work disturbed this machine too much for verdicts to be trusted"
    if results.system_load is not None:
        others, host = percent(results.system_load.others), percent(results.system_load.stolen)
        told += f"; others had {others} of the processors' time, and the host took {host}"
    return told


def absences(results: Results) -> str:
    """Implementations that this run could not have, with their reasons, those of one reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in absent(results).items():
        by_reason.setdefault(reason, []).append(name)
    return words.plain("; ".join(f"{', '.join(names)} ({reason})" for reason, names in by_reason.items()))


def fastest(results: Results) -> list[str]:
    """Who won each workload, with the ratio from visits that had no part in the choice."""
    lines = []
    for winner in winners(results):
        where = f"{words.title(winner.workload)}, length {words.length(winner.workload)}"
        ratio = "no other visits tell by how much"
        if winner.implementation == results.plan.baseline:
            ratio = "the baseline itself"
        elif winner.ratio is not None:
            seen = span(winner.ratio.point, winner.ratio.low, winner.ratio.high)
            ratio = f"{seen} times the baseline's time"
        lines.append(words.plain(f"{where}: {winner.implementation}, {ratio}"))
    return lines


def means(results: Results) -> list[str]:
    """Each implementation over all of its workloads: the geometric mean of its ratios, and the verdict on that."""
    is_plain = results.plan.sides is None  # else the whole session has one verdict, and no implementation has
    return [
        words.plain(
            f"{name}: {span(found.ratio.point, found.ratio.low, found.ratio.high)} over {found.num_cells} workloads"
            + f", {_on_the_whole(found)}" * is_plain
        )
        for name, found in by_implementation(results).items()
    ]


def _on_the_whole(found: Suite) -> str:
    if found.verdict is Verdict.equivalent:
        return f"equivalent on the whole within {percent(found.margin)}"
    return f"{found.verdict} on the whole"
