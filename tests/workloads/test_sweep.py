"""Sweeps: TOML and --set make workloads, each once; mistakes are named."""

import re

import pytest

from attnbench import plugins
from attnbench.processes.planning import Selection, plan
from attnbench.workloads import sweep


def write(folder, text):
    file = folder / "mine.toml"
    file.write_text(text)
    return str(file)


def test_a_grid_is_a_product_and_repeats_are_dropped(tmp_path):
    file = write(
        tmp_path,
        'summary = "x"\n[[grid]]\nseq_len = [8, 16]\nmask = ["none", "causal"]\n[[grid]]\nseq_len = 8\n',
    )
    made = sweep.workloads(sweep.load(file), {}, ("cpu",))
    assert [(w.seq_len, w.mask) for w in made] == [(8, "none"), (8, "causal"), (16, "none"), (16, "causal")]


def test_settings_replace_the_sweeps_values_and_parentheses_hold_commas():
    settings = sweep.parse_settings(["seq_len=4, 8", "mask=padding(3,4),none", "batch_size=2"])
    assert settings == {"seq_len": ["4", "8"], "mask": ["padding(3,4)", "none"], "batch_size": ["2"]}
    made = sweep.workloads(sweep.load("quick"), {"seq_len": ["4"], "mask": ["causal"]}, ("cpu",))
    assert {(w.seq_len, w.mask) for w in made} == {(4, "causal")}


def test_a_sweep_has_a_budget_which_ones_own_replaces():
    usual_s = sweep.load("quick").budget_s
    assert 60.0 <= usual_s <= 600.0
    assert plan(Selection(sweep="quick")).budget_s == usual_s
    assert plan(Selection(sweep="quick", budget_s=7.0)).budget_s == 7.0


def test_the_device_all_stands_for_every_device():
    made = sweep.workloads(sweep.load("quick"), {"seq_len": ["4"]}, ("cpu", "cuda"))
    assert {w.device for w in made} == {"cpu", "cuda"}


@pytest.mark.parametrize("name", sweep.names())
def test_every_sweep_that_comes_along_is_valid(name):
    found = sweep.load(name)
    assert sweep.workloads(found, {}, ("cpu",))
    assert found.summary


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid = [", "is not readable"),
        ('summary = "x"\ngrid = []\n', "has no workloads"),
        ('summary = "x"\n[[grid]]\nseq_length = 3\n', "did you mean seq_len?"),
        ('summary = "x"\nspeed = 3\n[[grid]]\nseq_len = 3\n', "there is no key speed; choose among summary"),
        ('summary = "x"\n[[grid]]\nseq_len = "many"\n', "seq_len is a whole number"),
        ('summary = "x"\n[[grid]]\nseq_len = []\n', "has no workloads"),
    ],
)
def test_a_bad_sweep_is_refused_in_words(tmp_path, text, said):
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(said)):
        sweep.workloads(sweep.load(file), {}, ("cpu",))


@pytest.mark.parametrize("setting", ["seq_len", "seq_len=", "=4", "lenght=3"])
def test_a_bad_setting_is_refused(setting):
    with pytest.raises(ValueError, match=r"--set|axis"):
        sweep.parse_settings([setting])


def test_the_baseline_takes_part_even_where_it_was_not_named():
    planned = plan(Selection(sweep="quick", implementations=["fused"]))
    assert planned.implementations == ("fused", "sdpa")
    alone = plan(Selection(sweep="quick", implementations=["fused"]), with_baseline=False)
    assert alone.implementations == ("fused",)


@pytest.mark.parametrize(
    ("selection", "said"),
    [
        ({"implementations": ["fusde"]}, "did you mean fused?"),
        ({"implementations": ["missing.py:Thing"]}, "cannot read missing.py"),
        ({"sweep": "qiuck"}, "did you mean quick?"),
        ({"sweep": "missing.toml"}, "cannot read the sweep"),
        ({"baseline": "spda"}, "did you mean sdpa?"),
        ({"metrics": ["speed"]}, "there is no metric speed"),
    ],
)
def test_a_bad_selection_is_refused_before_any_work(selection, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        plan(Selection(**{"sweep": "quick", **selection}))


def test_what_a_sweep_leaves_out_takes_part_where_it_is_named(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('summary = "mine"\n[[grid]]\nseq_len = 4\n')
    everybody = set(plugins.implementation_names())
    assert set(plan(Selection(sweep="quick")).implementations) == everybody - {"flex"}
    assert set(plan(Selection(sweep="quick", implementations=["flex"])).implementations) == {"flex", "sdpa"}
    assert set(plan(Selection(sweep=str(mine))).implementations) == everybody


def test_a_sweep_cannot_leave_out_what_there_is_not(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('summary = "mine"\nleave_out = ["flexx"]\n[[grid]]\nseq_len = 4\n')
    with pytest.raises(ValueError, match=r"flexx .did you mean flex"):
        plan(Selection(sweep=str(file)))
