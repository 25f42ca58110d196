"""Built-in axes: each implementation in a file declares its own; a check sets them, and a run requires common ones."""

import pytest

from attnbench import plugins
from attnbench.processes import revisions
from attnbench.processes.execution import checking_templates, client_for
from attnbench.processes.messages import Declared
from attnbench.processes.one_off_tasks import declared
from attnbench.processes.planning import apply_axes, build_plan, merge_built_in_axes
from attnbench.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("forked_workers")
SOURCE = """
from torch.nn import functional as F
from attnbench.contract.adapters import adapt


def core(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


causal, every = adapt(core, masks=("causal",)), adapt(core)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    return path


def test_a_file_is_asked_only_if_it_uses_attnbench(file, tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text("raise SystemExit\ndef f(q, k, v): ...\n")
    found = declared([f"{file}:causal", f"{plain}:f", "sdpa"])
    assert found == {f"{file}:causal": Declared(built_in={"mask": "causal"})}


def test_code_of_a_file_is_timed_in_a_process_of_its_own_with_the_usual_allocator(tmp_path):
    plain = tmp_path / "plain.py"
    plain.write_text("def f(q, k, v): ...\n")
    found = build_plan(sweep="quick", implementations=[f"{plain}:f"], settings=["seq_len=16"], is_exact=True)
    assert found.alone == ("f",)
    assert found.allocator == "system"


def test_a_file_that_cannot_be_loaded_is_a_problem_with_its_whole_cause(file, tmp_path):
    file.write_text(
        f"{SOURCE}\ntry:\n    import nowhere\nexcept ImportError as error:\n    raise OSError('no') from error\n"
    )
    own = tmp_path / "absent.py"  # has the name of a package that it imports
    own.write_text(f"from absent import attention\n{SOURCE}")
    found = declared([f"{file}:causal", f"{own}:causal"])
    assert all(words in found[f"{file}:causal"].problem for words in ("OSError", "nowhere", "mine.py, line"))
    assert "rename" in found[f"{own}:causal"].problem


def test_workloads_have_the_built_in_axes_once_each():
    workloads = [Workload(seq_len=length, mask=mask) for length in (8, 16) for mask in ("none", "causal", "padding")]
    assert apply_axes(workloads, {"mask": "causal"}) == (
        Workload(seq_len=8, mask="causal"),
        Workload(seq_len=16, mask="causal"),
    )
    assert {each.kv_len for each in apply_axes(workloads, {"seq_len": 32})} == {32}
    crossed = [Workload(seq_len=8, kv_len=9), Workload(seq_len=8)]
    assert len(apply_axes(crossed, {"rotary": "halves"})) == 1
    with pytest.raises(ValueError, match="kv_len = seq_len"):
        apply_axes(crossed[:1], {"rotary": "halves"})


def test_to_declare_more_masks_gives_no_fewer_cells():
    """Two masks gave 15 cells, and one 34."""
    named = ("none", "causal", "padding", "sliding_window(9)", "boolean(40)")
    workloads = [Workload(seq_len=length, mask=mask) for length in (8, 16) for mask in named]
    several = apply_axes(workloads, {"mask": "none|padding", "scope": "module"})
    assert {each.scope for each in several} == {"module"}
    assert {each.mask for each in several} == {"none", "padding"}
    assert len(several) > len(apply_axes(workloads, {"mask": "none", "scope": "module"}))


def test_a_comparison_is_at_what_all_have_built_in():
    assert merge_built_in_axes({"a": {"mask": "causal"}, "b": {"scope": "module"}}) == {
        "mask": "causal",
        "scope": "module",
    }
    with pytest.raises(ValueError, match="use a run for each"):
        merge_built_in_axes({"a": {"mask": "causal"}, "b": {"mask": "none"}})


def test_a_check_gives_each_its_own_and_a_run_the_same_to_all(file):
    specs, declarations = (f"{file}:causal", f"{file}:every"), {f"{file}:causal": Declared(built_in={"mask": "causal"})}
    settings = ("seq_len=67", "dtype=float32", "scope=attention", "mask=none,causal")
    typed = {"sweep": "check", "declarations": declarations}
    checked = build_plan(**typed, implementations=specs, settings=settings[:3], with_baseline=False)
    masks = {
        arm.implementation: {each.mask for each in checked.workloads if arm in checked.cells(each)}
        for arm in checked.specs
    }
    assert masks["causal"] == {"causal"}
    assert {"none", "padding"} <= masks["every"]
    compared = build_plan(sweep="check", implementations=specs[:1], settings=settings[:3], declarations=declarations)
    assert {each.mask for each in compared.workloads} == {"causal"}
    all_masks = build_plan(**typed, implementations=specs[:1], settings=settings)
    assert {each.mask for each in all_masks.workloads} == {"none", "causal"}  # explicit settings stay


def test_names_in_common_get_the_stem_of_their_file(tmp_path):
    for stem in ("one", "two"):
        (tmp_path / f"{stem}.py").write_text("def attention(q, k, v): ...\ndef chunked(q, k, v): ...\n")
    specs = [f"{tmp_path}/{stem}.py:attention" for stem in ("one", "two")]
    own = f"{tmp_path}/one.py:chunked"
    labelled = plugins.labelled([*specs, own, "sdpa", f"mine={own}"])
    names = [plugins.name_of(spec) for spec in labelled]
    assert names == ["one.attention", "two.attention", "one.chunked", "sdpa", "mine"]
    plugins.check_specs(labelled)
    assert plugins.labelled(specs[:1]) == specs[:1]
    planned = build_plan(sweep="quick", implementations=(own,), settings=("seq_len=128",), baseline=own)
    assert planned.baseline == "one.chunked"
    assert planned.implementations == (f"one.chunked={own}",)


def test_files_are_loaded_by_workers_of_a_template_that_is_given(file, tmp_path):
    with checking_templates(tmp_path, 60.0) as (template, *_):
        found = declared([f"{file}:causal"], template)
        client = client_for(build_plan(sweep="check", implementations=["sdpa"]), tmp_path, template)
    assert found == {f"{file}:causal": Declared(built_in={"mask": "causal"})}
    assert client.template is template


def test_two_sides_are_compared_on_the_axes_that_are_built_into_them(file, tmp_path):
    other = tmp_path / "other.py"
    other.write_text(SOURCE)
    fields = {"sweep": "sides", "implementations": (), "settings": ["seq_len=16,32"], "is_exact": True}
    planned = revisions.plan(f"{file}:causal", f"{other}:causal", fields, tmp_path / "run")
    assert {(each.mask, each.seq_len) for each in planned.workloads} == {("causal", 16), ("causal", 32)}
    typed = fields | {"settings": ["seq_len=16", "mask=none"]}
    planned = revisions.plan(f"{file}:causal", f"{other}:causal", typed, tmp_path / "run")
    assert {each.mask for each in planned.workloads} == {"none"}  # as asked: the end says why nothing was judged
