"""Discarded blocks: decided by the interference probe alone, in its own process, and never by compared times."""

import os
import random
import subprocess
import sys

import pytest

from attnbench.statistics.interference import FEWEST, InterferenceGauge
from attnbench.storage.events import ArmSamples, VisitFinished
from attnbench.storage.fold import State
from attnbench.storage.records import PROBE, Arm, Sample


def probes(values: list[float], *, epoch: int = 0, visit: int = 0) -> list[Sample]:
    return [Sample(value=value, epoch=epoch, visit=visit, block=block) for block, value in enumerate(values)]


def calm(number: int, seed: int = 1) -> list[float]:
    draws = random.Random(seed)
    return [1e-3 * (1 + draws.gauss(0, 0.01)) for _ in range(number)]


def discarded(values: list[float]) -> set[int]:
    """Return the discarded blocks of one process."""
    gauge = InterferenceGauge()
    gauge.add("a", probes(values))
    assert gauge.num_blocks == len(values)
    return {block for _, _, block in gauge.discarded.get("a", set())}


@pytest.mark.parametrize(
    ("values", "late"),
    [
        ([*calm(20), 1.5e-3, *calm(19)], {20}),
        ([*calm(20), 0.3e-3, *calm(19)], set()),  # early
        ([1e-3] * (FEWEST - 1) + [9e-3], set()),  # before a few probes nothing is late
        ([1e-3 * 1.01**block for block in range(200)], set()),  # a drift
        ([*(1e-3 * (1 + 1e-4 * (block % 3)) for block in range(30)), 1.2e-3, 1.3e-3], {31}),  # a very calm machine
        ([], set()),
    ],
    ids=["late", "early", "few", "drift", "calm", "none"],
)
def test_a_late_probe_discards_its_block_and_no_other(values, late):
    assert discarded(values) == late


def test_what_was_said_of_a_block_does_not_change_with_what_follows():
    values = calm(60)
    for late in (15, 30, 45):
        values[late] *= 2
    found = [discarded(values[:length]) for length in range(61)]
    assert found == [{late for late in (15, 30, 45) if late < length} for length in range(61)]


def test_a_new_process_is_judged_by_its_own_as_soon_as_these_are_enough():
    gauge = InterferenceGauge()
    gauge.add("a", probes(calm(20)))
    gauge.add("b", probes([2 * value for value in calm(20)], epoch=1))
    assert gauge.discarded == {"b": {(1, 0, block) for block in range(FEWEST)}}
    gauge.add("c", probes([4e-3], epoch=1, visit=7))
    assert gauge.discarded["c"] == {(1, 7, 0)}


def test_processes_too_short_to_judge_themselves_are_judged_by_those_before():
    """As in a comparison of one cell, where each process makes four blocks."""
    gauge = InterferenceGauge()
    for epoch in range(5):
        gauge.add("a", probes(calm(4), epoch=epoch))
    gauge.add("a", probes([1e-3, 1.6e-3, 1e-3, 1e-3], epoch=5))
    assert gauge.discarded == {"a": {(5, 0, 1)}}


def test_a_probe_is_judged_among_those_of_its_kind():
    """A probe with one thread has another time than one with two, and neither disturbs the other's blocks."""
    gauge = InterferenceGauge()
    for visit in range(10):
        gauge.add("one", probes([1e-3], visit=visit), "1 thread")
        gauge.add("two", probes([3e-3], visit=visit), "2 threads")
    assert gauge.discarded == {}
    gauge.add("two", probes([9e-3], visit=10), "2 threads")
    gauge.add("one", probes([3e-3], visit=10), "1 thread")
    assert gauge.discarded == {"two": {(0, 10, 0)}, "one": {(0, 10, 0)}}
    assert gauge.num_blocks == 22


@pytest.mark.parametrize("call_s", [1e-3, 1e3])
def test_the_rule_is_blind_to_what_is_compared(call_s):
    state, values, draws = State(), calm(40), random.Random(3)
    values[12], values[33] = 3e-3, 2e-3
    times = [call_s * draws.uniform(1, 9) for _ in values]
    for visit in range(10):
        here = slice(4 * visit, 4 * visit + 4)
        taken = {PROBE: values, Arm(implementation="a"): times}
        arms = [ArmSamples(arm=arm, samples=tuple(probes(own[here], visit=visit))) for arm, own in taken.items()]
        state.apply(VisitFinished(workload="w", epoch=0, visit=visit, arms=tuple(arms)))
    assert InterferenceGauge().follow(state.probes) == {"w": {(0, 3, 0), (0, 8, 1)}}


PROBED = """
import os, time
import torch
from attnbench.devices import device

for number in (1, 2):
    torch.set_num_threads(number)
    before = len(os.listdir("/proc/self/task"))
    work = device("cpu").interference_probe(number)
    work()
    print(len(os.listdir("/proc/self/task")) - before)
    if number == 1:
        time.sleep(0.3)  # what numpy's import woke
        spent = []
        for _ in range(5):
            work()
            before_s = time.process_time()
            time.sleep(0.05)
            spent.append(time.process_time() - before_s)
        print(min(spent))  # an import's threads may still spin the first time
"""


def test_the_probe_has_the_threads_of_the_workload_and_none_spins_afterwards():
    """Spinning threads would disturb the next arm of the block; those of numpy's BLAS once did."""
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}  # apart from the tests' own threads
    done = subprocess.run(
        [sys.executable, "-c", PROBED], env=os.environ | threads, capture_output=True, text=True, check=True
    )
    one, spun_s, two = done.stdout.split()
    assert (one, two) == ("0", "1")
    assert float(spun_s) < 0.03  # of 0.05 s, which a spinning thread would fill
