"""Formats of numbers."""

import pytest

from attnbench.units import show, significant, span


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (999.6e-6, "s", "1.00 ms"),
        (999.4e-6, "s", "999 us"),
        (0.99996, "s", "1.00 s"),
        (2.0**20 - 100, "bytes", "1.00 MiB"),
        (2.0**30, "bytes", "1.00 GiB"),
        (1000 * 2.0**10, "bytes", "1000 KiB"),
        (-999.6e-6, "s", "-1.00 ms"),
        (0.0, "s", "0 ns"),
    ],
)
def test_a_number_that_is_rounded_up_to_the_next_unit_is_shown_in_it(value: float, unit: str, text: str) -> None:
    assert show(value, unit) == text


def test_rounding_up_adds_no_digit() -> None:
    assert [significant(value, 3) for value in (9.996, 9.994, 0.09996, 99.96)] == ["10.0", "9.99", "0.100", "100"]


def test_an_interval_has_the_unit_of_its_point() -> None:
    assert span(999.6e-6, 998.0e-6, 1001.0e-6, "s").startswith("0.9996 ms (")
