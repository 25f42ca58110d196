"""Stored facts about the machine of a run."""

import pytest
import torch

from attnbench.devices import environment


@pytest.mark.parametrize("native", [(), ("bfloat16",), ("bfloat16", "float16"), None])
def test_half_precision_has_hardware_where_onednn_says_so(monkeypatch, native):
    class Library:
        _is_mkldnn_bf16_supported = staticmethod(lambda: "bfloat16" in native)
        _is_mkldnn_fp16_supported = staticmethod(lambda: "float16" in native)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", object() if native is None else Library)
    assert environment.collect().native_dtypes == native
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert environment.collect().native_dtypes is None
