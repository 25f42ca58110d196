"""Parametrise a test so that any two values of different parameters occur together, without the whole product."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from attnbench.workloads.covering import cover


def pairwise(is_possible: Callable[[dict[str, Any]], bool] = lambda row: True, **values: Sequence[Any]):
    """Build the mark that parametrises a test; rows that `is_possible` rejects, also partial ones, do not occur."""
    rows = cover(values, is_possible)
    return pytest.mark.parametrize(tuple(values), [tuple(row[name] for name in values) for row in rows])
