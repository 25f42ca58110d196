"""What many cells cost, in a small form: both series are made and described. Timings decide nothing here."""

from studies.acceptance.growth import REFUSED, VISITED, many_cells


def test_both_series_are_made_and_described() -> None:
    found = many_cells((100, 200), (30, 120), short=True)
    assert (found.test, found.is_short) == ("many_cells", True)
    sizes = [(REFUSED, 100.0), (REFUSED, 200.0), (VISITED, 30.0), (VISITED, 120.0)]
    assert [(row["series"], row["num_cells"]) for row in found.rows] == sizes
    assert all(row["spent_s"] > 0 for row in found.rows)
    first, _, second = found.found.partition("Visited and compared")
    assert "s for 100, " in first
    assert "s for 200;" in first
    assert "s for 30, " in second
    assert "s for 120; an exponent of " in second
