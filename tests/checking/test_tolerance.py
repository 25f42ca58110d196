"""The one tolerance: by segment of rows, largest and RMS error, and the boundary of imprecise and wrong."""

import msgspec
import torch

from attnbench.checking.diagnosis import describe
from attnbench.checking.tolerance import IMPRECISE_FACTOR, LEAST_NUMBERS, Tolerance, by_row
from attnbench.storage.records import Agreement, CheckVerdict, ProbeResult, TensorError

ROWS, WIDTH = 256, 64
NOISE = 2.0**-8


def draws(seed):
    return torch.Generator().manual_seed(seed)


def answer():
    """Build rows whose size falls by a factor of ten from first to last, as under a causal mask."""
    sizes = torch.logspace(0, -1, ROWS, dtype=torch.float64)[:, None]
    return torch.randn(ROWS, WIDTH, generator=draws(0), dtype=torch.float64) * sizes


def noise(seed, factor=1.0):
    """Draw errors in proportion to the size of each row, independent of the answer's signs."""
    sizes = answer().square().mean(dim=1, keepdim=True).sqrt()
    return factor * NOISE * sizes * torch.randn(ROWS, WIDTH, generator=draws(seed), dtype=torch.float64)


def tolerance(name="output"):
    yardsticks = [by_row(noise(seed), -2) for seed in range(1, 5)]
    return Tolerance(name, answer(), yardsticks, axis=-2, dtype=torch.bfloat16)


def judged(error):
    return tolerance().judge(answer() + error)


def test_an_honest_error_is_less_than_half_of_what_is_allowed():
    found = judged(noise(9))
    assert found.grade is CheckVerdict.right
    assert found.ratio < 0.5


def late(factor):
    error = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    error[192:] = factor * answer()[192:]
    return error


def test_an_error_of_late_small_rows_shows_though_early_rows_may_have_a_larger_one():
    error = late(0.05)
    assert error.abs().max() < tolerance().of_rows[0]  # one limit for the whole tensor would let it pass
    found = judged(error + noise(9))
    assert found.grade is CheckVerdict.wrong
    assert found.rms / found.allowed_rms > 2
    assert found.rows[0] >= 192 - LEAST_NUMBERS // WIDTH


def test_noise_that_adds_up_is_imprecise_and_far_more_is_wrong():
    assert judged(noise(9, 6.0)).grade is CheckVerdict.imprecise
    assert judged(noise(9, 6.0 * IMPRECISE_FACTOR)).grade is CheckVerdict.wrong


def test_an_error_that_follows_the_answer_is_wrong_however_small():
    found = judged(0.05 * answer())
    assert 1 < found.ratio < IMPRECISE_FACTOR
    assert found.grade is CheckVerdict.wrong


def test_noise_in_a_few_rows_is_wrong_unless_slight_and_in_a_half_precision_gradient():
    """Honest softmax sums in half precision were called wrong in 5 % of their draws, by 1.05 to 2.1 times the limit."""
    far, slight, twice = noise(9, 0.5), noise(9, 0.5), noise(9, 0.5)
    far[64:80] *= 20
    slight[64:80] *= 10
    twice[64:96] *= 10
    found = judged(far)
    assert 1 < found.ratio < IMPRECISE_FACTOR
    assert found.grade is judged(slight).grade is CheckVerdict.wrong
    grades = [tolerance("gradient of key").judge(answer() + error).grade for error in (far, slight, twice)]
    assert grades == [CheckVerdict.wrong, CheckVerdict.imprecise, CheckVerdict.wrong]


def test_half_precision_may_follow_the_answer_in_part():
    """Merged weights whose sum is rounded make each row too large or too small, by a share of its own."""
    shares = 0.01 + 0.01 * torch.randn(ROWS, 1, generator=draws(7), dtype=torch.float64)
    partly, wholly = noise(9) + shares * answer(), noise(9) + 0.025 * answer()
    yardsticks = [by_row(noise(seed), -2) for seed in range(1, 5)]

    def grades(dtype):
        limits = Tolerance("output", answer(), yardsticks, axis=-2, dtype=dtype)
        found = [limits.judge(answer() + error) for error in (partly, wholly)]
        assert all(1 < each.ratio < IMPRECISE_FACTOR for each in found)
        return [each.grade for each in found]

    assert grades(torch.bfloat16) == [CheckVerdict.imprecise, CheckVerdict.wrong]
    assert grades(torch.float32) == [CheckVerdict.wrong, CheckVerdict.wrong]


def test_a_row_whose_terms_all_but_cancel_may_be_off_by_a_share_of_its_terms():
    sizes = torch.ones(ROWS, 1, dtype=torch.float64).index_fill(0, torch.arange(64, 80), 100.0)
    terms = by_row(answer() * sizes, -2)
    error = torch.zeros_like(answer())
    error[64:80] = 4e-6 * answer()[64:80]
    yardsticks, fixed = [by_row(1e-8 * answer(), -2)] * 4, {"axis": -2, "dtype": torch.float32, "num_roundings": 10.0}
    plain = Tolerance("gradient of key", answer(), yardsticks, **fixed)
    limits = Tolerance("gradient of key", answer(), yardsticks, **fixed, terms=terms)
    assert plain.judge(answer() + error).ratio > 1
    assert limits.judge(answer() + error).ratio < 0.1
    elsewhere = 4e-6 * answer() - error
    assert limits.judge(answer() + elsewhere).ratio > 1


def test_what_is_not_finite_is_wrong():
    error = noise(9)
    error[3, 4] = torch.nan
    found = judged(error)
    assert (found.error, found.ratio, found.grade) == (None, None, CheckVerdict.wrong)
    assert found.worst == (3, 4)


def test_a_parameter_has_its_first_axis_as_rows():
    right = torch.randn(4, 1024, generator=draws(0), dtype=torch.float64) * torch.tensor([[10.0], [1], [1], [1]])
    found = Tolerance("parameter", right, [by_row(torch.zeros_like(right), 0)], axis=0, dtype=torch.bfloat16)
    spoiled = right.clone()
    spoiled[3] *= 1.02
    assert found.judge(right).ratio == 0
    assert found.judge(spoiled).rows == (3, 4)
    assert found.judge(spoiled).grade is CheckVerdict.wrong


def test_a_number_is_its_own_row():
    right = torch.randn(5, generator=draws(0), dtype=torch.float64)
    found = Tolerance("gradient of sinks", right, [by_row(1e-7 * right, 0)], axis=0, dtype=torch.float32)
    assert found.judge(right * (1 + 1e-7)).grade is CheckVerdict.right
    assert found.judge(right * 1.01).worst == (int(right.abs().argmax()),)


def test_an_error_of_an_old_journal_is_judged_by_its_largest_number():
    old = {"tensor": "output", "error": 2.0, "allowed": 4.0, "yardstick_error": 1.0, "rounding_band": 1.0}
    old |= {"worst": [0], "expected": 1.0, "actual": 3.0}
    found = msgspec.convert(old, TensorError)
    assert (found.ratio, found.grade) == (0.5, CheckVerdict.right)
    assert msgspec.structs.replace(found, error=5.0).grade is CheckVerdict.wrong


def test_an_answer_is_as_right_as_its_worst_tensor():
    def agreement(*errors, **fields):
        return Agreement(probes=(ProbeResult(probe="normal", tensors=errors),), **fields)

    right, imprecise, wrong = (judged(error) for error in (noise(9), noise(9, 6.0), 0.1 * answer()))
    assert [agreement(right, each).grade for each in (right, imprecise, wrong)] == ["right", "imprecise", "WRONG"]
    assert agreement().grade is agreement(right, diagnosis="a fault").grade is CheckVerdict.wrong


def test_what_is_said_of_an_error_is_the_limit_that_it_exceeds():
    sizes = answer().square().mean(dim=1, keepdim=True).sqrt()
    found = judged(5.7 * NOISE * sizes * answer().sign())  # no number is far off, but all are biased
    assert found.error < 0.7 * found.allowed
    assert found.rms / found.allowed_rms > 1.5
    probes = (
        ProbeResult(probe="large", tensors=(judged(noise(9, 6.0)),)),
        ProbeResult(probe="normal", tensors=(found,)),
    )
    words = describe(Agreement(probes=probes))
    assert "wrong on normal inputs" in words  # and not imprecise on the others, by a larger factor
    assert "RMS" in words
    assert f"{found.allowed_rms:.3g}" in words


def test_terms_that_cancel_all_but_wholly_leave_finite_limits():
    expected = torch.full((8, 4), 1e-320, dtype=torch.float64)
    shown = [by_row(torch.zeros_like(expected), 0)]
    limits = Tolerance("gradient of query", expected, shown, axis=0, dtype=torch.float16, scale=1.0)
    assert 0 < limits.largest < 0.01


def test_a_lucky_needle_has_the_limit_that_other_needles_make_likely():
    """All numbers of a needle's row share one rounding, and four yardsticks may be lucky in it."""
    right = torch.full((32 * 64, 16), 1e-3, dtype=torch.float64)  # 32 segments of 64 rows
    error = torch.zeros_like(right)
    right[::64], error[::64] = 1.0, 0.05  # a needle in each
    lucky = error.index_fill(0, torch.tensor([0]), 1e-4)
    honest = [by_row(lucky, -2)] * 4
    limits = Tolerance("gradient of key", right, honest, axis=-2, dtype=torch.bfloat16)
    assert limits.judge(right + 0.4 * error).ratio < 0.5
    assert limits.judge(right + 10 * error).grade is CheckVerdict.wrong


def test_limits_grow_where_honest_forms_lose_the_digits_of_a_gradient():
    honest = [by_row(noise(seed, 64.0), -2) for seed in range(1, 5)]  # a quarter of each row
    output, logits, gradient = (
        Tolerance(name, answer(), honest, axis=-2, dtype=torch.bfloat16)
        for name in ("output", "logits", "gradient of key")
    )
    assert logits.largest == output.largest
    assert gradient.largest / output.largest > 2


def test_a_gradient_that_underflows_in_float64_has_finite_limits():
    """Under saturated weights it may be 1e-313: a share of it is no number."""
    right = torch.full((ROWS, WIDTH), 1e-313, dtype=torch.float64)
    right[: ROWS // 2] = 0.0
    yardsticks = [by_row(torch.full_like(right, 1e-2), -2)]
    limits = Tolerance("gradient of query", right, yardsticks, axis=-2, dtype=torch.float32, scale=20.0)
    assert limits.of_rows.isfinite().all()
    assert limits.judge(torch.zeros_like(right)).agrees
