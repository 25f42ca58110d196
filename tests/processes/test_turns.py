"""In a long check some kinds of input take turns over the workloads; every feature still meets every kind."""

from itertools import combinations

import msgspec
import pytest

from attnbench.analysis.judgements import FEATURES, PAIRED
from attnbench.checking.agreement import check
from attnbench.checking.probes import IN_TURN, PROBES
from attnbench.checking.reference import References
from attnbench.contract import Implementation
from attnbench.processes.execution import CHECK, NUM_TURNS, _has_many_rows, _turns
from attnbench.processes.planning import build_plan
from attnbench.storage.records import CheckVerdict
from attnbench.workloads.covering import turns
from attnbench.workloads.workload import Workload
from tests.checking.textbook import Textbook

POINT = Workload(seq_len=37, num_heads=2, head_dim=16, direction="inference")
calls: list[int] = []  # of WearsOut
OFTEN = 8  # with fewer workloads a feature may miss some turn


@pytest.fixture(scope="module")
def planned():
    return build_plan(sweep=CHECK, settings=[], implementations=["fused"], is_exact=False, metrics=(), seed=0)


def met(plan):
    """Return for each kind of input the features of each workload that is checked on it."""
    chosen, every = _turns(plan), [each for each in plan.asked if not _has_many_rows(each)]
    features = {each.id: frozenset(name for name, has in FEATURES.items() if has(each)) for each in every}
    return [[features[each.id] for each in every if chosen.get(each.id, turn) == turn] for turn in range(NUM_TURNS)]


def test_every_feature_meets_every_kind_of_input(planned):
    by_turn = met(planned)
    for name, has in FEATURES.items():
        if sum(map(has, planned.asked)) >= OFTEN:
            assert all(any(name in each for each in seen) for seen in by_turn), name
    known = [
        pair
        for pair in combinations(PAIRED, 2)
        if any(map({*pair}.issubset, [each for seen in by_turn for each in seen]))
    ]
    for seen in by_turn:
        assert sum(any(map({*pair}.issubset, seen)) for pair in known) > 0.6 * len(known)


def test_kinds_take_turns_in_long_checks_alone(planned):
    assert len(IN_TURN) == NUM_TURNS
    chosen = _turns(planned)
    assert {*chosen.values()} == {*range(NUM_TURNS)}
    assert len(chosen) < len(planned.asked)  # rare masks see every kind
    assert _turns(msgspec.structs.replace(planned, workloads=planned.workloads[:30])) == {}
    assert _turns(msgspec.structs.replace(planned, sweep="quick")) == {}


def test_each_turn_soon_meets_each_pair():
    rows = [{"a": a, "b": b, "c": c} for _ in range(2) for a in (0, 1) for b in (0, 1) for c in ("x", "y")]
    chosen = turns(rows, 2)
    for turn in (0, 1):
        mine = [row for row, each in zip(rows, chosen, strict=True) if each == turn]
        assert len(mine) == 8
        assert {(row["a"], row["b"]) for row in mine} == {(0, 0), (0, 1), (1, 0), (1, 1)}


@pytest.mark.parametrize(
    ("turn", "axes", "expected"),
    [
        (0, {}, "large"),
        (3, {}, "equal"),
        (1, {"dtype": "float16"}, "shifted"),  # nothing is huge in float16
        (3, {"scope": "module"}, "large"),  # equal tokens would give equal values
    ],
)
def test_a_turn_has_one_kind_and_the_next_if_that_is_impossible(turn, axes, expected):
    found = References(msgspec.structs.replace(POINT, **axes), 0, turn=turn)
    assert [*found.by_probe] == ["normal", "needles", expected]
    whole = found.completed()
    assert [*whole.by_probe] == [*References(msgspec.structs.replace(POINT, **axes), 0).by_probe]
    assert [*found.by_probe] == ["normal", "needles", expected]
    assert all(whole.by_probe[name] is each for name, each in found.by_probe.items())


class Clamps(Textbook):
    """Wrong only where scores are huge."""

    limit = 2e4

    def attend(self, query, key, value, mask):
        right = super().attend(query, key, value, mask)
        return right if float((query @ key.mT).abs().max()) < self.limit else right * 2


class Doubles(Clamps):
    """Wrong everywhere."""

    limit = 0.0


def test_a_wrong_workload_is_checked_on_every_kind():
    clamps, doubles = (Implementation(build=each, source="a test") for each in (Clamps, Doubles))
    assert check(References(POINT, 0, turn=2), clamps).grade is CheckVerdict.right
    assert check(References(POINT, 0, turn=1), clamps).grade is CheckVerdict.wrong
    found = check(References(POINT, 0, turn=2), doubles)
    assert [each.probe for each in found.probes] == [name for name in PROBES if name != "offset"]


class WearsOut(Textbook):
    """Right in its first call alone."""

    def attend(self, query, key, value, mask):
        calls.append(1)
        return super().attend(query, key, value, mask) * len(calls)


def test_what_was_right_stays_right_when_the_other_kinds_follow():
    calls.clear()
    found = check(References(POINT, 0, turn=2), Implementation(build=WearsOut, source="a test"))
    right = {each.probe: all(tensor.agrees for tensor in each.tensors) for each in found.probes}
    assert right == {name: name == "normal" for name in PROBES if name != "offset"}
