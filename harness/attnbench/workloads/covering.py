"""A pairwise design: few combinations that together contain every pair of values of different axes.

Most faults are triggered by one value or by two together: D. R. Kuhn et al., https://doi.org/10.1109/TSE.2004.24. The
greedy method is from D. M. Cohen et al., https://doi.org/10.1109/32.605761; here ties go to the first candidate, not to
a random one.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, int]  # index of the chosen value, by axis
Item = tuple[str, int]  # an axis, and the index of one of its values


def pairs(row: Row) -> Iterator[tuple[Item, Item]]:
    """Yield every pair of (axis, index of value) items in a row of the design; a partial row lacks some axes."""
    return itertools.combinations(sorted(row.items()), 2)


def cover(axes: Mapping[str, Sequence[Any]], is_possible: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Return combinations that together contain every possible pair of values of different axes.

    `axes` must have at least two axes. `is_possible` gets complete and partial combinations; a partial one includes all
    axes that have a single value. A pair that fits into no possible combination is left out.
    """
    constant = {axis: 0 for axis, values in axes.items() if len(values) == 1}
    order = sorted(axes, key=lambda axis: (-len(axes[axis]), axis))
    missing = {  # an ordered set
        pair: None
        for one, other in itertools.combinations(order, 2)
        for places in itertools.product(range(len(axes[one])), range(len(axes[other])))
        for pair in pairs({one: places[0], other: places[1]})
    }
    uses: Counter[Item] = Counter()
    rows: list[Row] = []

    def valued(row: Row) -> dict[str, Any]:
        return {axis: axes[axis][place] for axis, place in row.items()}

    def completed(row: Row) -> Row | None:
        """Complete a row: prefer values in many missing pairs, then values used less often; None if impossible."""
        if not is_possible(valued(row)):
            return None
        if len(row) == len(axes):
            return row
        axis = next(axis for axis in order if axis not in row)
        options = [row | {axis: place} for place in range(len(axes[axis]))]
        options.sort(key=lambda option: (-sum(pair in missing for pair in pairs(option)), uses[axis, option[axis]]))
        return next((whole for option in options if (whole := completed(option)) is not None), None)

    while missing:
        start = dict(next(iter(missing)))
        row = completed(constant | start)
        for pair in pairs(start if row is None else row):
            missing.pop(pair, None)
        if row is not None:
            rows.append(row)
            uses.update(row.items())
    return [valued(row) for row in rows]


def turns(rows: Sequence[Mapping[str, Hashable]], number: int) -> list[int]:
    """Assign each row (values by axis) to one of `number` groups, so that each group soon contains each pair of values.

    Return the index of each row's group, its turn. The choice is greedy: the group that contains the fewest of the
    row's pairs and, of several such groups, the one with the fewest rows.
    """
    met, uses, chosen = [set[object]() for _ in range(number)], [0] * number, list[int]()
    for row in rows:
        own = list(itertools.combinations(sorted(row.items(), key=lambda item: item[0]), 2))
        best = min(range(number), key=lambda turn: (len(met[turn].intersection(own)), uses[turn]))
        met[best].update(own)
        uses[best] += 1
        chosen.append(best)
    return chosen
