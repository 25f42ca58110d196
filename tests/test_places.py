"""The places of `nox -s places` are what they say, and a failure there is counted."""

import itertools
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, places

ADDRESSES = """
import subprocess, sys
import torch

kept = [torch.empty(number) for number in (3, 5, 1000, 10**6) for _ in range(40)]
print(*sorted({tensor.data_ptr() % 64 for tensor in kept}))
assert torch.cat([tensor.fill_(1.0) for tensor in kept]).sum() == sum(tensor.numel() for tensor in kept)
if sys.argv[1:]:
    subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], check=True)
"""


@pytest.mark.skipif(not places.compiler(), reason="there is no C compiler")
def test_tensors_lie_at_shifted_addresses_in_every_process():
    command = [sys.executable, "-c", ADDRESSES, ADDRESSES]
    environment = os.environ | places.shift()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["0 8 24 40 56"] * 2


TESTS = """
import os
import pytest

def test_right():
    assert os.environ["HERE"] == "yes"
    assert "HOME" not in os.environ

def test_wrong():
    assert False

def test_skipped():
    pytest.skip("it is")
"""


@pytest.mark.parametrize(("number", "counts"), [("1", ["1", "1", "1"]), ("0", ["0", "1", "0"])])
def test_the_outcomes_of_a_place_are_counted(tmp_path, monkeypatch, number, counts):
    monkeypatch.setattr(places, "LOGS", tmp_path / "logs")
    (tmp_path / "test_1.py").write_text(TESTS)
    place = places.Surroundings("words", {"HERE": "yes", "HOME": None})
    options = ["--numprocesses=0", "-p", "no:cacheprovider", str(tmp_path / f"test_{number}.py")]
    row = places.run("here", place, options)
    assert [*row[:2], *row[2:5]] == ["here", "words", *counts]
    kept = {("here", row[-1]): row, ("there", row[-1]): ("there", *row[1:])}
    assert places.rows_of(f"# A page\n\n{places.table(kept.values())}") == kept


def test_places_joined_are_one_with_all_that_differs():
    one = places.Surroundings("one", {"A": "1"}, prefix=("taskset", "1"))
    other = places.Surroundings("other", {"B": None}, num_busy=2)
    assert places.together([one, other]) == places.Surroundings(
        "one; other", {"A": "1", "B": None}, ("taskset", "1"), 2
    )


def test_all_places_are_run(tmp_path):
    run = {name for names in places.WHOLE for name in names.split("+")}
    assert run >= set(places.places(tmp_path))


def test_a_seed_shuffles_the_tests_and_keeps_those_of_a_file_together(monkeypatch):
    names = [(f"test_{file}.py", str(number)) for file in range(9) for number in range(9)]
    collected = [
        SimpleNamespace(path=Path(file), nodeid=number, get_closest_marker=lambda _: None) for file, number in names
    ]

    def order(seed):
        monkeypatch.setenv(places.ORDER, seed)
        conftest.pytest_collection_modifyitems(items := list(collected))
        return [(item.path.name, item.nodeid) for item in items]

    one, again, other = (order(seed) for seed in ("1", "1", "2"))
    assert one == again
    assert len({*map(tuple, (one, other, names))}) == 3
    assert sorted(one) == sorted(names)
    assert len([file for file, _ in itertools.groupby(one, lambda name: name[0])]) == 9
