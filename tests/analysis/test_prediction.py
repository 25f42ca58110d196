"""Predictions against a virtual machine whose law is known: exact without noise, covered as promised with it."""

import random

import msgspec
import numpy as np
import pandas as pd
import pytest

from attnbench.analysis import calibration
from attnbench.analysis.calibration import shapes
from attnbench.analysis.prediction import COVERAGE, coordinates, fit, fitted, kind_of, quantile, tiled_pairs
from attnbench.workloads.counts import dense_flops, every_pair
from attnbench.workloads.workload import Workload
from studies.simulated import virtual

LIKE = Workload(num_threads=1, direction="inference")
NOISE = 0.03


def seconds(workload: Workload) -> float:
    """The law: a constant, and prices of tokens, pairs and multiply-adds."""
    pairs = workload.num_heads * every_pair(workload)
    tokens = workload.batch_size * workload.num_heads * (workload.seq_len + workload.kv_len) * workload.head_dim
    hidden = 2e-10 * pairs if workload.mask != "none" else 0.0
    return 2e-5 + 1e-9 * tokens + 5e-10 * pairs + 3e-11 * pairs * workload.head_dim + hidden


def peak(workload: Workload) -> float:
    """Of two moments, the one that holds more: two score matrices and the output, or one and three of its kind."""
    rows = 4 * workload.batch_size * workload.num_heads * workload.seq_len
    scores, output = rows * workload.kv_len, rows * workload.head_dim
    return max(2 * scores + output, scores + 3 * output)


def table(workloads: list[Workload], draws: np.random.Generator | None = None) -> pd.DataFrame:
    noise = np.ones(len(workloads)) if draws is None else np.exp(NOISE * draws.standard_normal(len(workloads)))
    return pd.DataFrame(
        [
            {
                **workload.axes(),
                "implementation": "virtual",
                "status": "ok",
                "latency_s": seconds(workload) * factor,
                "peak_memory_bytes": peak(workload),
            }
            for workload, factor in zip(workloads, noise, strict=True)
        ]
    )


def calibrated(number: int = 12) -> list[Workload]:
    masks = [Workload(num_threads=1, direction="inference", mask=mask) for mask in ("none", "causal")]
    return [each for place, like in enumerate(masks) for each in calibration.shapes(like, (), 5 * place, number)]


def drawn(number: int, seed: int = 0) -> list[Workload]:
    """Random workloads within the calibrated range."""
    draws = random.Random(seed)
    return [
        Workload(
            batch_size=draws.choice((1, 2, 4)), num_heads=draws.choice((1, 4, 8, 16)),
            seq_len=16 * draws.randint(5, 30),
            head_dim=draws.choice((32, 64, 128)), direction="inference", num_threads=1,
            mask=draws.choice(("none", "causal")),
        )
        for _ in range(number)
    ]  # fmt: skip


def test_a_law_without_noise_is_recovered():
    predictor = fit(table(calibrated()))
    for workload in drawn(100):
        found = predictor.predict(workload, "virtual")
        assert found is not None
        assert found.seconds == pytest.approx(seconds(workload), rel=0.02)


def test_memory_is_recovered_to_the_byte():
    predictor = fit(table(calibrated()))
    errors = []
    for workload in drawn(100):
        found = predictor.predict(workload, "virtual")
        assert found is not None
        assert found.peak_bytes is not None
        assert found.peak_low <= found.peak_bytes <= found.peak_high
        errors.append(abs(found.peak_bytes / peak(workload) - 1))
    assert np.mean(np.array(errors) < 1e-9) > 0.95


def flash_peak(workload: Workload) -> float:
    """As the profiler counted calls of PyTorch's kernel in half precision: see the cells below."""
    heads, queries, keys = workload.batch_size * workload.num_heads, workload.seq_len, workload.kv_len
    width = workload.head_dim
    height, tile = min(queries, 32 if queries < 192 else 64 if queries < 768 else 256), min(keys, 512)
    packed = 4 * heads * keys * width + 2 * tile * width if min(queries, keys) >= 64 else 0
    output = heads * queries * (2 * width + 4)
    return output + height * (4 * (tile + 2 + width) + 2 * tile) + packed


def test_the_scratch_of_a_kernel_is_counted():
    counted = {(2, 12, 224, 224, 128): 4326912, (1, 4, 704, 272, 64): 806400, (1, 4, 48, 880, 64): 132096}
    axes = {"dtype": "bfloat16", "direction": "inference", "num_threads": 1}
    names = ("batch_size", "num_heads", "seq_len", "kv_len", "head_dim")
    unseen = [Workload(**dict(zip(names, sizes, strict=True)), **axes) for sizes in counted]
    assert [flash_peak(workload) for workload in unseen] == list(counted.values())
    taught = [msgspec.structs.replace(each, dtype="bfloat16") for each in calibrated(8) if each.mask == "none"]
    cells = table(taught).assign(peak_memory_bytes=[flash_peak(workload) for workload in taught])
    predictor = fit(cells)
    for workload, peak_bytes in zip(unseen, counted.values(), strict=True):
        found = predictor.predict(workload, "virtual")
        assert found is not None
        assert found.peak_bytes == pytest.approx(peak_bytes, rel=1e-9)


def test_tiles_that_a_causal_mask_hides_are_not_computed():
    def tiled(**axes: str | int) -> int:
        return tiled_pairs(Workload(mask="causal", direction="inference", **axes))

    assert tiled(seq_len=400) == 400 * 400  # one tile of keys
    assert tiled(seq_len=640) == 512 * 512 + 128 * 640
    assert tiled(seq_len=32, kv_len=1024) == 32 * 512
    assert tiled_pairs(Workload(seq_len=640, direction="inference", mask="none")) == 640 * 640


def test_a_family_that_is_harder_to_predict_has_wider_intervals():
    draws = np.random.default_rng(0)
    steady, unsteady = table(calibrated(), draws), table(calibrated(), draws)
    unsteady["latency_s"] *= np.exp(0.2 * draws.standard_normal(len(unsteady)))
    predictor = fit(pd.concat([steady, unsteady.assign(implementation="unsteady")]))
    widths = []
    for name in ("virtual", "unsteady"):
        found = predictor.predict(LIKE, name)
        assert found is not None
        widths.append(np.log(found.high / found.low))
    assert widths[1] > 1.5 * widths[0]


def test_intervals_cover_what_they_promise():
    """Of three implementations on simulated machines, at shapes that are spread as the calibrated ones are."""

    def spread(first: int, number: int) -> list[Workload]:
        likes = [msgspec.structs.replace(LIKE, mask=mask) for mask in ("none", "causal")]
        starts = [first + calibration.APART * place for place in range(len(likes))]
        return [each for like, start in zip(likes, starts, strict=True) for each in shapes(like, (), start, number)]

    names, machines = ("one", "two", "three"), 3
    known, unseen, inside, widths = spread(calibration.FIRST, 12), spread(200, 25), [], []
    for seed in range(machines):
        draws = np.random.default_rng(seed)
        cells = pd.concat([table(known, draws).assign(implementation=name) for name in names])
        predictor = fit(cells.drop(columns="peak_memory_bytes"))
        for name in names:
            for workload, measured in zip(unseen, table(unseen, draws)["latency_s"], strict=True):
                found = predictor.predict(workload, name)
                assert found is not None
                assert 0 < found.low < found.seconds < found.high
                inside.append(found.low <= measured <= found.high)
                widths.append(found.high / found.low)
    # The quantile of n values leaves a share to chance that is spread as a Beta(0.9 n, 0.1 n); then come the unseen.
    num_known = len(known) * len(names)
    allowed = 3 * np.sqrt(COVERAGE * (1 - COVERAGE) * (1 / (num_known * machines) + 1 / len(inside)))
    assert np.mean(inside) == pytest.approx(COVERAGE, abs=allowed)
    assert np.median(widths) < 1 + 8 * NOISE


def test_beyond_the_calibrated_range_it_says_so_and_is_less_sure():
    predictor = fit(table(calibrated(), np.random.default_rng(1)))
    near = predictor.predict(Workload(seq_len=256, direction="inference", num_threads=1), "virtual")
    far = predictor.predict(Workload(seq_len=16384, direction="inference", num_threads=1), "virtual")
    assert near is not None
    assert far is not None
    assert not near.is_extrapolated
    assert far.is_extrapolated
    assert np.log(far.high / far.low) > 2 * np.log(near.high / near.low)


@pytest.mark.parametrize(
    "other", [{"dtype": "bfloat16"}, {"direction": "forward"}, {"num_threads": 2}, {"mask": "sliding_window(8)"}]
)
def test_what_was_not_calibrated_is_not_predicted(other: dict[str, str | int]):
    predictor = fit(table(calibrated()))
    axes = {"direction": "inference", "num_threads": 1} | other
    assert predictor.predict(Workload(**axes), "virtual") is None
    assert predictor.predict(LIKE, "somebody") is None


def test_cells_that_are_wrong_or_have_no_time_teach_nothing():
    cells = table(calibrated())
    wrong = cells.assign(status="disagrees", latency_s=1.0)
    untimed = cells.assign(latency_s=None)
    expected = fit(cells).predict(LIKE, "virtual")
    assert fit(pd.concat([cells, wrong, untimed])).predict(LIKE, "virtual") == expected
    with pytest.raises(ValueError, match="give it more time"):
        fit(wrong)


def test_a_disturbed_cell_counts_for_less():
    draws = np.random.default_rng(0)
    amounts = np.column_stack([np.ones(20), draws.uniform(1, 100, 20)])
    values = amounts @ np.array([2.0, 3.0])
    values[7] *= 3
    assert fitted(amounts, values) == pytest.approx([2.0, 3.0], rel=0.02)


@pytest.mark.parametrize("kind", range(5))
def test_any_first_few_shapes_are_spread_and_begin_with_a_small_one(kind):
    made = list(calibration.shapes(LIKE, (), calibration.FIRST + kind * calibration.APART, 30))
    places = np.array([coordinates(each) for each in made])
    first = places[:10]
    assert (np.ptp(first[:, :4], axis=0) > 0.5 * np.ptp(places[:, :4], axis=0)).all()
    assert len(np.unique(places, axis=0)) == len(places)
    assert dense_flops(made[0]) < 1.3 * np.quantile([dense_flops(each) for each in made], 0.3)
    assert 0.3 < np.mean([each.seq_len == each.kv_len for each in made]) < 0.7


def test_kinds_that_differ_in_the_mask_share_their_turns():
    kinds = [LIKE, msgspec.structs.replace(LIKE, mask="causal"), msgspec.structs.replace(LIKE, dtype="bfloat16")]
    base = virtual.plan(1, ("baseline",), budget_s=1.0)
    planned = calibration.planned(msgspec.structs.replace(base, workloads=tuple(kinds)), ("num_threads",))
    kinds_of = [(each.dtype, each.mask) for each in planned.workloads[:6]]
    half = ("bfloat16", "none")
    assert kinds_of == [("float32", "none"), half, ("float32", "causal"), half, ("float32", "none"), half]


def test_axes_that_were_set_stay():
    like = Workload(num_heads=6, head_dim=96, seq_len=1, kv_len=128)
    made = list(calibration.shapes(like, ("num_heads", "head_dim", "seq_len"), 0, 10))
    assert {(each.num_heads, each.head_dim, each.seq_len) for each in made} == {(6, 96, 1)}
    assert len({each.kv_len for each in made}) > 1


def test_the_quantile_is_that_of_conformal_prediction():
    assert quantile(np.arange(1.0, 20.0)) == 18.0  # of 19 values the 18th: 0.9 * 20
    assert quantile(np.array([3.0, 1.0])) == 3.0
    assert COVERAGE == 0.9


def test_the_kind_of_a_mask_has_no_numbers():
    assert kind_of("padding(3,4)+causal") == "padding+causal"
