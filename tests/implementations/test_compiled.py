"""flex_attention and torch.compile variants: right, compiled once, and never eager under another name."""

import sys
import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from attnbench import plugins
from attnbench.case import build, draw_normal, place
from attnbench.contract import NotOneGraphError, compile_whole, device
from attnbench.contract.loading import implementation
from attnbench.processes.worker import attempts
from attnbench.reports import style
from attnbench.storage.records import Status
from attnbench.workloads.workload import Workload

counters = torch._dynamo.utils.counters
NO_COMPILER = device("cpu").missing_compiler()
needs_compiler = pytest.mark.skipif(NO_COMPILER is not None, reason=str(NO_COMPILER))
SMALL = {"seq_len": 9, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "batch_size": 2, "direction": "inference"}


@pytest.fixture
def _captured_only(monkeypatch):
    """Capture graphs as for Inductor, and run them unchanged."""

    def capture(function):
        compile_whole(function)  # sets the limits
        return torch.compile(function, backend="eager", dynamic=False, fullgraph=True)

    monkeypatch.setattr("attnbench.contract.loading.compile_whole", capture)
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


GLOBAL = """
import torch
FACTOR = {factor}
def scaled(tensor):
    return FACTOR * tensor
def mine(query, key, value):
    scores = scaled(query) @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    return scores.softmax(-1) @ value
def other(query, key, value):
    return mine(query, key, value) * FACTOR
"""


@pytest.mark.usefixtures("_captured_only")
def test_a_function_in_a_file_may_use_what_its_module_holds(tmp_path):
    """Loaded again after a change, it uses the file's new content; functions loaded before keep the old one."""
    file, outputs = tmp_path / "mine.py", []
    for factor in (1.0, 2.0):
        file.write_text(GLOBAL.format(factor=factor), encoding="utf-8")
        pair = [case_of(f"{file}:mine{option}", mask="none") for option in ("", "+compile")]
        outputs.append((pair, [case.output() for case in pair]))
    for pair, before in outputs:
        torch.testing.assert_close(before[0], before[1])
        torch.testing.assert_close(pair[1].output(), before[1])
    assert not torch.allclose(outputs[0][1][0], outputs[1][1][0])


def test_a_file_that_cannot_be_imported_leaves_no_module_behind(tmp_path):
    file = tmp_path / "broken_at_import.py"
    file.write_text("def mine(): pass\nraise RuntimeError('no')", encoding="utf-8")
    with pytest.raises(RuntimeError, match="no"):
        implementation(f"{file}:mine")
    assert not [name for name in sys.modules if "broken_at_import" in name]


def case_of(spec, **axes):
    point = Workload(**(SMALL | axes))
    return build(point, implementation(spec), place(draw_normal(point, 0), point))


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("mask", "axes"),
    [
        ("none", {"kv_len": 15}),
        ("causal", {"kv_len": 7}),
        ("causal_bottom_right", {"kv_len": 15}),
        ("causal_bottom_right", {"kv_len": 7}),
        ("sliding_window(3)", {"value_dim": 24}),
        ("padding", {"dtype": "bfloat16"}),
        ("document", {}),
        ("prefix(2)", {}),
    ],
)
def test_flex_computes_what_sdpa_computes(mask, axes, monkeypatch):
    uncompiled = "attnbench.implementations.flex.compiled"
    monkeypatch.setattr(uncompiled, lambda: flex_attention)  # the same semantics
    flex, sdpa = (case_of(name, mask=mask, **axes) for name in ("flex", "sdpa"))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        torch.testing.assert_close(flex.output(), sdpa.output(), rtol=0, atol=3e-2 if "dtype" in axes else 1e-5)


@needs_compiler
@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor, as it is imported
def test_compiled_flex_is_right_under_a_mask_with_a_table_and_finds_what_it_compiled():
    cases = [case_of("flex", mask="document", value_dim=24) for _ in range(2)]
    with torch.no_grad():
        for case in cases:  # of two masks of the same kind
            torch.testing.assert_close(
                case.output(), case_of("sdpa", mask="document", value_dim=24).output(), rtol=0, atol=1e-5
            )
            counters.clear()
        cases[1].output()
    assert not counters["stats"]


@needs_compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Inductor, as it is imported
def test_inductor_computes_what_the_plain_form_does():
    with torch.no_grad():
        compiled, plain = (case_of(spec, num_kv_heads=4, seq_len=64).output() for spec in ("fused+compile", "fused"))
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-5)


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("_captured_only")
@pytest.mark.parametrize("name", ["fused", "sdpa_mask", "module_list", "torch_mha"])
@pytest.mark.parametrize("direction", ["inference", "backward"])
def test_a_variant_agrees_and_is_captured_before_the_second_call(name, direction):
    axes = {"scope": "module", "mask": "causal", "num_kv_heads": 4, "direction": direction}
    plain, variant = (case_of(spec, **axes) for spec in (name, f"{name}+compile"))
    assert dict(plain.module.named_parameters()).keys() == dict(variant.module.named_parameters()).keys()
    with plain.grad_mode():
        expected, found = plain.output(), variant.output()
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        assert counters["stats"]["unique_graphs"] == 1
        variant.call()()
        variant.output()
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("_captured_only")
def test_what_is_not_one_graph_is_unsupported_with_the_reason(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def f(query, key, value):\n    return value * (1 if query.sum() > 0 else 2)\n")
    with torch.no_grad(), pytest.raises(NotOneGraphError, match="as one graph: Data-dependent") as raised:
        case_of(f"{file}:f+compile").output()
    assert attempts.describe(raised.value)[0] is Status.unsupported


def test_sizes_beyond_pytorchs_own_limit_are_compiled_too():
    torch.compiler.reset()
    compile_whole(torch.add)  # sets the limits
    counters.clear()
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False, fullgraph=True)
    for size in range(1, 13):
        compiled(torch.zeros(size + 1))
    assert counters["stats"]["unique_graphs"] == 12


def test_a_limit_that_is_reached_is_an_error_and_not_eager():
    import torch._dynamo.config

    torch.compiler.reset()
    compiled = compile_whole(lambda x: x + 1)
    with torch._dynamo.config.patch(recompile_limit=0), pytest.raises(Exception, match=r"[Rr]ecompile_limit"):
        compiled(torch.zeros(3))


def test_a_variant_of_what_cannot_take_a_workload_cannot_either():
    point = Workload(**SMALL)
    assert "project alone" not in str(implementation("module_list").unsupported(Workload()))
    assert implementation("module_list+compile").unsupported(point) == implementation("module_list").unsupported(point)
    assert "without +compile" in str(implementation("flex+compile").unsupported(point))


def test_few_lengths_are_tried_of_what_compiles():
    point = Workload(seq_len=8192)
    assert [step.seq_len for step in attempts.staircase(point, compiles=True)] == [256, 4096]


def test_an_option_is_part_of_the_name():
    assert plugins.name_of("fused+compile") == "fused+compile"
    assert plugins.digest("fused+compile") == plugins.digest("fused") != ""
    with pytest.raises(ValueError, match=r"fused\+compil: there is no option compil .did you mean compile"):
        plugins.check_specs(["fused+compil"])
    with pytest.raises(ValueError, match="no implementation fusd"):
        plugins.check_specs(["fusd+compile"])


def test_a_variant_looks_like_what_it_is_a_variant_of():
    plain, variant = style.look("fused"), style.look("fused+compile")
    assert (variant["color"], variant["marker"]) == (plain["color"], plain["marker"])
    assert variant["linestyle"] != plain.get("linestyle", "-")
    assert variant["linewidth"] < plain["linewidth"]
