"""Our measurements as a suite of pytest-benchmark: `nox -s bench_pytest`, or `pytest --pyargs attnbench.pytest_suite`.

A run measures all cells first, in interleaved blocks; each test then hands the samples of one cell to pytest-benchmark,
so that its tables, comparisons, histograms and stored files are made of them.
"""
