"""Margins are drawn from every cell of the default check."""

import msgspec
import pytest

from attnbench.processes.planning import build_plan
from attnbench.workloads.workload import Workload
from studies import margins


@pytest.fixture(scope="module")
def every_and_cells():
    return margins.planned()


def test_cells_are_those_of_the_default_check_and_rotations(every_and_cells):
    every, cells = every_and_cells
    workloads = [workload for workload, _ in cells]
    plan = build_plan("check", settings=["device=cpu"], implementations=["sdpa"], with_baseline=False)
    assert {each.id for each in workloads} >= {msgspec.structs.replace(w, dropout=0.0).id for w in plan.workloads}
    assert {each.scope for each in workloads} == {"attention", "module"}
    asked = [names for workload, names in cells if workload.rotary != "none"]
    assert asked
    assert all(names == ["llama"] for names in asked)
    wide = Workload(batch_size=1, seq_len=257, num_heads=2, head_dim=128, scope="module", direction="forward_backward")
    (names,) = (names for workload, names in cells if workload.id == wide.id)
    assert {"sdpa", "naive_loop", "module_list", "torch_mha"} <= set(names)
    assert not any(every[name].compiles for _, names in cells for name in names)


@pytest.mark.parametrize("num_places", [2, 4, 6])
def test_seeds_go_round_all_cells(every_and_cells, num_places, monkeypatch, tmp_path):
    _, cells = every_and_cells
    met = []

    def noted(seed, cell, asked, place):
        met.append((seed, cell, tuple(asked)))
        return iter(())

    monkeypatch.setattr(margins, "margins_of", noted)
    monkeypatch.setattr(margins, "planned", lambda: every_and_cells)
    for number in range(num_places):
        margins.measure(tmp_path, 300, (f"x{number}", 1), number, num_places)
    assert sorted(seed for seed, _, _ in met) == list(range(max(300, len(cells))))
    assert {cell.id for _, cell, _ in met} == {workload.id for workload, _ in cells}


def test_a_margin_is_the_share_of_a_limit(every_and_cells):
    every, _ = every_and_cells
    cell = Workload(
        batch_size=2, seq_len=9, num_heads=2, head_dim=4, mask="padding_to_nothing", direction="forward_backward"
    )
    names = ("sdpa", "naive_loop")
    found = list(margins.margins_of(3, cell, {name: every[name] for name in names}, ("default", 1)))
    assert {each.implementation for each in found} == set(names)
    assert {each.tensor for each in found} == {"output", "gradient of query", "gradient of key", "gradient of value"}
    assert {each.workload for each in found} == {cell.id}
    assert all(max(each.largest, each.rms) < margins.MOST_SHARE for each in found)
