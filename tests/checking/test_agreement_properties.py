"""Laws of the check at any shape, mask, dtype, scope and direction: right code is never rejected, wrong code is."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnbench.case import bind, generator, reason_against
from attnbench.checking import oracle
from attnbench.checking.agreement import check
from attnbench.checking.memory import LAYOUTS
from attnbench.checking.probes import PROBES, TILE_LENS, VacuousError
from attnbench.checking.reference import References, reference_for_probe
from attnbench.checking.steps import Mistake
from attnbench.contract import Implementation
from attnbench.contract.loading import implementation
from attnbench.workloads.workload import BIASES, DIRECTIONS, DTYPES, Workload
from studies.detection.planted import implementation as mistaken

TEXTBOOK = Mistake(name="none", step="scores", words="all is well", changes={})
HONEST = {"textbook": mistaken(TEXTBOOK)}
HONEST |= {name: implementation(name) for name in ("fused", "chunked", "sdpa")}
NOTHING_TO_CHECK = "constant|overflows|alike"
GARBAGE: dict[str, Callable[[Tensor], Tensor]] = {
    "random": lambda right: torch.randn(right.shape, generator=generator(7)).to(right.dtype),
    "random each time": torch.randn_like,
    "NaN": lambda right: torch.full_like(right, torch.nan),
    "infinite": lambda right: torch.full_like(right, -torch.inf),
    "zero": torch.zeros_like,
    "constant": lambda right: torch.full_like(right, 0.75),
    "partly NaN": lambda right: right.masked_fill(
        torch.arange(right.shape[2])[:, None] == right.shape[2] // 2, torch.nan
    ),
    "huge": lambda right: torch.full_like(right, torch.finfo(right.dtype).max),
}


def profile(max_examples):
    return settings(deadline=None, max_examples=max_examples, derandomize=True, database=None)


@st.composite
def masks(draw, batch_size, query_len, key_len):
    """Draw boolean masks of every kind that fits."""
    lengths = st.lists(st.integers(0, key_len), min_size=batch_size, max_size=batch_size)
    forms = [
        st.sampled_from(["none", "causal", "causal_bottom_right", "padding", "padding_to_nothing"]),
        st.integers(1, key_len + 2).map("sliding_window({})".format),
        st.integers(0, key_len + 2).map("prefix({})".format),
        lengths.map(lambda each: f"padding({','.join(map(str, each))})"),
    ]
    if query_len == key_len:
        first = st.integers(0, query_len)
        forms += [st.just("document"), first.map(lambda length: f"document({length},{query_len - length})")]
    return draw(st.one_of(forms))


@st.composite
def points(draw, **fixed):
    query_len, batch_size, groups = draw(st.integers(1, 40)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
    key_len = draw(st.one_of(st.just(query_len), st.integers(1, 40)))
    axes = {
        "batch_size": batch_size,
        "seq_len": query_len,
        "kv_len": key_len,
        "num_heads": groups * draw(st.integers(1, 3)),
        "num_kv_heads": groups,
        "head_dim": draw(st.sampled_from([1, 2, 5, 8, 16])),
        "value_dim": draw(st.sampled_from([0, 1, 6])),
        "mask": draw(masks(batch_size, query_len, key_len)),
        "dtype": draw(st.sampled_from(DTYPES)),
        "scope": draw(st.sampled_from(["attention", "module"])),
        "direction": draw(st.sampled_from(DIRECTIONS)),
        "bias": draw(st.sampled_from(BIASES)),
        "seed": draw(st.integers(0, 1000)),
    }
    return Workload(**(axes | fixed))


def references(point: Workload) -> References:
    """Return the references of a workload that has something to check."""
    try:
        return References(point, 0)
    except ValueError as reported:
        assume(re.search(NOTHING_TO_CHECK, str(reported)) is None)
        raise


def changed(honest: Implementation, change: Callable[..., Tensor]) -> Implementation:
    """Copy an implementation, with its `attend` as a function passed through `change`."""

    def build(weights):
        module = honest.build(weights)
        right = module.attend
        module.attend = lambda *operands: change(right, *operands)
        return module

    return Implementation(build=build, source="a test", unsupported=honest.unsupported)


def laid_out(layout: str) -> Callable[..., Tensor]:
    """Lay out the tensors differently in memory."""
    return lambda right, query, key, value, mask: right(
        *(LAYOUTS[layout](each, 1) for each in (query, key, value)), mask
    )


@pytest.mark.long
@profile(60)
@given(point=points(), layout=st.sampled_from([None, *LAYOUTS]))
def test_an_honest_form_is_never_rejected(point, layout):
    judge = references(point)
    taken = {name: form for name, form in HONEST.items() if reason_against(form, point) is None}
    assert taken
    for name, form in taken.items():
        found = check(judge, form if layout is None else changed(form, laid_out(layout)))
        assert found.agrees, f"{name}: {found.diagnosis}"
        assert found.diagnosis == ""


@pytest.mark.long
@profile(60)
@given(point=points(), seed=st.integers(0, 100))
def test_every_probe_is_vacuous_or_has_finite_inputs_and_a_finite_reference(point, seed):
    for probe in PROBES:
        try:
            reference = reference_for_probe(point, probe, seed)
        except VacuousError:  # other errors, such as a reference that is not finite, must not occur
            continue
        for name, right in reference.expected.items():
            assert right.isfinite().all(), name
            assert reference.tolerances[name].is_finite
            assert bool((reference.tolerances[name].limit.peak > 0).all())
        for tensor in [*reference.inputs.tensors.values(), *reference.inputs.weights.tensors().values()]:
            assert tensor.isfinite().all()


@profile(200)
@given(point=points(), data=st.data())
def test_rule_oracle_and_bound_mask_see_the_same_keys(point, data):
    chosen = data.draw(st.lists(st.integers(0, point.seq_len - 1), min_size=1, unique=True).map(sorted))
    rows, sizes = torch.tensor(chosen), (point.batch_size, point.seq_len, point.kv_len)
    dense = torch.from_numpy(point.mask_rule.dense(*sizes).copy())[:, rows]
    bound = bind(point)
    assert torch.equal(oracle.row_mask(point, rows).seen[:, 0], dense)
    visible = torch.ones(1, 1, 1, 1, dtype=torch.bool) if bound.visible is None else bound.visible
    assert torch.equal(visible.expand(sizes[0], 1, *sizes[1:])[:, 0, rows], dense)
    everyone = torch.from_numpy(point.mask_rule.dense(*sizes).copy())
    assert int(everyone.sum()) == point.mask_rule.num_visible(*sizes)
    assert bool((~everyone.any(dim=-1)).any()) == point.mask_rule.has_empty_rows(*sizes)


@profile(100)
@given(
    query_len=st.integers(1, 40_000),
    key_len=st.integers(1, 40_000),
    num_heads=st.integers(1, 8),
    seed=st.integers(0, 1000),
)
def test_checked_rows_hold_the_first_the_last_and_one_of_each_tile(query_len, key_len, num_heads, seed):
    point = Workload(seq_len=query_len, kv_len=key_len, num_heads=num_heads)
    rows = oracle.checked_rows(point, generator(seed)).tolist()
    assert rows == sorted(set(rows))
    assert (rows[0], rows[-1]) == (0, query_len - 1)
    if num_heads * query_len * key_len <= oracle.FULL_CHECK_PAIRS:
        assert len(rows) == query_len
    tile = max(oracle.SMALLEST_TILE, -(-query_len // oracle.MOST_TILES))
    assert {row // tile for row in rows} == set(range(-(-query_len // tile)))
    edges = {edge for length in TILE_LENS for edge in (length - 1, length) if edge < query_len}
    assert edges <= set(rows)


PLACE = re.compile(r"(output|gradient of \w+(?: weights)?) is wrong on (\w+) inputs: at \[([\d, ]+)\] it is ")


@pytest.mark.long
@profile(10)
@given(point=points(), kind=st.sampled_from(sorted(GARBAGE)), form=st.sampled_from(["fused", "sdpa"]))
def test_garbage_is_rejected_with_its_tensor_its_place_and_the_probes(point, kind, form):
    def spoil(right, query, key, value, mask):
        made = right(query, key, value, mask)
        return made * 0 + GARBAGE[kind](made.detach())  # still in the graph, so that it has gradients

    judge = references(point)
    found = check(judge, changed(HONEST[form], spoil))
    assert not found.agrees
    place = PLACE.search(found.diagnosis)
    assert place is not None, found.diagnosis
    probe = judge.by_probe[place[2]]
    shape = list(probe.expected[place[1]].shape)
    if place[1] == "output":
        shape[-2] = point.seq_len
    index = [int(part) for part in place[3].split(",")]
    assert len(index) == len(shape)
    assert all(part < size for part, size in zip(index, shape, strict=True))
    finders = found.diagnosis.rpartition("; found by: ")[2]
    assert all(name in finders for name in judge.by_probe)
    is_random = "dropout_in_evaluation" in found.mistakes  # a question, not an assertion
    assert "It looks as if" in found.diagnosis or is_random or not found.mistakes
