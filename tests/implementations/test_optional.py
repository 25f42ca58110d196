"""Implementations that need a package or CUDA: without it they say so; a stand-in receives the right arguments.

A stand-in has exactly the signature of the kernel at a stated version (tests/data/signatures), takes its layout, and
computes by the textbook, so that the real check judges the passing of mask, heads and axes. Only CUDA can show that the
kernel itself is right.
"""

import contextlib
import dataclasses
import importlib
import inspect
import itertools
import subprocess
import sys
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from attnbench.checking.agreement import check
from attnbench.contract import Implementation, device, missing_package
from attnbench.workloads.workload import Workload
from tests import forks
from tests.checks import bundled, references
from tests.signatures import snapshots, versions

IMPLEMENTATIONS: dict[str, Implementation] = bundled()
SDPA = "torch.nn.functional.scaled_dot_product_attention"
VARLEN = "torch.nn.attention.varlen.varlen_attn"
ENGINE = "transformer_engine.pytorch.DotProductAttention"
FUNCTIONS = {
    "flash_attn_2": "flash_attn.flash_attn_interface.flash_attn_func",
    "flash_attn_3": "flash_attn_interface.flash_attn_func",
    "flash_attn_4": "flash_attn.cute.flash_attn_func",
    "flashinfer": "flashinfer.single_prefill_with_kv_cache",
    "sageattention": "sageattention.sageattn",
    "xformers": "xformers.ops.memory_efficient_attention",
    "cudnn_frontend": "cudnn.experimental.ops.scaled_dot_product_attention",
    "transformer_engine": ENGINE,
}
"""The function of a package that each implementation calls."""
OLDEST = {
    "transformers_sdpa": "transformers.integrations.sdpa_attention.sdpa_attention_forward",
    "transformers_eager": "transformers.models.llama.modeling_llama.eager_attention_forward",
}
"""Functions that test_agreement calls at the installed version."""
PACKAGES = {name: function.rpartition(".")[0] for name, function in FUNCTIONS.items()}
PACKAGES |= dict.fromkeys(OLDEST, "transformers")


@pytest.fixture(autouse=True)
def _no_package(monkeypatch):
    """Pretend that none of the packages is installed."""
    for module in PACKAGES.values():
        monkeypatch.delitem(sys.modules, module, raising=False)
    found_none = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr("attnbench.contract.importlib", found_none)


@pytest.mark.parametrize(("name", "package"), PACKAGES.items())
def test_a_missing_package_is_named(name, package):
    reason = IMPLEMENTATIONS[name].unsupported(Workload(device="cuda", dtype="bfloat16", direction="inference"))
    assert reason is not None
    assert reason.endswith(" is not installed")
    assert package.split(".")[0].split("_interface")[0] in reason


def test_nothing_is_imported_to_find_out():
    names = ", ".join(f"'{name}'" for name in sorted(set(PACKAGES.values())))
    code = f"import sys; from attnbench.contract import missing_package as m; [m(n) for n in [{names}]]; "
    code += f"assert not {{n.split('.')[0] for n in [{names}]}} & set(sys.modules)"
    subprocess.run([forks.python(), "-c", code], check=True)


def test_a_part_of_a_package_that_lacks_it_is_missing(monkeypatch):
    monkeypatch.undo()
    assert missing_package("torch.nn") is None
    assert missing_package("json.no_such_part", "other_json") == "other_json is not installed"
    assert missing_package("no_such_package.part") == "no_such_package is not installed"


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("attnbench.devices.cuda.find_spec", lambda name: None)
    assert "no-such-compiler is not found" in str(device("cpu").missing_compiler())
    assert device("cuda").missing_compiler() == "triton is not installed"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    point = Workload(direction="inference", seq_len=8)
    assert "C++ compiler" in str(IMPLEMENTATIONS["flex"].unsupported(point))


def textbook(query, key, value, visible, scale=None):
    """The textbook form with heads before tokens, grouped heads, and True for visible keys."""
    key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0) @ value


def banded(query_len, key_len, causal, left, right):
    """A window as in FlashAttention's README, counted from the last key."""
    distance = torch.arange(key_len) - torch.arange(query_len)[:, None] - (key_len - query_len)
    seen = torch.ones(query_len, key_len, dtype=torch.bool)
    if causal or right >= 0:
        seen &= distance <= (0 if causal else right)
    return seen & (distance >= -left) if left >= 0 else seen


def flash(q, k, v, softmax_scale, causal, window_size, **others):
    """A stand-in for all versions: no limit of a window is -1, and None in version 4."""
    assert not any(
        others[name] for name in ("dropout_p", "softcap", "return_attn_probs", "return_lse") if name in others
    )
    window = (-1 if limit is None else limit for limit in window_size)
    seen = banded(q.shape[1], k.shape[1], causal, *window)
    return textbook(*(tensor.transpose(1, 2) for tensor in (q, k, v)), seen, softmax_scale).transpose(1, 2)


def flash_with_logsumexp(**given):
    return flash(**given), None


def bits_of(x, bitorder):
    assert bitorder == "little"
    padded = F.pad(x.to(torch.uint8), (0, -len(x) % 8)).reshape(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8)).sum(1, dtype=torch.uint8)


def prefill(q, k, v, custom_mask, packed_custom_mask, causal, kv_layout, sm_scale, window_left, **others):
    assert kv_layout == "NHD"
    assert custom_mask is None, "it would be packed in every call"
    assert not others["return_lse"]
    assert all(tensor.untyped_storage().nbytes() > 0 and tensor.stride(-1) == 1 for tensor in (q, k, v))
    seen = banded(len(q), len(k), causal, window_left, -1)
    if packed_custom_mask is not None:
        bits = packed_custom_mask[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
        seen = bits.flatten()[: len(q) * len(k)].reshape(len(q), len(k)).bool()
    return textbook(*(tensor.transpose(0, 1) for tensor in (q, k, v)), seen, sm_scale).transpose(0, 1)


def sage(q, k, v, tensor_layout, is_causal, sm_scale, return_lse, **others):
    assert tensor_layout == "HND"
    assert not return_lse
    assert not others.get("kwargs")
    return textbook(q, k, v, banded(q.shape[2], k.shape[2], is_causal, -1, -1), sm_scale)


BIASES = {
    "LowerTriangularMask": partial(SimpleNamespace, shift=0),
    "LowerTriangularFromBottomRightMask": partial(SimpleNamespace, shift=1),
}
"""Causal masks of xformers: how far each follows the difference of the lengths."""


def efficient(query, key, value, attn_bias, p, scale, **others):
    assert p == 0
    assert others == {"op": None, "output_dtype": None}
    seen = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool)
    if attn_bias is not None:
        seen = seen.tril(attn_bias.shift * (key.shape[1] - query.shape[1]))
    assert query.shape[2] == key.shape[2]
    return textbook(*(tensor.transpose(1, 2) for tensor in (query, key, value)), seen, scale).transpose(1, 2)


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale, window_size, enable_gqa=False, **others):
    assert not any(others.values())
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    rows = zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:], strict=True)
    parts = [(query[a:b], key[c:d], value[c:d]) for a, b, c, d in rows]
    named = {"softmax_scale": scale, "causal": False, "window_size": window_size}
    return torch.cat([flash(*(tensor[None] for tensor in part), **named)[0] for part in parts])


def of_cudnn(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa, diagonal_alignment, **others):
    assert attn_mask is None
    assert dropout_p == 0
    assert enable_gqa == (query.shape[1] != key.shape[1])
    assert set(others.values()) == {-1, None}
    seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
    if is_causal:
        seen = seen.tril((key.shape[2] - query.shape[2]) * diagonal_alignment)
    return textbook(query, key, value, seen, scale)


class DotProductAttention:
    """Transformer Engine's module, following its documentation."""

    def __init__(self, forward, **given):
        self.given = given
        self.forward = forward.stand_in(self.compute)
        assert given["qkv_format"] == "bshd"
        assert (given["attention_dropout"], given["window_size"], given["softmax_type"]) == (0.0, None, "vanilla")

    def __call__(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    def compute(self, query_layer, key_layer, value_layer, **others):
        heads, groups = self.given["num_attention_heads"], self.given["num_gqa_groups"]
        usual = {"fast_zero_fill", "num_splits", NO_BIAS}
        usual |= {"qkv_interleave_dim", "thd_attention_policy_dispatch"}  # of tensors that are not passed
        assert not {name for name, value in others.items() if value} - usual
        assert (query_layer.shape[2], key_layer.shape[2]) == (heads, groups)
        assert self.given["kv_channels"] == (key_layer.shape[3], value_layer.shape[3])
        assert (self.given["attention_type"] == "self") == (query_layer.shape[1] == key_layer.shape[1])
        name = self.given["attn_mask_type"]
        seen = torch.ones(query_layer.shape[1], key_layer.shape[1], dtype=torch.bool)
        if name != "no_mask":
            shift = {"causal": 0, "causal_bottom_right": key_layer.shape[1] - query_layer.shape[1]}[name]
            seen = seen.tril(shift)
        tensors = (tensor.transpose(1, 2) for tensor in (query_layer, key_layer, value_layer))
        return textbook(*tensors, seen, self.given["softmax_scale"]).transpose(1, 2).flatten(2)


NO_BIAS = "core_attention_bias_type"


COMPUTED = {
    FUNCTIONS["flash_attn_2"]: flash,
    FUNCTIONS["flash_attn_3"]: flash_with_logsumexp,
    FUNCTIONS["flash_attn_4"]: flash_with_logsumexp,
    FUNCTIONS["sageattention"]: sage,
    VARLEN: varlen,
    FUNCTIONS["flashinfer"]: prefill,
    "flashinfer.quantization.packbits": bits_of,
    FUNCTIONS["xformers"]: efficient,
    FUNCTIONS["cudnn_frontend"]: of_cudnn,
}
"""Each function computed by the textbook, given all its parameters by name."""
OF_TORCH = {"torch_varlen": VARLEN, "sdpa_cudnn": SDPA, "sdpa_efficient": SDPA}


def install(monkeypatch, version):
    """Install stand-ins for all packages, each function at that version, or else at its last."""

    def at(name):
        return versions(name).get(version, [*versions(name).values()][-1])

    functions = {name: at(name).stand_in(compute) for name, compute in COMPUTED.items()}
    monkeypatch.setattr(VARLEN, functions.pop(VARLEN))
    functions[ENGINE] = at(ENGINE).stand_in(lambda **given: DotProductAttention(at(f"{ENGINE}.forward"), **given))
    functions |= {f"xformers.ops.fmha.attn_bias.{name}": bias for name, bias in BIASES.items()}
    modules: dict[str, ModuleType] = {}
    for name, function in functions.items():
        parent, _, attribute = name.rpartition(".")
        for module in itertools.accumulate(parent.split("."), "{}.{}".format):
            monkeypatch.setitem(sys.modules, module, modules.setdefault(module, ModuleType(module)))
        setattr(modules[parent], attribute, function)
    for name in ("sdpa_cudnn", "sdpa_efficient"):
        monkeypatch.setattr(f"attnbench.implementations.{name}.sdpa_kernel", lambda _: contextlib.nullcontext())
    plain, signature = F.scaled_dot_product_attention, versions(SDPA).get(version, versions(SDPA)["2.13.0"]).signature

    def as_documented(*given, **named):
        bound = signature.bind(*given, **named).arguments
        assert bound.get("attn_mask") is None or not bound.get("is_causal")
        return plain(*given, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", as_documented)


SQUARE, LONGER = ("causal", "sliding_window(3)", "document(4,7)", "padding"), {"kv_len": 15}
POINTS = [{"mask": mask} | LONGER for mask in ("none", "causal", "causal_bottom_right", "prefix(3)")]
POINTS += [{"mask": mask} for mask in SQUARE] + [{"mask": "causal_bottom_right", "kv_len": 7}]
TRIED = [(name, version) for name, function in (FUNCTIONS | OF_TORCH).items() for version in versions(function)]
FEWEST = {"sageattention": 2, "xformers": 3, "cudnn_frontend": 4, "transformer_engine": 4}
"""Least number of points to be tried, if it is less than 5."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "version"), TRIED)
def test_what_a_kernel_is_handed_is_right(name, version, monkeypatch):
    install(monkeypatch, version)
    found = IMPLEMENTATIONS[name]
    monkeypatch.setattr(f"attnbench.implementations.{name}.missing_package", lambda *_: None, raising=False)
    tried = 0
    for axes, groups in itertools.product(POINTS, (2, 6) if name == "torch_varlen" else (2,)):
        sizes = {"seq_len": 11, "head_dim": 64 if name == "flashinfer" else 8, "num_heads": 6, "num_kv_heads": groups}
        batch = {"batch_size": 1 if name == "flashinfer" else 2, "direction": "inference"}
        on_cuda = Workload(**(sizes | batch | axes), device="cuda", dtype="bfloat16")
        if found.unsupported(on_cuda) is None:
            point = Workload(**(sizes | batch | axes))
            right = references(point, is_brief=tried > 0)  # rules hold at every point alike
            judged = check(right, dataclasses.replace(found, unsupported=lambda _: None))
            assert judged.agrees, f"{point.id}: {judged.diagnosis}"
            tried += 1
    assert tried >= FEWEST.get(name, 5)


@pytest.mark.parametrize("name", ["cudnn_frontend", "transformer_engine", "sdpa_cudnn", "sdpa_efficient"])
def test_a_scale_is_handed_on(name, monkeypatch):
    install(monkeypatch, "")
    point = Workload(seq_len=5, head_dim=8, num_heads=2, direction="inference", scale=0.4)
    judged = check(references(point), dataclasses.replace(IMPLEMENTATIONS[name], unsupported=lambda _: None))
    assert judged.agrees, judged.diagnosis


OF_TORCH_IN_PYTHON = [each for each in snapshots() if each.package == "torch" and each.name != SDPA]


@pytest.mark.parametrize("snapshot", OF_TORCH_IN_PYTHON, ids=str)
def test_a_snapshot_is_what_the_installed_version_takes(snapshot):
    if snapshot.version != torch.__version__.partition("+")[0]:
        pytest.skip("of another version")
    module, _, function = snapshot.name.rpartition(".")
    real = inspect.signature(getattr(importlib.import_module(module), function)).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in real]
    assert inspect.Signature(bare) == snapshot.signature


@pytest.mark.parametrize("name", OLDEST)
def test_the_oldest_transformers_takes_what_it_is_handed(name, monkeypatch):
    module = importlib.import_module(f"attnbench.implementations.{name}")
    taken = versions(OLDEST[name])["5.0.0"].stand_in(lambda query, **_: (query.transpose(1, 2), None))
    monkeypatch.setattr(module, "kernel", lambda: taken)
    query = torch.ones(1, 4, 3, 8)
    assert module.attention(query, query[:, :2], query[:, :2], scale=1.0, num_kv_heads=2).equal(query)


def test_old_varlen_has_no_grouped_heads(monkeypatch):
    point = Workload(device="cuda", dtype="bfloat16", num_heads=4, num_kv_heads=2, direction="inference")
    for version, words in (("2.11.0", "no grouped heads before torch 2.12"), ("2.12.0", None)):
        install(monkeypatch, version)
        reason = IMPLEMENTATIONS["torch_varlen"].unsupported(point)
        assert (reason is None) if words is None else words in str(reason)


def test_a_package_that_only_shares_its_folder_is_missing(tmp_path, monkeypatch):
    """flash-attn-4 installs flash_attn/cute alone, which makes flash_attn a namespace."""
    monkeypatch.undo()
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    point = Workload(device="cuda", dtype="bfloat16", direction="inference", head_dim=64)
    assert IMPLEMENTATIONS["flash_attn_2"].unsupported(point) == "flash_attn is not installed"
    assert IMPLEMENTATIONS["flash_attn_4"].unsupported(point) is None
    assert missing_package("flash_attn") == "flash_attn is not installed"


def test_xformers_without_the_package_of_its_kernels_is_missing(tmp_path, monkeypatch):
    monkeypatch.undo()
    for name, text in {
        "xformers/__init__.py": "",
        "xformers/ops/__init__.py": "",
        "xformers-0.0.36.dist-info/METADATA": "Metadata-Version: 2.1\nName: xformers\nVersion: 0.0.36\n"
        "Requires-Dist: torch>=2.10\nRequires-Dist: mslk\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    point = Workload(device="cuda", dtype="bfloat16", direction="inference")
    assert IMPLEMENTATIONS["xformers"].unsupported(point) == "mslk is not installed"


WIDTHS = [
    ("sdpa_cudnn", "bfloat16", 12, "multiples of 8"),
    ("sdpa_cudnn", "bfloat16", 256, None),
    ("sdpa_efficient", "bfloat16", 12, "multiples of 8"),
    ("sdpa_efficient", "float32", 12, None),
    ("sdpa_efficient", "float32", 6, "multiples of 4"),
    ("flash_attn_3", "bfloat16", 12, "multiple of 8"),
    ("flash_attn_4", "bfloat16", 12, "multiple of 8"),
    ("flash_attn_4", "bfloat16", 256, None),
    ("cudnn_frontend", "bfloat16", 12, "multiples of 8"),
    ("transformer_engine", "bfloat16", 12, "multiples of 8"),
]


@pytest.mark.parametrize(("name", "dtype", "head_dim", "words"), WIDTHS)
def test_a_width_that_a_kernel_cannot_take_is_refused(name, dtype, head_dim, words, monkeypatch):
    monkeypatch.setattr(f"attnbench.implementations.{name}.missing_package", lambda *_: None, raising=False)
    reason = IMPLEMENTATIONS[name].unsupported(Workload(device="cuda", dtype=dtype, head_dim=head_dim))
    assert reason is None if words is None else words in str(reason)


@pytest.mark.parametrize(("major", "head_dim", "is_taken"), [(9, 192, True), (10, 192, False), (10, 256, True)])
def test_what_flash_attention_4_takes_depends_on_the_gpu(major, head_dim, is_taken, monkeypatch):
    monkeypatch.setattr("attnbench.implementations.flash_attn_4.missing_package", lambda *_: None)
    here = SimpleNamespace(compute_capability=lambda: (major, 0))
    monkeypatch.setattr("attnbench.implementations.flash_attn_4.device", lambda _: here)
    reason = IMPLEMENTATIONS["flash_attn_4"].unsupported(Workload(device="cuda", dtype="bfloat16", head_dim=head_dim))
    assert (reason is None) == is_taken


def test_a_backend_that_a_name_promises_is_declared():
    """No kernel may silently fall back to PyTorch's choice."""
    names = ("math", "flash", "efficient", "cudnn")
    assert {name: IMPLEMENTATIONS[f"sdpa_{name}"].backend for name in names} == {name: name for name in names}


def test_a_parameter_that_a_version_lacks_is_refused_as_by_the_function_itself():
    known = versions(VARLEN)
    tensors = (None,) * 7
    known["2.12.0"].stand_in(lambda **_: None)(*tensors, enable_gqa=True)
    with pytest.raises(TypeError, match="enable_gqa"):
        known["2.11.0"].stand_in(lambda **_: None)(*tensors, enable_gqa=True)
