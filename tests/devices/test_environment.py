"""Stored facts about the machine of a run."""

import psutil
import pytest
import torch

from attnbench.devices import environment


def test_time_that_the_host_took_is_stored_where_the_system_tells():
    reported = environment.collect().moment.get("stolen by the host since boot")
    if not hasattr(psutil.cpu_times(), "steal"):
        assert reported is None
    else:
        assert reported is not None
        share, unit = reported.split()
        assert unit == "%"
        assert 0.0 <= float(share) <= 100.0


@pytest.mark.parametrize("native", [(), ("bfloat16",), ("bfloat16", "float16")])
def test_half_precision_has_hardware_where_onednn_says_so(monkeypatch, native):
    class Said:
        _is_mkldnn_bf16_supported = staticmethod(lambda: "bfloat16" in native)
        _is_mkldnn_fp16_supported = staticmethod(lambda: "float16" in native)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.ops, "mkldnn", Said)
    assert environment.collect().native_dtypes == native


def test_without_onednn_nothing_is_known_of_half_precision(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert environment.collect().native_dtypes is None


def test_a_torch_that_cannot_be_asked_costs_no_run(monkeypatch):
    monkeypatch.setattr(torch.ops, "mkldnn", object())
    assert environment.collect().native_dtypes is None
