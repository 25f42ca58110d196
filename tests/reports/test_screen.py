"""The closing screen: 25 lines of 80 columns, whatever was swept, and the questions that it answers."""

import dataclasses
import re
from functools import cache

import pytest

from attnbench.analysis.sanity import SystemLoad
from attnbench.reports import answers
from attnbench.reports.screen import HEIGHT, WIDTH, screen
from tests import journals

LARGE = (
    *journals.workloads(
        scope=("attention", "module"),
        direction=("inference", "forward_backward"),
        dtype=("float32", "bfloat16", "float16"),
        mask=("none", "causal", "sliding_window(64)", "padding"),
        seq_len=(64, 512),
    ),
    *journals.workloads(num_kv_heads=(1, 2, 4), seq_len=(1,), kv_len=(128, 1024, 8192)),
)
NAMES = ("sdpa", "sdpa_flash", "fused", "bmm", "chunked")


def lines(results):
    return [line.text for line in screen(results)]


SWEEPS = {
    "quick": journals.quick,
    "usual": journals.write,
    "one shape": lambda folder: journals.write(folder, journals.USUAL[:1], ("sdpa", "fused")),
    "one implementation": lambda folder: journals.write(folder, journals.USUAL, ("sdpa",)),
    "no baseline": lambda folder: journals.write(folder, journals.USUAL, ("fused", "bmm")),
    "wrong": lambda folder: journals.write(folder, journals.USUAL, ("sdpa", "liar", "module_list")),
    "unfinished": lambda folder: journals.write(folder, num_epochs=1, is_finished=False),
    "empty": lambda folder: journals.write(folder, (), ()),
    "many lengths": lambda folder: journals.write(
        folder, journals.workloads(mask=("none", "causal"), seq_len=tuple(range(64, 64 * 21, 64))), num_epochs=4
    ),
    "large": lambda folder: journals.write(folder, LARGE, NAMES, num_epochs=4),
}


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory):
    return cache(lambda name: SWEEPS[name](tmp_path_factory.mktemp("run")))


@pytest.mark.parametrize("name", SWEEPS)
def test_it_has_25_lines_of_80_columns_at_most(name, sweeps):
    shown = lines(sweeps(name))
    assert len(shown) <= HEIGHT
    long = [line for line in shown if len(line) > WIDTH]
    assert all(line.startswith("Report: ") for line in long)  # the folder of this test is long


def test_a_quick_sweep_answers_what_a_new_user_asks(sweeps):
    results = sweeps("quick")
    shown = lines(results)
    text = "\n".join(shown)
    checks = sum(record.agreement is not None for record in results.records)
    assert shown[0] == f"example: 9 implementations on 17 shapes, all right ({checks} checks against float64)"
    assert re.search(r"^Example, 2 cores, torch 2\.13\.0, 119 s, 16 processes, system allocator, quiet$", shown[1])
    assert shown[2] == "Differences below 7.5 % count as equal."
    assert re.search(r"^bfloat16 no mask +T=512 +\S+ ms +bmm 1\.8\dx", text, re.MULTILINE)
    assert re.search(r"Memory at no mask T=1024: .*\bfused\b[^;]* 66 MiB", text.replace("\n", " "))
    assert re.search(r"^Undecided: 0 of \d+\.", text, re.MULTILINE)
    assert any(line.startswith("Report: ") and "report.html" in line for line in shown)
    assert "picture.png" in text


def test_every_shape_is_in_a_row(sweeps):
    """Folded rows of a label cover all of its lengths."""
    found = sweeps("quick")
    shown = lines(found)
    first = next(place for place, line in enumerate(shown) if line.startswith("Time of a call"))
    rows = shown[first + 1 : shown.index("", first)]
    covered: dict[str, list[tuple[int, int]]] = {}
    label = ""
    for row in rows:
        name, low, high = re.match(r"(.*?) +T=(\d+)(?:-(\d+))? ", row).groups()
        label = name.strip() or label
        covered.setdefault(label, []).append((int(low), int(high or low)))
    for shape in answers.shapes(found):
        assert any(low <= shape.workload.seq_len <= high for low, high in covered[shape.label]), shape.name


def test_rows_that_do_not_fit_are_counted(sweeps):
    text = "\n".join(lines(sweeps("large")))
    assert re.search(r"in \d+ more rows; \d+ other rows \(-v\)\.", text)


def test_of_few_implementations_each_has_a_column(tmp_path):
    results = journals.write(
        tmp_path, journals.workloads(mask=("causal",), seq_len=(128, 512)), ("sdpa", "fused", "bmm")
    )
    heading, *rows = lines(results)[5:8]
    assert heading.split()[-3:] in (["sdpa", "bmm", "fused"], ["sdpa", "fused", "bmm"])
    assert all(row.count("x slower") == 2 for row in rows)


def test_doubt_comes_before_verdicts_and_leaves_none(sweeps):
    load = SystemLoad(others=0.83, stolen=0.0, free_bytes=2**30)
    shown = lines(dataclasses.replace(sweeps("quick"), system_load=load))
    assert len(shown) <= HEIGHT
    assert shown[1].endswith("DOUBTFUL")
    doubt = next(place for place, line in enumerate(shown) if line.startswith("High CPU contention"))
    assert doubt < next(place for place, line in enumerate(shown) if line.startswith("Time of a call"))
    table = "\n".join(shown[doubt:])
    assert not re.search(r"\d\.\d\dx|faster|slower|equal", table)
    assert re.search(r"^Doubtful: (\d+) of \1\.", table, re.MULTILINE)


def test_what_is_wrong_is_said_first_and_named(sweeps):
    shown = lines(sweeps("wrong"))
    assert "2 of 3 WRONG (liar, module_list)" in " ".join(shown[:2])
    assert any(line.startswith("liar: disagrees at length") for line in shown)
