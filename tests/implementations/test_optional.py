"""What needs a package or CUDA: missing, it says so; with a stand-in for the package, what it is handed is right.

A stand-in has the documented signature and layout of the kernel and computes by the textbook, so that the real check
judges how the mask, the heads and the axes were handed over. That the kernel itself is right, only CUDA can show.
"""

import contextlib
import dataclasses
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from attnbench.checking.agreement import ask_oracle, check
from attnbench.contract import Implementation, missing_compiler, missing_package, supports_everything
from attnbench.plugins import plugs
from attnbench.workloads.workload import Workload

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
PACKAGES = {
    "flash_attn_2": "flash_attn",
    "flash_attn_3": "flash_attn_interface",
    "flash_attn_4": "flash_attn.cute",
    "flashinfer": "flashinfer",
    "sageattention": "sageattention",
    "transformers_eager": "transformers",
    "transformers_sdpa": "transformers",
    "xformers": "xformers",
}


@pytest.fixture(autouse=True)
def _no_package(monkeypatch):
    """As on a machine that has none of them, whatever this one has."""
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
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_part_of_a_package_that_lacks_it_is_missing(monkeypatch):
    monkeypatch.undo()
    assert missing_package("torch.nn") is None
    assert missing_package("json.no_such_part", "other_json") == "other_json is not installed"
    assert missing_package("no_such_package.part") == "no_such_package is not installed"


def test_a_missing_compiler_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("attnbench.devices.cuda.find_spec", lambda name: None)
    assert "no-such-compiler is not found" in str(missing_compiler("cpu"))
    assert missing_compiler("cuda") == "triton is not installed"
    point = Workload(direction="inference", seq_len=8)
    assert "C++ compiler" in str(IMPLEMENTATIONS["flex"].unsupported(point))


def textbook(query, key, value, visible):
    """Heads before tokens; grouped heads; True where visible."""
    key, value = (tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3) for tensor in (key, value))
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return weights.masked_fill(~visible.any(-1, keepdim=True), 0.0) @ value


def banded(query_len, key_len, causal, left, right):
    """As FlashAttention's README has it, counted from the last key."""
    distance = torch.arange(key_len) - torch.arange(query_len)[:, None] - (key_len - query_len)
    seen = torch.ones(query_len, key_len, dtype=torch.bool)
    if causal or right >= 0:
        seen &= distance <= (0 if causal else right)
    return seen & (distance >= -left) if left >= 0 else seen


def flash_2(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1)):
    assert softmax_scale is None
    assert dropout_p == 0
    seen = banded(q.shape[1], k.shape[1], causal, *window_size)
    return textbook(*(tensor.transpose(1, 2) for tensor in (q, k, v)), seen).transpose(1, 2)


def flash_3(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1)):
    return flash_2(q, k, v, 0.0, softmax_scale, causal, window_size), None


def flash_4(q, k, v, softmax_scale=None, causal=False, window_size=(None, None)):
    window = tuple(-1 if limit is None else limit for limit in window_size)
    return flash_2(q, k, v, 0.0, softmax_scale, causal, window), None


def prefill(q, k, v, custom_mask=None, causal=False, kv_layout="NHD", window_left=-1):
    assert kv_layout == "NHD"
    seen = banded(len(q), len(k), causal, window_left, -1) if custom_mask is None else custom_mask
    assert seen.shape == (len(q), len(k))
    return textbook(*(tensor.transpose(0, 1) for tensor in (q, k, v)), seen).transpose(0, 1)


def sage(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None):
    assert tensor_layout == "HND"
    return textbook(q, k, v, banded(q.shape[2], k.shape[2], is_causal, -1, -1))


class LowerTriangular:
    shift = 0

    def seen(self, query_len, key_len):
        return torch.ones(query_len, key_len, dtype=torch.bool).tril(self.shift * (key_len - query_len))


class LowerTriangularFromBottomRight(LowerTriangular):
    shift = 1


def efficient(query, key, value, attn_bias=None, p=0.0, scale=None):
    seen = banded(query.shape[1], key.shape[1], False, -1, -1)  # noqa: FBT003 - causal
    seen = seen if attn_bias is None else attn_bias.seen(*seen.shape)
    assert query.shape[2] == key.shape[2]
    return textbook(*(tensor.transpose(1, 2) for tensor in (query, key, value)), seen).transpose(1, 2)


def varlen(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, window_size=(-1, -1), enable_gqa=False):
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert enable_gqa == (query.shape[1] != key.shape[1])
    rows = zip(cu_seq_q[:-1], cu_seq_q[1:], cu_seq_k[:-1], cu_seq_k[1:], strict=True)
    parts = [(query[a:b], key[c:d], value[c:d]) for a, b, c, d in rows]
    return torch.cat([flash_2(*(tensor[None] for tensor in part), window_size=window_size)[0] for part in parts])


def of_transformers(module, query, key, value, attention_mask, scaling, dropout=0.0, is_causal=None):
    assert scaling == query.shape[-1] ** -0.5
    assert query.shape[1] == key.shape[1] * module.num_key_value_groups
    if attention_mask is None:
        seen = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        seen = seen.tril() if is_causal else seen
    else:
        seen = attention_mask if attention_mask.dtype is torch.bool else attention_mask == 0
    return textbook(query, key, value, seen).transpose(1, 2), None


def stand_in(monkeypatch, **modules):
    for name, content in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture
def _packages(monkeypatch):
    biases = SimpleNamespace(
        LowerTriangularMask=LowerTriangular, LowerTriangularFromBottomRightMask=LowerTriangularFromBottomRight
    )
    operators = {"memory_efficient_attention": efficient, "fmha": SimpleNamespace(attn_bias=biases)}
    stand_in(
        monkeypatch,
        flash_attn={"flash_attn_func": flash_2},
        flash_attn_interface={"flash_attn_func": flash_3},
        flash_attn__cute={"flash_attn_func": flash_4},
        flashinfer={"single_prefill_with_kv_cache": prefill},
        sageattention={"sageattn": sage},
        transformers={},
        transformers__modeling_utils={"ALL_ATTENTION_FUNCTIONS": {"sdpa": of_transformers}},
        transformers__models={},
        transformers__models__llama={},
        transformers__models__llama__modeling_llama={"eager_attention_forward": of_transformers},
        xformers__ops=operators,
        xformers={"ops": SimpleNamespace(**operators)},
    )
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    for name in ("sdpa_cudnn", "sdpa_efficient"):
        monkeypatch.setattr(f"attnbench.implementations.{name}.sdpa_kernel", lambda _: contextlib.nullcontext())
    plain = F.scaled_dot_product_attention

    def without_both(*given, attn_mask=None, is_causal=False, **named):
        assert attn_mask is None or not is_causal
        return plain(*given, attn_mask=attn_mask, is_causal=is_causal, **named)

    monkeypatch.setattr(F, "scaled_dot_product_attention", without_both)


POINTS = [
    {"mask": mask} | lengths
    for mask, lengths in (
        ("none", {"kv_len": 15}),
        ("causal", {}),
        ("causal", {"kv_len": 15}),
        ("causal_bottom_right", {"kv_len": 15}),
        ("causal_bottom_right", {"kv_len": 7}),
        ("sliding_window(3)", {}),
        ("document(4,7)", {}),
        ("padding", {}),
        ("prefix(3)", {"kv_len": 15}),
    )
]
TRIED = [*PACKAGES, "sdpa_cudnn", "sdpa_efficient", "torch_varlen"]
FEWEST = {"sageattention": 2, "xformers": 3}
"""How many of the points must have been tried, where it is less than 5."""


@pytest.mark.usefixtures("_packages")
@pytest.mark.parametrize("name", TRIED)
def test_what_a_kernel_is_handed_is_right(name, monkeypatch):
    found = IMPLEMENTATIONS[name]
    monkeypatch.setattr(f"attnbench.implementations.{name}.missing_package", lambda *_: None, raising=False)
    tried = 0
    for axes in POINTS:
        sizes = {"seq_len": 11, "head_dim": 64 if name == "flashinfer" else 8, "num_heads": 6, "num_kv_heads": 2}
        batch = {"batch_size": 1 if name == "flashinfer" else 2, "direction": "inference"}
        on_cuda = Workload(**(sizes | batch | axes), device="cuda", dtype="bfloat16")
        if found.unsupported(on_cuda) is None:
            point = Workload(**(sizes | batch | axes))
            judged = check(ask_oracle(point, 0), dataclasses.replace(found, unsupported=supports_everything))
            assert judged.agrees, f"{point.id}: {judged.diagnosis}"
            tried += 1
    assert tried >= FEWEST.get(name, 5)
