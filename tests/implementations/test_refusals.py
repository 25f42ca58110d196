"""Refusals of implementations, each with its reason."""

import pytest
import torch

from attnbench.checking.case import draw_weights
from attnbench.contract import Implementation, Workload
from tests.checks import bundled, portable

IMPLEMENTATIONS: dict[str, Implementation] = bundled()


def workload(**axes: object) -> Workload:
    return Workload(**({"batch_size": 2, "seq_len": 6, "num_heads": 4, "head_dim": 8} | axes))


@pytest.mark.parametrize("name", portable())
def test_what_has_no_attend_refuses_scope_attention_and_nothing_else_does(name: str) -> None:
    point = workload(mask="causal")
    module = IMPLEMENTATIONS[name].build(draw_weights(point))
    assert (IMPLEMENTATIONS[name].unsupported(point) is None) == hasattr(module, "attend")
    assert IMPLEMENTATIONS[name].unsupported(workload(scope="module", mask="causal")) is None


REFUSED = {
    "sdpa_bias": [{"mask": "none"}, {"mask": "padding"}, {"mask": "causal_bottom_right", "kv_len": 5}],
    "sdpa_cudnn": [
        {},
        {"device": "cuda"},
        {"device": "cuda", "dtype": "float16", "head_dim": 264},
        {"device": "cuda", "dtype": "float16", "head_dim": 8, "kv_len": 1},
        {"device": "cuda", "dtype": "float16", "head_dim": 8, "mask": "causal", "kv_len": 9},
    ],
    "sdpa_efficient": [{}, {"device": "cuda", "dtype": "float64"}, {"device": "cuda", "mask": "softcap(30)"}],
    "torch_varlen": [
        {},
        {"device": "cuda"},
        {"device": "cuda", "dtype": "float16", "mask": "padding"},
        {"device": "cuda", "dtype": "float16", "mask": "causal", "kv_len": 9},
    ],
    "torch_mha_weights": [
        {"scope": "module", "mask": "padding(6,0)"},
        {"scope": "module", "mask": "causal+softcap(20)"},
    ],
    "flex": [
        {},  # it has gradients
        {"direction": "inference", "dtype": "float64"},
        {"device": "cuda", "head_dim": 8},
    ],
    "module_list": [{"scope": "module", "num_kv_heads": 2}, {"scope": "module", "sinks": "learned"}],
    "fused": [{"scope": "module", "mask": "padding(6,0)"}, {"scope": "module", "kv_len": 9}, {"mask": "softcap(2)"}],
    "sdpa_flash": [
        {"value_dim": 5},
        {"mask": "softcap(20)"},
        {"dropout": 0.1},
        {"device": "cuda", "dtype": "float32"},
        {"device": "cuda", "dtype": "float16", "mask": "padding"},
        {"device": "cuda", "dtype": "float16", "mask": "causal", "kv_len": 9},
        {"device": "cuda", "dtype": "float16", "head_dim": 512},
    ],
    "torch_mha": [
        {"scope": "module", "num_kv_heads": 2},
        {"scope": "module", "value_dim": 5},
        {"scope": "module", "embed_dim": 16, "head_dim": 8},
    ],
}


@pytest.mark.parametrize(("name", "axes"), [(name, axes) for name, refused in REFUSED.items() for axes in refused])
def test_a_refusal_gives_its_reason_in_words(name: str, axes: dict[str, object]) -> None:
    reason = IMPLEMENTATIONS[name].unsupported(workload(**axes))
    assert reason is not None
    assert " " in reason


def test_why_torch_mha_refuses_queries_that_see_no_key_in_inference() -> None:
    """If this fails, PyTorch has fixed its fast path, and the refusal can go."""
    module = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval()
    x, hidden = torch.ones(1, 3, 4), torch.ones(1, 3, dtype=torch.bool)
    with torch.no_grad():
        without_gradients = module(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    assert without_gradients.isnan().all()
    assert module(x, x, x, key_padding_mask=hidden, need_weights=False)[0].isfinite().all()
    point = workload(mask="padding(6,0)", scope="module", direction="inference", head_dim=8)
    assert "fast path" in str(IMPLEMENTATIONS["torch_mha"].unsupported(point))


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_flash_takes_half_precision_on_cuda(mask: str) -> None:
    point = workload(device="cuda", dtype="bfloat16", mask=mask)
    assert IMPLEMENTATIONS["sdpa_flash"].unsupported(point) is None
