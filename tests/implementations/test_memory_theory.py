"""Each implementation's peak memory, derived from the tensors alive together, compared with the measured one.

B=1, T=S, G=H, no mask, float32 (4 bytes). Letters are bytes: SCORES is one (B, H, T, S), OUTPUT one (B, H, T, V), ROWS
(B, H, T), a number for each row. A Python number in a product becomes a double of 8 bytes.
"""

import pytest
import torch

from attnbench.case import bind, build, draw_normal, place
from attnbench.devices.recording import Footprint
from attnbench.workloads.workload import Workload
from tests.checks import bundled

IMPLEMENTATIONS = bundled()
HEADS, WIDTH, FLOAT, DOUBLE = 8, 64, 4, 8
LENGTH = 1024
SCORES, OUTPUT, ROWS = HEADS * LENGTH**2 * FLOAT, HEADS * LENGTH * WIDTH * FLOAT, HEADS * LENGTH * FLOAT
TILE = 256
TILE_SCORES, TILE_OUTPUT, TILE_ROWS = HEADS * TILE**2 * FLOAT, HEADS * TILE * WIDTH * FLOAT, HEADS * TILE * FLOAT
# tiles of torch's kernel on the CPU from 768 queries on: each thread has a scratch
FLASH_ROWS, FLASH_KEYS = 256, 512
FLASH_SCRATCH = (FLASH_ROWS * FLASH_KEYS + 2 * FLASH_ROWS + FLASH_ROWS * WIDTH) * FLOAT

# scores and weights of all heads with the output; scores divided and not yet freed are the same two
TEXTBOOK = 2 * SCORES + OUTPUT
# the output, a logsumexp for each row, and a tile of each thread (see `peak`): nothing grows with T * S
FLASH = OUTPUT + ROWS
OF_FLASH = {"sdpa", "sdpa_flash", "sdpa_bias", "sdpa_mask"}
# (part of) the output, with the scaled query of a tile; scores, and the weights of the tile before; its
# output and six columns of row sums; the state of the random generator, from which the tile can be made again
RNG = torch.get_rng_state().numel()
CHUNKED = OUTPUT + 2 * TILE_SCORES + TILE_OUTPUT + 6 * TILE_ROWS + RNG
MASK = LENGTH**2 * FLOAT  # a boolean mask, which torch's kernel converts to numbers
INFERENCE = {
    "fused": TEXTBOOK,
    "einsum": TEXTBOOK,
    "bmm": TEXTBOOK,
    # scores and weights of one head, the outputs of all
    "module_list": 2 * SCORES // HEADS + OUTPUT,
    # outputs of all tokens, and once more stacked
    "naive_loop": 2 * OUTPUT,
    # scores, weights, and whether each is -inf as booleans, for each and for each row; the scaled key; a zero
    "sdpa_math": 2 * SCORES + SCORES // FLOAT + ROWS // FLOAT + OUTPUT + FLOAT,
    "sdpa": FLASH,
    "sdpa_flash": FLASH,
    "sdpa_bias": FLASH,  # under its causal mask
    "sdpa_mask": FLASH + MASK,
    "chunked": CHUNKED,
    # as torch_mha; the weights' mean over the heads, and the output
    "torch_mha_weights": SCORES + 3 * OUTPUT + MASK + OUTPUT,
    # scores become weights in place; query, key and value stacked and split by heads
    "torch_mha": SCORES + 3 * OUTPUT,
}
FORWARD = {
    **INFERENCE,
    "fused": TEXTBOOK + DOUBLE,  # the root of K, kept for the backward pass
    "einsum": TEXTBOOK + DOUBLE,
    "bmm": TEXTBOOK + DOUBLE,
    # the weights of all heads, and the last head's scores
    "module_list": SCORES + SCORES // HEADS + OUTPUT + HEADS * DOUBLE,
    "sdpa_math": INFERENCE["sdpa_math"] + OUTPUT,  # the scaled query is kept too
    "chunked": CHUNKED + 3 * (TILE_OUTPUT + RNG) + 4 * DOUBLE,  # the scaled queries of all tiles
    # scores and weights; query, key, value and the scaled query
    "torch_mha_weights": 2 * SCORES + 4 * OUTPUT + DOUBLE,
    # query, key and value, and the same laid out by heads; then a flash kernel in the memory of one of them
    "torch_mha": 6 * OUTPUT,
}
SAVED = {
    "fused": SCORES + DOUBLE,  # the weights
    "einsum": SCORES + DOUBLE,
    "bmm": SCORES + DOUBLE,
    "module_list": SCORES + HEADS * DOUBLE,
    "sdpa_math": SCORES + 2 * OUTPUT,  # the weights, and query and key scaled by the root of the root of K
    "sdpa": ROWS,
    "sdpa_flash": ROWS,
    "sdpa_bias": ROWS,
    "sdpa_mask": ROWS + MASK,
    "torch_mha_weights": SCORES + 5 * OUTPUT + DOUBLE,  # with the input of the last projection
    "chunked": OUTPUT + 4 * (RNG + DOUBLE),  # the scaled query
}


def read(name: str, direction: str, **axes: object) -> tuple[Footprint, Footprint]:
    scope = "module" if name.startswith("torch_mha") else "attention"
    mask = "causal" if name == "sdpa_bias" else "none"
    sizes = {"seq_len": LENGTH, "num_heads": HEADS, "mask": mask}
    found = Workload(**{**sizes, "direction": direction, "scope": scope, **axes})
    case = build(found, IMPLEMENTATIONS[name], place(draw_normal(found, 0), found), bind(found))
    return case.footprint, case.forward_footprint


def peak(theory: dict[str, int], name: str) -> int:
    """The peak by theory, with the scratch of each thread."""
    return theory[name] + (name in OF_FLASH) * torch.get_num_threads() * FLASH_SCRATCH


def test_theories_are_of_implementations_that_are_there():
    assert set(INFERENCE) == set(FORWARD) <= set(IMPLEMENTATIONS)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(set(INFERENCE) - {"naive_loop"}))
def test_the_peak_of_inference_is_what_theory_says(name):
    found, _ = read(name, "inference")
    assert found.peak_bytes == peak(INFERENCE, name)
    assert found.kept_bytes == found.result_bytes == OUTPUT


def test_the_peak_of_the_loops_is_what_theory_says_at_a_sixteenth_of_the_length():  # to save time: it is linear
    found, _ = read("naive_loop", "inference", seq_len=LENGTH // 16)
    assert found.peak_bytes == INFERENCE["naive_loop"] // 16


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", sorted(set(FORWARD) - {"naive_loop"}))  # which saves a score row for each token
def test_the_peak_of_a_forward_call_and_what_it_saves_are_what_theory_says(name):
    found, _ = read(name, "forward")
    assert found.peak_bytes == peak(FORWARD, name)
    assert found.result_bytes == OUTPUT
    if name in SAVED:
        assert found.kept_bytes - OUTPUT == SAVED[name]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_tiles_grow_with_the_length_and_not_its_square(mask):
    lengths = (512, 1024, 2048)
    short, middle, long = (
        read("chunked", "inference", seq_len=length, mask=mask, num_heads=2)[0].peak_bytes for length in lengths
    )
    assert long - middle == 2 * (middle - short)
    short, long = (
        read("chunked", "forward_backward", seq_len=length, mask=mask, num_heads=2)[0].peak_bytes
        for length in lengths[1:]
    )
    assert long < 3 * short  # the textbook form takes four times as much


def test_training_by_tiles_takes_a_fraction_of_the_textbook_form():
    tiles, textbook = (read(name, "forward_backward", num_heads=2)[0].peak_bytes for name in ("chunked", "fused"))
    assert tiles < textbook / 3
