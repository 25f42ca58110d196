"""Sweeps: TOML and --set make workloads, each once; mistakes are named."""

import re

import pytest

from attnbench import plugins
from attnbench.processes.planning import build_plan
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


def test_settings_alone_are_exactly_what_is_run():
    made = build_plan(sweep="quick", settings=["seq_len=4,8", "dtype=float16"], is_exact=True)
    assert made.sweep == "set"
    assert [(w.seq_len, w.dtype) for w in made.workloads] == [(4, "float16"), (8, "float16")]
    assert {(w.mask, w.direction, w.scope, w.num_heads) for w in made.workloads} == {
        ("none", "inference", "attention", 8)
    }
    of_a_sweep = build_plan(sweep="quick", is_exact=True)  # nothing is set
    assert of_a_sweep == build_plan(sweep="quick")


def test_what_is_set_alone_is_on_the_accelerator_where_there_is_one():
    made = sweep.alone(sweep.load("check"), {"mask": ["causal"]}, ("cpu", "cuda"))
    assert [(w.device, w.direction) for w in made] == [("cuda", "forward_backward")]
    assert [w.device for w in sweep.alone(sweep.load("check"), {"device": ["all"]}, ("cpu", "cuda"))] == ["cpu", "cuda"]


@pytest.mark.parametrize("settings", [{"bias": ["none"]}, {"layout": ["transposed"], "scope": ["module"]}])
def test_what_means_nothing_is_not_silently_left_out(settings):
    with pytest.raises(ValueError, match="means nothing with scope="):
        sweep.alone(sweep.load("check"), settings, ("cpu",))


@pytest.mark.parametrize("setting", ["seq_len", "seq_len=", "=4", "lenght=3"])
def test_a_setting_is_an_axis_and_its_values(setting):
    settings = sweep.parse_settings(["seq_len=4, 8", "mask=padding(3,4),none"])
    assert settings == {"seq_len": ["4", "8"], "mask": ["padding(3,4)", "none"]}
    with pytest.raises(ValueError, match=r"--set|axis"):
        sweep.parse_settings([setting])


def test_settings_narrow_a_sweep():
    whole = sweep.workloads(sweep.load("quick"), {}, ("cpu",))
    assert sweep.workloads(sweep.load("quick"), {"mask": ["causal"], "seq_len": ["128", "1024"]}, ("cpu",)) == tuple(
        w for w in whole if w.mask == "causal" and w.seq_len in {128, 1024}
    )


def test_an_axis_that_a_sweep_does_not_name_is_set_for_all_of_it():
    made = sweep.workloads(sweep.load("quick"), {"num_heads": ["2", "4"]}, ("cpu",))
    assert len(made) == 2 * len(sweep.workloads(sweep.load("quick"), {}, ("cpu",)))
    assert {w.num_heads for w in made} == {2, 4}


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seq_len": ["128", "96"]}, "the sweep has no seq_len=96 here, only 64, 128, 256, 512, 1024"),
        ({"dtype": ["bfloat16"], "mask": ["causal"]}, "the sweep has no mask=causal here, only none"),
        ({"mask": ["none", "casual"]}, "did you mean causal?"),
        ({"seq_len": ["many"]}, "seq_len is a whole number"),
    ],
)
def test_what_a_sweep_does_not_have_is_no_way_to_narrow_it(settings, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        sweep.workloads(sweep.load("quick"), settings, ("cpu",))


def test_a_sweep_has_a_budget_which_ones_own_replaces():
    usual_s = sweep.load("quick").budget_s
    assert 60.0 <= usual_s <= 600.0
    assert build_plan(sweep="quick").budget_s == usual_s
    assert build_plan(sweep="quick", budget_s=7.0).budget_s == 7.0


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
        (
            'summary = "x"\nspeed = 3\n[[grid]]\nseq_len = 3\n',
            "unknown field `speed`; axes belong into a [[grid]] table",
        ),
        ('summary = "x"\n[[grid]]\nseq_len = "many"\n', "seq_len is a whole number"),
        ('summary = "x"\n[[grid]]\nseq_len = []\n', "has no workloads"),
    ],
)
def test_a_bad_sweep_is_refused_in_words(tmp_path, text, said):
    file = write(tmp_path, text)
    with pytest.raises(ValueError, match=re.escape(said)):
        sweep.workloads(sweep.load(file), {}, ("cpu",))


def test_the_baseline_takes_part_even_where_it_was_not_named():
    planned = build_plan(sweep="quick", implementations=["fused"])
    assert planned.implementations == ("fused", "sdpa")
    alone = build_plan(sweep="quick", implementations=["fused"], with_baseline=False)
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
        build_plan(**{"sweep": "quick", **selection})


def test_what_a_sweep_leaves_out_takes_part_where_it_is_named(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_text('summary = "mine"\n[[grid]]\nseq_len = 4\n')
    everybody = set(plugins.implementation_names()) - set(plugins.DISTRIBUTING)
    assert set(build_plan(sweep="quick").implementations) == everybody - {"flex"}
    assert set(build_plan(sweep="quick", implementations=["flex"]).implementations) == {"flex", "sdpa"}
    assert set(build_plan(sweep=str(mine)).implementations) == everybody


def test_a_sweep_cannot_leave_out_what_there_is_not(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('summary = "mine"\nleave_out = ["flexx"]\n[[grid]]\nseq_len = 4\n')
    with pytest.raises(ValueError, match=r"flexx .did you mean flex"):
        build_plan(sweep=str(file))


def test_a_grid_leaves_out_what_no_other_grid_has_there(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'summary = "mine"\n[[grid]]\nseq_len = [4, 8]\nmask = ["none", "causal"]\n'
        '[[grid]]\nleave_out = ["naive_loop"]\nseq_len = [8, 16]\n'
    )
    planned = build_plan(sweep=str(file))
    ids = {(workload.seq_len, workload.mask): workload.id for workload in planned.workloads}
    assert planned.left_out == {"naive_loop": (ids[16, "none"],)}
    assert planned.num_cells == 5 * len(planned.specs) - 1
    for workload in planned.workloads:
        taking_part = {arm.implementation for arm in planned.cells(workload)}
        assert ("naive_loop" in taking_part) == (workload.seq_len < 16)
        assert len(taking_part) == len(planned.specs) - (workload.seq_len == 16)
    assert build_plan(sweep=str(file), implementations=["naive_loop"]).left_out == {}
    assert build_plan(sweep=str(file), settings=["seq_len=16"], is_exact=True).left_out == {}


@pytest.mark.parametrize("names", ['"flex"', '["flexx"]', "[1]"])
def test_a_grid_cannot_leave_out_what_there_is_not(tmp_path, names):
    file = tmp_path / "mine.toml"
    file.write_text(f'summary = "mine"\n[[grid]]\nleave_out = {names}\nseq_len = 4\n')
    with pytest.raises(ValueError, match=r"flexx .did you mean flex|give a list of names"):
        build_plan(sweep=str(file))


def test_parentheses_in_settings_hold_commas():
    settings = sweep.parse_settings(["seq_len=4, 8", "mask=padding(3,4),none", "batch_size=2"])
    assert settings == {"seq_len": ["4", "8"], "mask": ["padding(3,4)", "none"], "batch_size": ["2"]}


def test_the_device_all_stands_for_every_device():
    made = sweep.workloads(sweep.load("quick"), {"seq_len": ["128"]}, ("cpu", "cuda"))
    assert {w.device for w in made} == {"cpu", "cuda"}


@pytest.mark.parametrize("setting", ["seq_len", "seq_len=", "=4", "lenght=3"])
def test_a_bad_setting_is_refused(setting):
    with pytest.raises(ValueError, match=r"--set|axis"):
        sweep.parse_settings([setting])
