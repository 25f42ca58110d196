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


HALF = {"device": "cuda", "dtype": "float16"}
REFUSED = {
    "sdpa_cudnn": [
        {},
        {"device": "cuda"},
        HALF | {"head_dim": 264},
        HALF | {"kv_len": 1},
        HALF | {"mask": "causal", "kv_len": 9},
    ],
    "sdpa_efficient": [{}, {"device": "cuda", "dtype": "float64"}, {"device": "cuda", "mask": "softcap(30)"}],
    "torch_varlen": [{}, {"device": "cuda"}, HALF | {"mask": "padding"}, HALF | {"mask": "causal", "kv_len": 9}],
    "flex": [{}, {"direction": "inference", "dtype": "float64"}, {"device": "cuda", "head_dim": 8}],
    "sdpa_flash": [
        {"device": "cuda", "dtype": "float32"},
        HALF | {"mask": "padding"},
        HALF | {"mask": "causal", "kv_len": 9},
        HALF | {"head_dim": 512},
    ],
}
"""What needs CUDA or a compiler: whatever else is not refused, test_agreement tries."""


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
