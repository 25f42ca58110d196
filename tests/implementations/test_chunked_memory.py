"""Peak memory against theory: exactly where the theory is exact, and linear in the length for the tiled form."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from attnbench.contract import Attention, BoundMask, Implementation, Weights
from attnbench.plugins import plugs
from attnbench.workloads.masks import parse_mask

IMPLEMENTATIONS: dict[str, Implementation] = plugs("attnbench.implementations", "IMPLEMENTATION")
HEADS, WIDTH, FLOAT = 8, 64, 4


def peak_bytes(call: Callable[[], object]) -> int:
    """The most that one call held above what it was given: the running sum over the profiler's memory events."""
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        kept = call()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    del kept
    held = highest = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest


def draw(length: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(1, HEADS, length, WIDTH),
        torch.randn(1, HEADS, length, WIDTH),
        torch.randn(1, HEADS, length, WIDTH),
    )


def prepared(name: str, mask: str, length: int) -> tuple[Attention, BoundMask]:
    rows = torch.randn(HEADS, WIDTH, 1)
    module = IMPLEMENTATIONS[name].build(Weights(query=rows, key=rows, value=rows))
    assert isinstance(module, Attention)
    return module, BoundMask(parse_mask(mask), (1, length, length), "cpu", num_heads=HEADS)


def inference_bytes(name: str, length: int, mask: str = "none") -> int:
    module, bound = prepared(name, mask, length)
    inputs = draw(length)
    with torch.no_grad():
        return peak_bytes(lambda: module.attend(*inputs, bound))


def training_bytes(name: str, length: int, mask: str = "none") -> int:
    module, bound = prepared(name, mask, length)
    inputs = [tensor.requires_grad_() for tensor in draw(length)]
    return peak_bytes(lambda: torch.autograd.grad(module.attend(*inputs, bound).sum(), inputs))


def output_bytes(length: int) -> int:
    return HEADS * length * WIDTH * FLOAT


@pytest.mark.parametrize("mask", ["none", "causal"])
@pytest.mark.parametrize("length", [256, 1024])
@pytest.mark.parametrize("name", ["fused", "einsum", "bmm"])
def test_scores_weights_and_output_of_all_heads_are_alive_together(name: str, length: int, mask: str) -> None:
    assert inference_bytes(name, length, mask) == 2 * HEADS * length**2 * FLOAT + output_bytes(length)


def test_the_textbook_form_at_length_1024_takes_66_mib() -> None:
    assert inference_bytes("fused", 1024) == 69_206_016


@pytest.mark.parametrize("length", [256, 1024])
def test_a_list_of_heads_holds_scores_and_weights_of_one_head_and_all_outputs(length: int) -> None:
    assert inference_bytes("module_list", length) == 2 * length**2 * FLOAT + output_bytes(length)


@pytest.mark.parametrize("mask", ["none", "causal", "sliding_window(64)", "causal+softcap(20)+alibi"])
@pytest.mark.parametrize("bytes_of", [inference_bytes, training_bytes])
def test_tiles_grow_with_the_length_and_not_its_square(bytes_of: Callable[..., int], mask: str) -> None:
    short, middle, long = (bytes_of("chunked", length, mask) for length in (512, 1024, 2048))
    assert long - middle == 2 * (middle - short)


def test_tiles_add_to_the_output_no_more_than_the_scaled_query_and_a_number_for_each_row() -> None:
    growth = inference_bytes("chunked", 2048) - inference_bytes("chunked", 1024)
    assert growth == 2 * output_bytes(1024) + HEADS * 1024 * FLOAT


def test_training_by_tiles_takes_a_fraction_of_the_textbook_form() -> None:
    assert training_bytes("chunked", 1024) < training_bytes("fused", 1024) / 3
