"""The backend that ran is observed: each silent fallback of PyTorch's SDPA on the CPU shows as math."""

import shutil
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from attnbench.analysis.breakdown import ran
from attnbench.contract import Attention, BoundMask, Implementation
from attnbench.contract.loading import implementation
from attnbench.devices import device
from attnbench.devices.kernels import BACKENDS, compiled, observed
from attnbench.processes.worker import operators
from attnbench.processes.worker.answers import Bench
from attnbench.storage.records import Operators
from attnbench.workloads.workload import Workload

B, H, T, K = 2, 2, 8, 4
SMALL = Workload(seq_len=8, num_heads=2, head_dim=4, direction="inference")


def draw(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (B, H, T, K)), generator=torch.Generator().manual_seed(0))


def seen(call: Callable[[], object]) -> tuple[str, operators.Asking]:
    """Return the backend that ran, and PyTorch's answer beforehand for the same call with flash."""
    asked = operators.Asking("flash")
    with asked:
        call()
    return observed(device("cpu").record(call).operators()), asked


def attend(*tensors: Tensor, **options: object) -> Callable[[], object]:
    query, key, value = tensors or (draw(), draw(), draw())
    return lambda: F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]


FALLBACKS = {
    "dropout": (attend(dropout_p=0.5), "non-zero dropout"),
    "value width != key width": (attend(draw(), draw(), draw(B, H, T, 2 * K)), "same last dimension"),
    "mask requiring grad": (attend(attn_mask=draw(T, T).requires_grad_()), "the mask requires a gradient"),
    "3-D mask": (attend(attn_mask=draw(H, T, T)), "use the following attn mask shapes: 2d"),
    "3-D inputs": (attend(draw(H, T, K), draw(H, T, K), draw(H, T, K)), "4 dimensional"),
    "5-D inputs": (attend(*[draw(1, B, H, T, K)] * 3), "4 dimensional"),
    "broadcast batch of key and value": (attend(draw(), draw(1, H, T, K), draw(1, H, T, K)), "batch_size"),
    "last stride != 1": (attend(draw(B, H, K, T).transpose(2, 3), draw(), draw()), "last dimension"),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_silent_fallback_is_seen_predicted_and_explained(name: str) -> None:
    call, words = FALLBACKS[name]
    ran_backend, asked = seen(call)
    assert [ran_backend] == list(asked.predicted) == ["math"]
    assert words in "; ".join(asked.reasons)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(T, T, dtype=torch.bool)}])
def test_ordinary_calls_run_flash_and_were_predicted_to(options: dict[str, object]) -> None:
    ran_backend, asked = seen(attend(**options))
    assert (ran_backend, list(asked.predicted), list(asked.reasons)) == ("flash", ["flash"], [])


def test_two_backends_in_one_call_are_both_reported() -> None:
    both = [attend(), attend(dropout_p=0.5)]
    ran_backend, asked = seen(lambda: [one() for one in both])
    assert ran_backend == "flash+math"
    assert set(asked.predicted) == {"flash", "math"}


def test_asking_changes_no_answer_and_warns_of_nothing() -> None:
    call = attend()
    expected = call()
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with operators.Asking("math"):
            kept.append(call())
    assert torch.equal(kept[0], expected)  # type: ignore[arg-type]


def observe(made: Implementation, workload: Workload = SMALL) -> Operators:
    steps: list[int] = []
    found = operators.observe(Bench(workload).case(made), made, on_step=lambda: steps.append(0))
    assert len(steps) >= 3  # a heartbeat before each call
    return found


@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "forward_backward"])
@pytest.mark.parametrize(("name", "expected"), [("sdpa", "flash"), ("sdpa_flash", "flash"), ("sdpa_math", "math")])
def test_the_built_in_ones_run_what_their_names_say(name: str, expected: str, direction: str) -> None:
    workload = Workload(seq_len=8, num_heads=2, head_dim=4, direction=direction)
    found = observe(implementation(name), workload)
    assert found.observed == found.predicted == expected
    assert found.requested in {"", expected}
    assert not found.fallback


def test_an_implementation_may_only_promise_a_backend_that_there_is() -> None:
    with pytest.raises(ValueError, match="backend=fast is not allowed: it is one of flash, math"):
        Implementation(build=Attention, source="", backend="fast")


def test_every_backend_of_torch_has_a_name() -> None:
    assert set(operators._BACKENDS) == set(BACKENDS)
    assert set(operators._BACKENDS.values()) == set(SDPBackend.__members__.values()) - {SDPBackend.ERROR}


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # of torch's, while it imports its compiler
def test_torch_compile_makes_flash_of_the_textbook_form_and_it_shows() -> None:
    if shutil.which("g++") is None and shutil.which("clang++") is None:
        pytest.skip("torch.compile needs a C++ compiler on the CPU")

    class Compiled(Attention):
        def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
            return textbook(query, key, value)

    @torch.compile
    def textbook(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return (query @ key.transpose(-2, -1) / 8).softmax(-1) @ value

    workload = Workload(seq_len=32, num_heads=2, head_dim=64, direction="inference")
    found = observe(Implementation(build=Compiled, source=""), workload)
    assert found.observed == "flash"
    assert compiled(found.calls)
    assert ran(found) == "compiled: flash"
