"""Growth of curves with known laws, of a made-up run, and by the command."""

import math
import re
from dataclasses import replace

import pytest

from attnbench.analysis.growth import growths
from attnbench.analysis.results import read
from attnbench.analysis.sanity import SystemLoad
from attnbench.statistics.growth import fit
from attnbench.workloads.counts import pool_bytes
from attnbench.workloads.workload import Workload
from tests import journals
from tests.test_cli import command

LENGTHS = (256, 512, 1024, 1536, 2048, 4096)
GIB = 2**30


def textbook(length: int) -> float:
    return 2 * 8 * length**2 * 4 + 8 * length * 64 * 4


def flash(length: int) -> float:
    return 8 * length * 65 * 4 + 591_872


def test_the_textbook_form_is_near_2_and_its_curve_is_found_exactly():
    found = fit((length, textbook(length)) for length in LENGTHS)
    assert found is not None
    assert found.lengths == LENGTHS[-4:]
    assert found.exponent(GIB) == pytest.approx(2.0, abs=0.01)
    assert found.parts == pytest.approx((0, 8 * 64 * 4, 2 * 8 * 4), abs=1e-3)
    reach = found.reach(GIB)
    assert reach is not None
    assert textbook(math.floor(reach)) <= GIB < textbook(math.ceil(reach))


def test_a_constant_part_does_not_hide_the_limit_of_a_linear_form():
    found = fit((length, flash(length)) for length in LENGTHS)
    assert found is not None
    assert 0.8 < found.exponent(found.lengths[-1]) < 1.0
    assert found.reach(GIB) == pytest.approx((GIB - 591_872) / (8 * 65 * 4), rel=1e-6)


def test_what_fits_no_curve_has_none():
    rough = [(length, textbook(length) * (1.5 if place % 2 else 1.0)) for place, length in enumerate(LENGTHS)]
    assert fit(rough) is None


@pytest.mark.parametrize("lengths", [(), (512,), (512, 1024), (512, 512, 1024)])
def test_fewer_than_three_lengths_say_nothing_of_growth(lengths):
    assert fit((length, textbook(length)) for length in lengths) is None


def test_what_does_not_grow_never_reaches_a_limit_and_a_limit_below_it_is_none():
    constant = fit((length, 1000.0) for length in LENGTHS)
    assert constant.reach(GIB) is None
    assert constant.exponent(512) == pytest.approx(0, abs=1e-9)
    assert fit((length, flash(length)) for length in LENGTHS).reach(1000) is None


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    points = journals.workloads(seq_len=(256, 512, 1024, 1536))
    folder = tmp_path_factory.mktemp("run") / "run"
    return journals.write(folder, points, ("fused", "sdpa"), num_epochs=1, num_visits=1)


@pytest.fixture
def found(measured):
    return {growth.implementation: growth for growth in growths(measured, 0.25 * GIB)}


def test_a_run_gives_the_growth_of_each_implementation(found):
    assert set(found) == {"fused", "sdpa"}
    assert found["fused"].exponent > found["sdpa"].exponent
    assert [length for length, _ in found["fused"].points] == [256, 512, 1024, 1536]


@pytest.fixture
def fused(found):
    points = tuple((length, textbook(length)) for length, _ in found["fused"].points)
    return replace(found["fused"], points=points, fit=fit(points))


def test_the_length_that_varies_is_followed_and_the_other_is_named(tmp_path):
    square = [*journals.workloads(seq_len=(128, 512)), *journals.workloads(seq_len=(128, 512), kv_len=(2048,))]
    decoding = journals.workloads(seq_len=(1,), kv_len=(128, 512))
    lines = {}
    for name, points in (("square", tuple(square)), ("decoding", decoding)):
        lines[name] = [(each.axis, each.other) for each in growths(journals.write(tmp_path / name, points, ("fused",)))]
    assert lines == {"square": [("seq_len", ""), ("seq_len", "S=2048")], "decoding": [("kv_len", "T=1")]}


def batches(*numbers: int, **axes: object) -> tuple[Workload, ...]:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "page_size": 16, "direction": "inference"}
    return tuple(Workload(batch=f"{number}q1kv1000", **(sizes | axes)) for number in numbers)


def test_growth_over_requests_counts_their_cache(tmp_path):
    """16 bits and 8 bits are apart, and so are requests of other lengths."""
    other = Workload(batch="2q9_q5kv40", page_size=16, num_heads=4, num_kv_heads=2, head_dim=64, direction="inference")
    points = (*batches(4, 8, 16, 32), *batches(4, 8, 16, 32, cache_dtype="float8_e4m3fn"), other)
    found = growths(journals.write(tmp_path / "run", points, ("sdpa",)), 8 * GIB)
    assert [each.axis for each in found] == ["seq_len", "requests", "requests"]
    same, small = found[1:]
    assert same.other == "requests of 1,000 keys"
    assert [number for number, _ in same.points] == [4, 8, 16, 32]
    slots, copied = 63 * 16, 1000 * 4  # a page is partly used; a dense function reads a copy in float32
    for grown, key_bytes in ((same, 4), (small, 1)):
        peaks = [value - number * (slots * key_bytes + copied) * 2 * (64 + 64) for number, value in grown.points]
        assert all(0 < peak < 2 * number * 4 * 64 * 4 for peak, (number, _) in zip(peaks, grown.points, strict=True))
    held = int(replace(same, limit_bytes=32 * GIB).reach) // 10 * 10  # four digits
    assert 10_000 < held < 100_000
    assert f"32.0 GiB holds {held:,} of them; one more needs " in replace(same, limit_bytes=32 * GIB).sentence
    assert "for cache and call, fitted over 4 to 32" in same.sentence
    assert "1.00 MiB holds 0 of them" in replace(same, limit_bytes=2**20).sentence
    few = replace(same, points=same.points[:2], fit=None)
    assert "needs three batches or more; batches measured: 2" in few.sentence


def test_a_shared_prefix_is_held_once():
    (plain,), (shared,) = batches(8), batches(8, shared_prefix=512)
    assert pool_bytes(plain) - pool_bytes(shared) == 7 * 512 * 2 * (64 + 64) * 4


def test_the_sentence_names_the_length_that_reaches_the_limit(fused):
    said = fused.sentence
    assert said.startswith("fused: 256 MiB is reached at T=2032; there memory grows with T^1.98, fitted over T=")


def test_without_a_limit_three_quarters_of_what_was_free_are_it(measured):
    load = SystemLoad(stolen=0.0, others=0.0, free_bytes=GIB)
    assert {each.limit_bytes for each in growths(replace(measured, system_load=load))} == {0.75 * GIB}
    assert {each.limit_bytes for each in growths(measured)} == {0.0}


def test_what_grows_not_at_all_or_has_too_few_lengths_is_reported(fused):
    flat = tuple((length, 1000.0) for length, _ in fused.points)
    assert "does not reach" in replace(fused, points=flat, fit=fit(flat)).sentence
    few = replace(fused, points=fused.points[:2], fit=None)
    assert "needs three lengths or more; lengths measured: 2" in few.sentence
    assert few.reach is None


def test_the_command_says_where_the_limit_is(tmp_path):
    axes = [f"--set={axis}" for axis in ("seq_len=16,32,64", "num_heads=2", "head_dim=8", "num_threads=1")]
    done = command("growth", "fused", *axes, "--memory-limit", "0.5GiB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    reached = round((0.5 * GIB / 16) ** 0.5 - 2)  # 16 bytes of scores and weights for each pair, 64 for each token
    assert f"512 MiB is reached at T={reached};" in done.stdout
    assert "inference" in done.stdout
    (run,) = (tmp_path / "results" / "runs").iterdir()
    metrics = {found.metric for record in read(run).records for found in record.measurements}
    assert metrics == {"peak_memory", "scratch_memory", "saved_memory"}
    short = command("growth", "fused", "--set=seq_len=16,32", *axes[1:], cwd=tmp_path)
    assert (short.returncode, "give three lengths or more" in short.stdout) == (3, True)


def test_the_command_says_how_many_requests_fit(tmp_path):
    axes = ("batch=2q1kv64,4q1kv64,8q1kv64", "page_size=16", "num_heads=2", "head_dim=8", "num_threads=1")
    done = command("growth", "paged_gather", *(f"--set={axis}" for axis in axes), "--memory-limit=1MiB", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "requests of 64 keys" in done.stdout
    each = 64 * 2 * (8 + 8) * 4
    (held,) = re.findall(r"1.00 MiB holds (\d+) of them", done.stdout)
    assert (
        0.5 * 2**20 / each < int(held) < 2**20 / each
    )  # a call gathers one request's keys at a time, beside the cache
