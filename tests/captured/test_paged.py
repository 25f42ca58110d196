"""`attnbench check --replay FILE` judges a call on pages, and bad input is one line with the field and the way out."""

import re

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from attnbench.captured import replay
from attnbench.cli import app
from attnbench.plugins import PAGED
from attnbench.storage.records import CheckVerdict
from attnbench.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("forked_workers")

LENGTHS, NEWS, PAGES, SIZE = (40, 33, 0, 7), (5, 1, 0, 7), 12, 16
CODE = """
from attnbench.implementations.paged_gather import attention as right


def honest(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size, softmax_scale):
    more = {"window_size": window_size, "softmax_scale": softmax_scale}
    return right(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, **more)


def whole(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size, softmax_scale):
    return honest(query, key_cache, value_cache, block_table, (seq_lens + 15) // 16 * 16, cu_seqlens_q, window_size,
                  softmax_scale)


def unscaled(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size, softmax_scale):
    return honest(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size, None)


def writing(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size, softmax_scale):
    output = honest(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, window_size, softmax_scale)
    key_cache.fill_(0)
    return output


def decodes(query, key_cache, value_cache, block_table, seq_lens, window_size, softmax_scale): ...


def dense(query, key, value, *, mask=None, scale=None):
    scores = query @ key.transpose(-2, -1) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def unmasked(query, key, value, *, mask=None, scale=None):
    return dense(query, key, value, scale=scale)
"""


def capture(**changes):
    """A captured call on pages, by the first names; unused slots, pages and table entries hold what nobody may read."""
    draws = torch.Generator().manual_seed(1)
    order, table, first = torch.randperm(PAGES, generator=draws), torch.full((4, 5), -1, dtype=torch.int32), 0
    pools = [torch.full((PAGES, SIZE, 2, width), torch.nan) for width in (16, 24)]
    for row, length in enumerate(LENGTHS):
        count = -(-length // SIZE)
        pages = order[first : first + count]
        table[row, :count] = pages
        for pool in pools:
            for at in range(length):
                pool[pages[at // SIZE], at % SIZE] = torch.randn(2, pool.shape[-1], generator=draws)
        first += count
    saved = {
        "query": torch.randn(sum(NEWS), 4, 16, generator=draws),
        "key_cache": pools[0],
        "value_cache": pools[1],
        "block_table": table,
        "seqused_k": torch.tensor(LENGTHS, dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, *NEWS], dtype=torch.int32).cumsum(0, dtype=torch.int32),
        "softmax_scale": 0.3,
    }
    return {name: each for name, each in (saved | changes).items() if each is not None}


def stored(folder, saved):
    torch.save(saved, folder / "tensors.pt")
    (folder / "mine.py").write_text(CODE)
    return folder / "tensors.pt"


def grade(folder, file, spec) -> CheckVerdict:
    saved, answers = replay.load(file), folder / "answers.pt"
    replay.answer(spec, str(file), str(answers))
    return replay.judge(saved, replay.reference(saved), answers).grade


def at_own_places(saved) -> torch.Tensor:
    """The right answer (tokens, H, V), read slot by slot, request by request."""
    outputs, starts = [], saved["cu_seqlens_q"].tolist()
    for row, length in enumerate(LENGTHS):
        tokens = saved["query"][starts[row] : starts[row + 1]].double()
        slots = [(int(saved["block_table"][row, at // SIZE]), at % SIZE) for at in range(length)]
        if not len(tokens):
            continue
        key, value = (
            torch.stack([saved[pool][slot] for slot in slots]).double() for pool in ("key_cache", "value_cache")
        )
        key, value = (each.repeat_interleave(2, dim=1).transpose(0, 1) for each in (key, value))
        seen = torch.ones(len(tokens), length, dtype=torch.bool).tril(length - len(tokens))
        attended = F.scaled_dot_product_attention(tokens.transpose(0, 1), key, value, attn_mask=seen, scale=0.3)
        outputs.append(attended.transpose(0, 1))
    return torch.cat(outputs)


def test_the_right_answer_is_that_of_the_captured_pages():
    saved = capture()
    found = replay.reference(replay.gathered(saved)).expected["output"]
    torch.testing.assert_close(found[0].transpose(0, 1), at_own_places(saved))


def test_a_capture_has_the_axes_of_its_batch(tmp_path):
    axes = replay.settings(replay.load(stored(tmp_path, capture(window_size=(8, 0)))))
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "value_dim": 24, "scale": 0.3}
    expected = {"batch": "q5kv40_q1kv33_q0_q7", "page_size": 16, "mask": "sliding_window(9)"}
    assert Workload(**axes) == Workload(**sizes, **expected)


@pytest.mark.parametrize(
    ("name", "verdict"),
    [
        ("paged_gather", CheckVerdict.right),
        ("sdpa", CheckVerdict.right),
        ("honest", CheckVerdict.right),
        ("dense", CheckVerdict.right),
        ("whole", CheckVerdict.wrong),
        ("unscaled", CheckVerdict.wrong),
        ("writing", CheckVerdict.wrong),
        ("unmasked", CheckVerdict.wrong),
    ],
)
def test_a_function_is_judged_on_captured_pages(tmp_path, name, verdict):
    """Functions of pages get pools of the harness, and for dense ones the requests are gathered."""
    saved = capture()
    if name == "dense":  # it repeats no heads
        saved |= {each: saved[each].repeat_interleave(2, dim=2) for each in ("key_cache", "value_cache")}
    file = stored(tmp_path, saved)
    spec = name if name in {"paged_gather", "sdpa"} else f"{tmp_path / 'mine.py'}:{name}"
    assert grade(tmp_path, file, spec) is verdict


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_windows_and_dtypes_of_a_capture_are_kept(tmp_path, dtype):
    saved = capture(window_size=[8, 0], k_scale=torch.ones(()), softmax_scale=None)
    saved |= {name: saved[name].to(dtype) for name in ("query", "key_cache", "value_cache")}
    file = stored(tmp_path, saved)
    assert grade(tmp_path, file, f"{tmp_path / 'mine.py'}:honest") is CheckVerdict.right
    torch.save({**saved, "window_size": (9, 0)}, file)
    wider = replay.load(file)
    assert replay.judge(wider, replay.reference(wider), tmp_path / "answers.pt").grade is CheckVerdict.wrong


@pytest.mark.parametrize("place", range(max(map(len, PAGED.values()))))
def test_every_alias_of_an_entry_is_read_in_a_capture(place):
    known = {name: aliases[min(place, len(aliases) - 1)] for name, aliases in PAGED.items()}
    more = {"cu_seqlens_k": torch.zeros(5), "max_seqlen_q": 7, "max_seqlen_k": 40, "causal": True, "enable_gqa": True}
    more |= {"k_scale": 1.0, "v_scale": 1.0, "window_size": (-1, -1)}
    saved = capture(**more)
    assert {*saved} == {*PAGED}
    renamed = {known[name]: each for name, each in saved.items()}
    found, expected = replay.gathered(renamed), replay.gathered(capture())
    assert found.keys() == expected.keys()
    for name in ("query", "key", "value"):
        assert torch.equal(found[name], expected[name])
    assert (found["scale"], found["axes"]) == (expected["scale"], expected["axes"])


def test_decodes_need_no_bounds_of_queries(tmp_path):
    saved = capture(cu_seqlens_q=None, query=torch.ones(4, 4, 16), seqused_k=torch.tensor([40, 33, 1, 7]))
    saved["block_table"][2, 0] = saved["block_table"][0, 0]  # a page that two requests share
    assert replay.gathered(saved | {"causal": False})["axes"]["batch"] == "q1kv40_q1kv33_q1_q1kv7"


def table_with(row, column, page):
    table = capture()["block_table"].clone()
    table[row, column] = page
    return table


FLOAT8, SCALED = torch.float8_e4m3fn, "multiply 8-bit keys and values by their scales"
BAD = [
    ({"block_table": table_with(1, 2, 640)}, "block_table[1, 2] is 640, and key_cache has 12 pages", "from 0 to 11"),
    ({"block_table": table_with(0, 1, -1)}, "block_table[0, 1] is -1", "from 0 to 11"),
    (
        {"seqused_k": torch.tensor([40, 33, 81, 7])},
        "seqused_k[2] is 81, and block_table has 5 pages of 16",
        "at most 80",
    ),
    ({"seqused_k": torch.tensor([4, 33, 0, 7])}, "seqused_k[0] is 4, and request 0 has 5", "give 5 or more"),
    ({"seqused_k": torch.tensor([40, 33, -1, 7])}, "seqused_k[2] is -1", "give 0 or more"),
    ({"seqused_k": torch.tensor([40])}, "block_table is (4, 5) of int32, and seqused_k is (1,)", "for each request"),
    ({"seqused_k": torch.ones(4)}, "seqused_k is (4,) of float32", "give (N), whole numbers"),
    ({"seqused_k": None}, "seqused_k/cache_seqlens/seq_lens", "is missing next to block_table: give (N)"),
    ({"key_cache": None}, "key_cache/k_cache", "give (pages, page_size, G, K)"),
    ({"cu_seqlens_q": torch.tensor([0, 5, 6, 6, 12])}, "cu_seqlens_q ends at 12, and query has 13", "or cut the query"),
    ({"cu_seqlens_q": torch.tensor([0, 6, 5, 6, 13])}, "cu_seqlens_q[2] is 5", "begin with 0 and never fall"),
    ({"cu_seqlens_q": torch.tensor([1, 5, 6, 6, 13])}, "cu_seqlens_q[0] is 1", "begin with 0 and never fall"),
    ({"cu_seqlens_q": torch.tensor([0, 13])}, "cu_seqlens_q is (2,) of int64", "seqused_k is (4,)"),
    ({"cu_seqlens_q": None}, "query is (13, 4, 16) of float32, and seqused_k is (4,)", "give cu_seqlens_q (N + 1)"),
    ({"value_cache": torch.ones(12, 8, 2, 24)}, "value_cache is (12, 8, 2, 24)", "give the same pages, page_size and"),
    ({"value_cache": torch.ones(11, 16, 2, 24)}, "key_cache is (12, 16, 2, 16)", "give the same pages, page_size and"),
    (
        {"key_cache": torch.ones(12, 12, 2, 16), "value_cache": torch.ones(12, 12, 2, 24)},
        "key_cache is (12, 12, 2, 16)",
        "a page_size of a power of 2",
    ),
    ({"query": torch.ones(13, 3, 16)}, "query is (13, 3, 16) of float32, and key_cache is", "an H that G divides"),
    ({"query": torch.ones(13, 4, 8)}, "query is (13, 4, 8) of float32, and key_cache is", "give one K"),
    ({"query": torch.ones(1, 13, 4, 16)}, "query is (1, 13, 4, 16) of float32", "give (tokens, H, K)"),
    ({"query": torch.ones(0, 4, 16)}, "query is (0, 4, 16)", "give at least one token"),
    ({"query": 3}, "query is an int", "give (tokens, H, K)"),
    ({"key_cache": torch.ones(12, 16, 2, 16).to(FLOAT8)}, "key_cache is (12, 16, 2, 16) of float8_e4m3fn", SCALED),
    ({"value_cache": torch.ones(12, 16, 2, 24).half()}, "value_cache is (12, 16, 2, 24) of float16", SCALED),
    ({"v_scale": torch.tensor(0.5)}, "v_scale is not 1", SCALED),
    ({"softmax_scale": torch.ones(2, 2)}, "softmax_scale is tensor([[1., 1.], [1., 1.]])", "give a number above 0"),
    ({"softmax_scale": 0.0}, "softmax_scale is 0.0", "give a number above 0"),
    ({"window_size": 8}, "window_size is 8", "give two whole numbers (left, right)"),
    ({"causal": False}, "causal is False", "give True, or capture decodes"),
    ({"mask": torch.ones(3)}, "mask is no entry of a paged call", "leave it out"),
    ({"q": torch.ones(13, 4, 16)}, "q and query are two names of one entry", "leave one out"),
]


@pytest.mark.parametrize(("changes", "named", "way_out"), BAD)
def test_a_bad_capture_of_pages_is_one_line_with_the_way_out(tmp_path, changes, named, way_out):
    file = stored(tmp_path, capture(**changes))
    with pytest.raises(ValueError, match=r"^--replay [^\n]*$") as caught:
        replay.load(file)
    assert named in str(caught.value)
    assert way_out in str(caught.value)


def test_the_command_judges_a_capture_of_pages_and_refuses_a_bad_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = stored(tmp_path, capture())
    specs = ["mine.py:honest", "sdpa", "mine.py:whole", "mine.py:decodes"]
    done = CliRunner().invoke(app, ["check", *specs, "--replay", str(file), "--timeout", "600"])
    assert done.exit_code == 1
    for line in ("honest: right on 1 of 1 cell", "sdpa: right on 1 of 1 cell", "whole: WRONG on 1 of 1"):
        assert line in done.stdout
    assert re.search("decodes: error on .*\n.*some requests do not have one new token: name a parameter", done.stdout)
    torch.save(capture(block_table=table_with(1, 2, 640)), file)
    refused = CliRunner().invoke(app, ["check", "sdpa", "--replay", str(file)])
    assert "block_table[1, 2] is 640, and key_cache has 12 pages: give pages from 0 to 11" in str(refused.exception)


def test_a_function_of_pages_needs_a_capture_of_pages(tmp_path):
    file = stored(tmp_path, dict.fromkeys(("query", "key", "value"), torch.ones(1, 1, 2, 4)))
    with pytest.raises(ValueError, match="the function reads pages: give a capture with key_cache"):
        replay.answer("paged_gather", str(file), str(tmp_path / "answers.pt"))
