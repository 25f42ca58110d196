"""The backend that ran is observed: each silent fallback of PyTorch's SDPA on the CPU shows as math."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from attnbench.contract import Attention, Implementation
from attnbench.contract.loading import implementation
from attnbench.devices import device
from attnbench.devices.kernels import observed
from attnbench.processes.worker import operators
from attnbench.processes.worker.answers import PreparedWorkload
from attnbench.storage.records import PROBE, Operators
from attnbench.workloads.workload import Workload

B, H, T, K = 2, 2, 8, 4
SMALL = Workload(seq_len=8, num_heads=2, head_dim=4, direction="inference")


def draw(*sizes: int) -> Tensor:
    return torch.randn(*(sizes or (B, H, T, K)), generator=torch.Generator().manual_seed(0))


def ran_in(call: Callable[[], object]) -> str:
    return observed(device("cpu").record(call).operators())


def attend(*tensors: Tensor, **options: object) -> Callable[[], object]:
    query, key, value = tensors or (draw(), draw(), draw())
    return lambda: F.scaled_dot_product_attention(query, key, value, **options)  # type: ignore[arg-type]


FALLBACKS = {
    "dropout": attend(dropout_p=0.5),
    "value width != key width": attend(draw(), draw(), draw(B, H, T, 2 * K)),
    "mask requiring grad": attend(attn_mask=draw(T, T).requires_grad_()),
    "3-D mask": attend(attn_mask=draw(H, T, T)),
    "5-D inputs": attend(*[draw(1, B, H, T, K)] * 3),
    "broadcast batch of key and value": attend(draw(), draw(1, H, T, K), draw(1, H, T, K)),
    "last stride != 1": attend(draw(B, H, K, T).transpose(2, 3), draw(), draw()),
}


@pytest.mark.parametrize("name", FALLBACKS)
def test_a_silent_fallback_is_seen(name: str) -> None:
    assert ran_in(FALLBACKS[name]) == "math"


def test_two_backends_in_one_call_are_both_reported() -> None:
    plain = [attend(), attend(is_causal=True), attend(attn_mask=torch.ones(T, T, dtype=torch.bool))]
    assert [ran_in(call) for call in plain] == 3 * ["flash"]
    assert ran_in(lambda: [call() for call in (plain[0], FALLBACKS["dropout"])]) == "flash+math"


def observe(made: Implementation, workload: Workload = SMALL) -> Operators:
    steps: list[int] = []
    found = operators.observe(PreparedWorkload(workload).cased(PROBE, made), made, on_step=lambda: steps.append(0))
    assert len(steps) >= 2  # a heartbeat before each call
    return found


@pytest.mark.parametrize("direction", ["inference", "forward", "backward", "forward_backward"])
@pytest.mark.parametrize(("name", "expected"), [("sdpa", "flash"), ("sdpa_flash", "flash"), ("sdpa_math", "math")])
def test_the_built_in_ones_run_what_their_names_say(name: str, expected: str, direction: str) -> None:
    workload = Workload(seq_len=8, num_heads=2, head_dim=4, direction=direction)
    found = observe(implementation(name), workload)
    assert found.observed == expected
    assert found.requested in {"", expected}
    assert not found.fallback


def test_an_implementation_may_only_promise_a_backend_that_there_is() -> None:
    with pytest.raises(ValueError, match="backend=fast is not allowed: it is one of flash, math"):
        Implementation(build=Attention, source="", backend="fast")
