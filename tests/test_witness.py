"""examples/gpu/cudnn_gradient_layout.py, with stand-ins for the GPU and for cuDNN's plan."""

import contextlib
import runpy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend

WITNESS = Path(__file__).parents[1] / "examples" / "gpu" / "cudnn_gradient_layout.py"
SDPA = torch.nn.functional.scaled_dot_product_attention


class Planned(torch.autograd.Function):
    """Reads each incoming gradient by the strides of the first one, as a cached plan does."""

    strides: tuple[int, ...] = ()

    @staticmethod
    def forward(_, output):
        return output.clone()

    @staticmethod
    def backward(_, incoming):
        Planned.strides = Planned.strides or incoming.stride()
        return incoming.as_strided(incoming.shape, Planned.strides)


def ends(monkeypatch, *, is_wrong: bool) -> int:
    backends, randn = [], torch.randn

    @contextlib.contextmanager
    def only(backend):
        backends.append(backend)
        yield

    def sdpa(*operands):
        output = SDPA(*operands)
        return Planned.apply(output) if is_wrong and backends[-1] == SDPBackend.CUDNN_ATTENTION else output

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch, "randn", lambda *sizes, **_: randn(*sizes))
    monkeypatch.setattr(nn.attention, "sdpa_kernel", only)
    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", sdpa)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(WITNESS))
    assert backends == [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
    return ended.value.code


@pytest.mark.parametrize("is_wrong", [True, False])
def test_it_fails_where_cudnn_reads_a_gradient_by_the_strides_of_another(monkeypatch, *, is_wrong):
    monkeypatch.setattr(Planned, "strides", ())
    assert ends(monkeypatch, is_wrong=is_wrong) == int(is_wrong)


def test_without_a_gpu_it_says_so_and_reports_no_fault(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(WITNESS))
    assert ended.value.code == 2
    assert "nothing was tried" in capsys.readouterr().out


def test_it_is_short_and_says_where_the_fault_was_seen():
    _, docstring, code = WITNESS.read_text(encoding="utf-8").split('"""')
    assert "torch 2.11.0 and cuDNN 9.19" in docstring
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    for page in ("docs/findings.md", "results/gallery/gpu/README.md"):
        paragraphs = (WITNESS.parents[2] / page).read_text(encoding="utf-8").split("\n\n")
        (claim,) = (" ".join(each.split()) for each in paragraphs if WITNESS.name in each)
        assert "torch 2.11.0 and cuDNN 9.19" in claim
