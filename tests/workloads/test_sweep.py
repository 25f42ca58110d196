"""Sweeps: TOML and --set make workloads, each once; mistakes are named."""

import re

import pytest

from attnbench import plugins
from attnbench.commands.run import why_left_out
from attnbench.processes.planning import build_plan
from attnbench.workloads import sweep


@pytest.fixture
def write(tmp_path):
    """Write a sweep with a summary, and return its path."""

    def written(text: str) -> str:
        file = tmp_path / "mine.toml"
        file.write_text(f'summary = "x"\n{text}', encoding="utf-8")
        return str(file)

    return written


def workloads(name, settings=None, devices=("cpu",)):
    return sweep.workloads(sweep.load(name), settings or {}, devices)


def test_a_grid_is_a_product_and_repeats_are_dropped(write):
    made = workloads(write('[[grid]]\nseq_len = [8, 16]\nmask = ["none", "causal"]\n[[grid]]\nseq_len = 8\n'))
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


def test_profile_takes_the_shape_that_run_takes_for_the_same_settings():
    settings = {"seq_len": ["512"], "mask": ["causal"]}
    profiled, run = (sweep.alone(sweep.load(name), settings, ("cpu",)) for name in ("profile", "quick"))
    assert profiled == run


def test_what_is_set_alone_is_on_the_accelerator_where_there_is_one():
    made = sweep.alone(sweep.load("check"), {"mask": ["causal"]}, ("cpu", "cuda"))
    assert [(w.device, w.direction) for w in made] == [("cuda", "forward_backward")]
    assert [w.device for w in sweep.alone(sweep.load("check"), {"device": ["all"]}, ("cpu", "cuda"))] == ["cpu", "cuda"]


@pytest.mark.parametrize("settings", [{"bias": ["none"]}, {"layout": ["transposed"], "scope": ["module"]}])
def test_what_means_nothing_is_not_silently_left_out(settings):
    with pytest.raises(ValueError, match="has no effect with scope="):
        sweep.alone(sweep.load("check"), settings, ("cpu",))


@pytest.mark.parametrize("setting", ["seq_len", "seq_len=", "=4", "lenght=3"])
def test_a_setting_is_an_axis_and_its_values(setting):
    settings = sweep.parse_settings(["seq_len=4, 8", "mask=padding(3,4),none"])
    assert settings == {"seq_len": ["4", "8"], "mask": ["padding(3,4)", "none"]}
    with pytest.raises(ValueError, match=r"--set|axis"):
        sweep.parse_settings([setting])


def test_settings_narrow_a_sweep():
    narrowed = workloads("quick", {"mask": ["causal"], "seq_len": ["128", "1024"]})
    assert narrowed == tuple(w for w in workloads("quick") if w.mask == "causal" and w.seq_len in {128, 1024})


def test_an_axis_that_a_sweep_does_not_name_is_set_for_all_of_it():
    made = workloads("quick", {"num_heads": ["2", "4"]})
    assert len(made) == 2 * len(workloads("quick"))
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
        workloads("quick", settings)


def test_a_sweep_has_a_budget_which_ones_own_replaces():
    usual_s = sweep.load("quick").budget_s
    assert 60.0 <= usual_s <= 600.0
    assert build_plan(sweep="quick").budget_s == usual_s
    assert build_plan(sweep="quick", budget_s=7.0).budget_s == 7.0


@pytest.mark.parametrize("name", sweep.names())
def test_every_sweep_that_comes_along_is_valid(name):
    assert workloads(name)
    assert sweep.load(name).summary


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("grid = [", "is not readable"),
        ("grid = []\n", "has no workloads"),
        ("[[grid]]\nseq_length = 3\n", "did you mean seq_len?"),
        ("speed = 3\n[[grid]]\nseq_len = 3\n", "unknown field `speed`; put axes into a [[grid]] table"),
        ('[[grid]]\nseq_len = "many"\n', "seq_len is a whole number"),
        ("[[grid]]\nseq_len = []\n", "has no workloads"),
        ('[[grid]]\ncover = "triples"\nseq_len = [1, 2]\nhead_dim = [8, 16]\n', "triples"),
        ('leave_out = ["flexx"]\n[[grid]]\nseq_len = 4\n', "flexx (did you mean flex"),
        ('[[grid]]\nleave_out = ["flexx"]\nseq_len = 4\n', "flexx (did you mean flex"),
        ('[[grid]]\nleave_out = "flex"\nseq_len = 4\n', "give a list of names"),
        ("[[grid]]\nleave_out = [1]\nseq_len = 4\n", "give a list of names"),
    ],
)
def test_a_bad_sweep_is_refused_in_words(write, text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        build_plan(sweep=write(text))


def test_tables_set_several_axes_together_and_can_be_narrowed(write):
    mine = write("[[grid]]\nlengths = [{ seq_len = 1, kv_len = 9 }, { seq_len = 7 }]\nhead_dim = [8, 16]\n")
    assert {(w.seq_len, w.kv_len) for w in workloads(mine)} == {(1, 9), (7, 7)}
    assert {w.seq_len for w in workloads(mine, {"seq_len": ["7"]})} == {7}


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


def test_what_a_sweep_leaves_out_takes_part_where_it_is_named(write):
    everybody = set(plugins.implementation_names()) - {*plugins.DISTRIBUTING, *plugins.READ_PAGES}
    assert set(build_plan(sweep="quick").implementations) == everybody - {"flex"}
    assert set(build_plan(sweep="quick", implementations=["flex"]).implementations) == {"flex", "sdpa"}
    assert set(build_plan(sweep=write("[[grid]]\nseq_len = 4\n")).implementations) == everybody


@pytest.mark.parametrize("name", ["quick", "full"])
def test_a_sweep_of_run_says_why_it_leaves_something_out(name):
    reasons = why_left_out(build_plan(sweep=name), name)
    assert reasons.keys() == ({"flex", "naive_loop"} if name == "quick" else {"flex"})
    assert all(reasons.values())


def test_a_grid_leaves_out_what_no_other_grid_has_there(write):
    grids = '[[grid]]\nseq_len = [4, 8]\nmask = ["none", "causal"]\n[[grid]]\nleave_out = ["naive_loop"]\n'
    file = write(f"{grids}seq_len = [8, 16]\n")
    planned = build_plan(sweep=file)
    ids = {(workload.seq_len, workload.mask): workload.id for workload in planned.workloads}
    assert planned.left_out == {"naive_loop": (ids[16, "none"],)}
    assert planned.num_cells == 5 * len(planned.specs) - 1
    for workload in planned.workloads:
        taking_part = {arm.implementation for arm in planned.cells(workload)}
        assert ("naive_loop" in taking_part) == (workload.seq_len < 16)
        assert len(taking_part) == len(planned.specs) - (workload.seq_len == 16)
    assert build_plan(sweep=file, implementations=["naive_loop"]).left_out == {}
    assert build_plan(sweep=file, settings=["seq_len=16"], is_exact=True).left_out == {}


def test_the_device_all_stands_for_every_device():
    assert {w.device for w in workloads("quick", {"seq_len": ["128"]}, ("cpu", "cuda"))} == {"cpu", "cuda"}


def test_paged_batches_have_a_baseline_that_reads_pages():
    settings = ["batch=4q1kv64", "page_size=16"]
    assert build_plan(sweep="quick", settings=settings, is_exact=True).baseline == "paged_gather"
    assert build_plan(sweep="quick", settings=settings, is_exact=True, baseline="sdpa").baseline == "sdpa"
    assert build_plan(sweep="quick", settings=settings[:1], is_exact=True).baseline == "sdpa"
