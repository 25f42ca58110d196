"""A dry run for a described device: supported or not and why, times of a roofline, and cells that do not fit."""

import json
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from attnbench.cli import app
from attnbench.commands.dry_run import expected, print_plan
from attnbench.contract import compute_capability, missing_compiler, missing_package
from attnbench.devices import described
from attnbench.devices.described import DataSheet
from attnbench.processes.planning import build_plan
from attnbench.workloads.counts import compulsory_bytes, useful_flops
from attnbench.workloads.workload import Workload

SMALL = DataSheet(
    name="Small",
    source="https://example.org/small",
    memory_bytes=2**30,
    bytes_per_s=1e12,
    flops_per_s={"bfloat16": 1e14, "tf32": 5e13},
    cache_bytes=2**25,
    num_sms=4,
    compute_capability=(8, 0),
)


def planned(*settings: str, **more):
    return build_plan(sweep="gpu", settings=settings, **more)


def rows_of(made, sheet: DataSheet = SMALL) -> dict[tuple[str, str], dict]:
    rows = expected(made, made.workloads, sheet)
    return {(row["workload"], row["implementation"]): row for row in rows}


@pytest.mark.parametrize("name", described.names())
def test_each_data_sheet_is_whole_and_names_its_document(name):
    sheet = described.load(name)
    assert sheet.source.startswith("https://")
    assert set(described.RATES) == set(sheet.flops_per_s)
    assert sheet.flops_per_s["bfloat16"] > sheet.flops_per_s["tf32"] > sheet.flops_per_s["float64"]


def test_every_cell_of_the_sweep_has_its_roofline_and_a_verdict_without_cuda():
    made = planned(call_limit_s=0.05)
    rows = rows_of(made)
    assert set(rows) == {(each.id, str(arm)) for each in made.workloads for arm in made.cells(each)}
    for each in made.workloads:
        row = rows[each.id, "sdpa"]
        of_products_s, of_memory_s = useful_flops(each) / 1e14, compulsory_bytes(each) / 1e12
        assert row["least_s"] == max(of_products_s, of_memory_s)
        assert row["bound"] == ("products" if of_products_s > of_memory_s else "memory")
    found = {str(row["status"]) for row in rows.values()}
    assert found == {"ok", "unsupported", "out_of_memory", "timeout"}
    assert all(row["reason"] for row in rows.values() if row["status"] != "ok")


def test_what_does_not_fit_says_so_and_by_how_much():
    made = planned("direction=backward", "head_dim=128", "mask=causal")
    rows = rows_of(made)
    big = [row for row in rows.values() if row["status"] == "out_of_memory"]
    assert big
    assert all(row["held_bytes"] > SMALL.memory_bytes for row in big)
    assert all("of 1.00 GiB" in row["reason"] for row in big)
    large = msgspec.structs.replace(SMALL, memory_bytes=2**40)
    assert not [row for row in rows_of(made, large).values() if row["status"] == "out_of_memory"]


def test_a_package_that_is_missing_here_is_named_and_no_reason_against_it():
    """Cells of packages missing here were once left out, although the device may have them."""
    rows = rows_of(planned("seq_len=1024", "direction=inference", implementations=["flash_attn_2", "flashinfer"]))
    of_flash = [row for (_, name), row in rows.items() if name == "flash_attn_2"]
    assert {(row["status"], *row["needs"]) for row in of_flash} == {("ok", "flash_attn")}
    of_flashinfer = [row for (_, name), row in rows.items() if name == "flashinfer"]
    assert {row["reason"] for row in of_flashinfer} == {
        "this entry of flashinfer takes one request: it needs batch_size=1"
    }
    assert missing_package("flash_attn.flash_attn_interface") == "flash_attn is not installed"


def test_what_an_implementation_asks_of_the_device_is_answered_by_its_sheet_and_only_then():
    point = Workload(device="cuda", dtype="bfloat16")
    with described.assuming(SMALL):
        assert compute_capability(point) == (8, 0)
        assert missing_compiler("cuda") is None
    assert compute_capability(point) != (8, 0)


def test_a_rate_is_that_of_the_products_that_are_made():
    float32 = Workload(dtype="float32")
    assert SMALL.rate(float32) is None
    assert SMALL.rate(msgspec.structs.replace(float32, float32_matmul_precision="high")) == 5e13


def test_the_command_line_gives_the_answer_first_and_starts_no_worker(monkeypatch):
    monkeypatch.setattr("attnbench.commands.dry_run.predict", lambda *_, **__: pytest.fail("a worker was started"))
    done = CliRunner().invoke(app, ["run", "--sweep", "gpu", "--dry-run", "--set", "device=h200"])
    assert done.exit_code == 0, done.output
    first = done.output.splitlines()[0]
    assert first.startswith("NVIDIA H200, as described")
    assert "of 480 cells are supported and may fit" in first
    done = CliRunner().invoke(app, ["run", "--sweep", "gpu", "--dry-run", "--set", "device=h200", "--json"])
    found = json.loads(done.stdout)
    assert found["described"]["name"] == "NVIDIA H200"
    assert len(found["expected"]) == 480


def test_a_file_of_ones_own_serves_as_well_in_both_formats(tmp_path):
    file = tmp_path / "mine.json"
    file.write_bytes(msgspec.json.encode(SMALL))
    assert described.load(str(file)) == SMALL
    text = Path(described.FOLDER / "a100.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text, encoding="utf-8")
    assert described.load(str(tmp_path / "mine.toml")) == described.load("a100")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "no data sheet"),
        ("{}", "missing required field"),
        ('{"title": "x"}', "no data sheet"),
        (msgspec.json.encode(SMALL).decode().replace("1e12", "-1"), "above 0"),
        (msgspec.json.encode(SMALL).decode().replace("tf32", "fp7"), "fp7"),
    ],
)
def test_a_file_that_is_no_data_sheet_is_refused_in_words(text, said, tmp_path):
    file = tmp_path / "bad.json"
    file.write_text(text.replace("1000000000000.0", "-1") if said == "above 0" else text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        described.load(str(file))


def test_what_is_not_there_or_not_meant_is_refused_in_words(tmp_path):
    with pytest.raises(ValueError, match="a100, h100, h200"):
        described.load("h201x")
    with pytest.raises(ValueError, match="cannot read"):
        described.load(str(tmp_path / "none.toml"))
    with pytest.raises(ValueError, match="give --set device=cuda"):
        print_plan(build_plan(sweep="quick"), sheet=SMALL)
    done = CliRunner().invoke(app, ["run", "--sweep", "gpu", "--set", "device=h200"])
    assert "give --dry-run, too" in str(done.exception)
