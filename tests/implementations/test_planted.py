"""The check finds mistakes planted in copies of our implementations, and describes them as the catalogue does."""

import importlib.util
from pathlib import Path

import pytest
import torch

from attnbench.checking.agreement import check
from attnbench.checking.mistakes import catalogue
from attnbench.contract.loading import from_module
from attnbench.workloads.workload import Workload
from tests.checks import references

ROOT = Path(__file__).parents[2]
BOTH = {"direction": "forward_backward"}
MODULE = {"scope": "module", "num_heads": 3}
TILES = {"seq_len": 16}
BY_TILES = ("TILE = 256", "TILE = 8")
"""Not a mistake: `chunked` with tiles small enough that a short length has several."""

HIDING = "scores = scores.where(mask, -torch.inf)"
SOFTMAX = "scores.softmax(dim=-1)"
CAPPED = "softcap * (scores / softcap).tanh()"
BY_HEAD = "unflatten(-1, (self.num_heads, -1)).transpose(1, 2)"
ALL_TILES = "for first in range(0, key.shape[2], TILE):\n        keys"
MASKED = "attn_mask=mask"


def edit(file, changed, name, axes=None, reported=""):
    """Change a file's text; the name and words of the mistake, and a workload that shows it."""
    sizes = {"seq_len": 11, "num_heads": 2, "head_dim": 8, "direction": "inference"}
    point = Workload(**(sizes | (axes or {})))
    return pytest.param(file, changed, point, name, reported, id=f"{file}-{name or 'unknown'}")


EDITS = [
    edit(
        "naive_loop",
        {"view(batch_size, num_heads, query_len, -1)": "view(batch_size, query_len, num_heads, -1).transpose(1, 2)"},
        "merged_without_transpose",
        MODULE,
    ),
    edit(
        "module_list",
        {"query(x), key(x), value(x)": "query(x), value(x), key(x)"},
        "projections_in_wrong_order",
        MODULE,
        "query, value and key",
    ),
    edit("fused", {HIDING: "scores = scores * mask"}, "mask_multiplied", {"mask": "causal"}),
    edit(
        "fused",
        {
            f"{name}.{BY_HEAD}": f"{name}.reshape(len(x), self.num_heads, -1, {name}.shape[-1] // self.num_heads)"
            for name in ("query", "key", "value")
        },
        "viewed_not_transposed",
        MODULE,
    ),
    edit("fused", {"self.qkv(x)": "F.linear(x, self.qkv.weight)"}, "no_input_biases", MODULE | BOTH),
    edit("einsum", {SOFTMAX: "scores.relu()"}, "", {}, "No known mistake explains it. Its weights, seen from outside"),
    edit(
        "einsum",
        {f"scores = {CAPPED}": "pass", SOFTMAX: f"(scores if softcap is None else {CAPPED}).softmax(dim=-1)"},
        "softcap_after_mask",
        {"mask": "causal+softcap(3)"},
    ),
    edit(
        "bmm",
        {"torch.bmm(query, key.transpose(1, 2))": "torch.bmm(key, query.transpose(1, 2))"},
        "query_key_swapped",
        {"mask": "causal"},
    ),
    edit("chunked", {"total * rescale + weights": "total + weights"}, "sum_not_rescaled", TILES, "tiles of 8 keys"),
    edit(
        "chunked",
        {ALL_TILES: ALL_TILES.replace("[2],", "[2] - TILE + 1,")},
        "last_partial_tile_dropped",
        {"seq_len": 19},
        "the 3 keys 16 to 18",
    ),
    edit(
        "sdpa",
        {"attn_mask=mask": "attn_mask=None", "is_causal=is_causal": "is_causal=is_causal or mask is not None"},
        "top_left_for_bottom_right",
        {"mask": "causal_bottom_right", "kv_len": 15},
    ),
    edit("sdpa_math", {MASKED: "attn_mask=mask.flip(1)"}, "bias_head_order", {"mask": "causal+alibi"}),
    edit("sdpa_flash", {MASKED: "attn_mask=mask[:1]"}, "first_rows_mask_for_all", {"mask": "padding", "batch_size": 2}),
    edit(
        "torch_mha",
        {'out="out_proj")': 'out="out_proj", per_head=True)'},
        "packed_read_in_thirds",
        MODULE | {"bias": "out", "num_heads": 2},
    ),
    edit(
        "torch_mha",
        {'mask.hidden_as("ts"': '~mask.hidden_as("ts"'},
        "mask_inverted",
        MODULE | {"mask": "sliding_window(3)"},
    ),
]
RIGHT = sorted({(each.values[0], each.values[2]) for each in EDITS}, key=str)


def copied(folder, file, changed):
    text = (ROOT / "implementations" / f"{file}.py").read_text(encoding="utf-8")
    for old, new in ([BY_TILES] if file == "chunked" else []) + list(changed.items()):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    copy = folder / f"copy_of_{file}.py"
    copy.write_text(text, encoding="utf-8")
    return copy


def judged(copy, point):
    torch.manual_seed(0)
    spec = importlib.util.spec_from_file_location(copy.stem, copy)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = from_module(module, copy.stem.removeprefix("copy_of_"))
    assert found.unsupported(point) is None
    return check(references(point), found)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("file", "changed", "point", "name", "reported"), EDITS)
def test_a_planted_mistake_is_found_and_reported(file, changed, point, name, reported, tmp_path):
    found = judged(copied(tmp_path, file, changed), point)
    assert not found.agrees
    assert set(found.mistakes) == ({name} if name else set()), found.diagnosis
    assert reported in found.diagnosis
    # the catalogue's description up to the colon; the effect after it may be given in numbers
    known = [each.words.partition(":")[0] for each in catalogue(point) if each.name == name]
    assert not known or any(words in found.diagnosis for words in known), found.diagnosis


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("file", "point"), RIGHT, ids=[f"{file}-{point.id}" for file, point in RIGHT])
def test_the_copy_as_it_is_agrees(file, point, tmp_path):
    assert judged(copied(tmp_path, file, {}), point).agrees
