"""The table of docs/adapters.md: each row is judged right, and a mistake planted in its code is found and named."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from attnbench.case import draw_weights, reason_against
from attnbench.checking.agreement import check
from attnbench.contract import Implementation, adapters, loading
from attnbench.processes.planning import apply_axes
from attnbench.storage.records import Agreement
from attnbench.workloads.workload import Workload
from examples import adapters as theirs
from tests.checks import references

PAGE = Path(__file__).parents[2] / "docs" / "adapters.md"
ROWS = dict(re.findall(r"^\| (.+?) \| `(\w+|adapt\(.+\))` \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
SMALL = Workload(batch_size=2, seq_len=12, num_heads=4, head_dim=8, direction="forward_backward")


def of_row(code: str) -> Implementation:
    names = vars(theirs) | {name: getattr(adapters, name) for name in adapters.__all__}
    return loading.from_value(eval(code, names), "row")  # noqa: S307 - our own page


def tried(made: Implementation) -> Iterator[Agreement]:
    """Check one kind of input at the first cases that the row supports, cross-attention included."""
    axes = [{"mask": mask} for mask in ("causal", "padding", "none")]
    axes += [{"num_kv_heads": 2}, *({"kv_len": 17, "mask": mask} for mask in ("none", "causal_bottom_right", "causal"))]
    changed = [SMALL.with_axes(each) for each in axes]
    supported = [each for each in apply_axes(changed, made.built_in()) if reason_against(made, each) is None]
    assert supported
    for workload in (supported[0], supported[-1])[: len(supported)]:
        yield check(references(workload, is_brief=True), made)


def over_queries(q, k, v, mask=None, is_causal=False, scale=None):
    """Attention whose softmax runs over the queries."""
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.where(mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(dim=-2) @ v


def test_the_page_is_short_and_has_its_rows():
    words = [word for word in PAGE.read_text(encoding="utf-8").split() if any(map(str.isalnum, word))]
    assert len(words) <= 900  # bars of tables are not words
    assert len(ROWS) >= 21  # one for each kind of code that people brought


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ROWS)
def test_a_row_is_right_as_it_stands_and_a_planted_mistake_is_named(kind, monkeypatch):
    made = of_row(ROWS[kind])
    if made.is_approximate:
        assert not all(agreed.agrees for agreed in tried(made))
        return
    for agreed in tried(made):
        assert agreed.agrees, agreed.diagnosis
    monkeypatch.setattr(theirs, "attend", over_queries)
    wrong = [*tried(of_row(ROWS[kind]))]
    assert not any(agreed.agrees for agreed in wrong)
    assert any("softmax_over_queries" in agreed.mistakes for agreed in wrong)


UNDECLARED = {
    "columns paired otherwise": ('adapt(rotary, rotary="interleaved(10000)")', 'rotary="halves(10000)"'),
    "another base": ('adapt(rotary, rotary="halves(500000)")', 'rotary="halves(10000)"'),
    "no rotation": ("rotary", 'rotary="halves(10000)"'),
    "a window wider by one": ('adapt(windowed, masks=("sliding_window(10)",))', "the mask is sliding_window(9)"),
    "the other alignment": ("at_the_end", 'masks=("none", "causal_bottom_right")'),
    "no scale": ("unscaled", "scale=1.0"),
    "tokens taken for heads": ('adapt(lambda q, k, v: flash(q, k, v, False), sizes={"kv_len": 0})', 'layout="bthk"'),
    "a causal function": ("causal_only", 'masks=("causal",)'),
    "a causal module": (
        'adapt(lambda s: GPT(s.embed_dim, s.num_heads), packed("qkv", out="proj"))',
        'masks=("causal",)',
    ),
    "a mask of numbers": ("additive", "mask.added(q.dtype)"),
    "a mask whose True hides": ("hides_true", "mask.hidden"),
}
"""Code without its declaration, or with another, and the words that say what to write."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", UNDECLARED)
def test_what_is_not_declared_is_found_with_the_line_to_write(kind):
    code, line = UNDECLARED[kind]
    wrong = [agreed for agreed in tried(of_row(code)) if not agreed.agrees]
    assert any(line in agreed.diagnosis for agreed in wrong), [agreed.diagnosis for agreed in wrong]


def test_a_parameter_of_another_value_is_found():
    code = 'adapt(lambda s: Gained(s.embed_dim, s.num_heads), packed("qkv", out="proj"), extra={"gain": 2.0})'
    assert not all(agreed.agrees for agreed in tried(of_row(code)))


@pytest.mark.parametrize("name", ["rows", "gqa", "causal", "scaled"])
def test_the_function_of_torch_itself_is_taken(name):
    sdpa = torch.nn.functional.scaled_dot_product_attention
    bound = {"rows": {}, "gqa": {"enable_gqa": True}, "causal": {"is_causal": True}, "scaled": {"scale": 0.5}}[name]
    made = loading.from_value(functools.partial(sdpa, **bound) if bound else sdpa, "sdpa")
    for agreed in tried(made):
        assert agreed.agrees, agreed.diagnosis


def test_a_bias_that_is_none_is_not_blamed_on_the_mask():
    class WithoutBias(theirs.Packed):
        def forward(self, x, mask=None):
            return super().forward(x, mask) + self.missing.view(-1)

        missing = None

    made = adapters.adapt(lambda s: WithoutBias(s.embed_dim, s.num_heads), adapters.packed("qkv", out="proj"))
    with pytest.raises(AttributeError, match="view"):
        list(tried(made))


def test_what_is_drawn_when_a_module_is_made_is_the_same_each_time():
    class Gated(theirs.Packed):
        def __init__(self, dim, num_heads):
            super().__init__(dim, num_heads)
            self.register_buffer("gate", torch.rand(dim))

        def forward(self, x):
            return super().forward(x) + self.gate

    made = adapters.adapt(lambda s: Gated(s.embed_dim, s.num_heads), adapters.packed("qkv", out="proj"))
    state = torch.random.get_rng_state()
    one, other = (made.build(draw_weights(Workload(scope="module", num_heads=2, head_dim=4))) for _ in range(2))
    assert one.module.gate.equal(other.module.gate)
    assert torch.random.get_rng_state().equal(state)
    assert made.built_in() == {"scope": "module", "bias": "all", "kv_len": 0, "mask": "none|"}
