"""Removed axes: older journals with them can be read, but new plans cannot use them."""

from pathlib import Path

import msgspec
import pytest

from attnbench.analysis.results import read
from attnbench.checking.case import reason_against
from attnbench.contract.loading import implementation
from attnbench.reports import titles
from attnbench.workloads import sweep
from attnbench.workloads.workload import RETIRED, Workload
from tests import journals

PAGED = {"seq_len": 1, "kv_len": 64, "direction": "inference"}


@pytest.mark.parametrize(("axis", "value"), [("page_size", 16), ("cache_dtype", "float8_e4m3fn")])
def test_an_older_journal_is_read(tmp_path: Path, axis: str, value: int | str) -> None:
    text = msgspec.json.encode(PAGED | {axis: value})
    workload = msgspec.json.decode(text, type=Workload)
    assert workload.id == f"attention-inference-cpu-float32-b1-t1-h8-k64-s64-{axis}{value}"
    plain = Workload(**PAGED)
    journals.write(tmp_path / "run", (workload, plain), ("sdpa", "fused"))
    results = read(tmp_path / "run")
    assert {record.workload for record in results.records} == {workload, plain}
    assert titles.title(workload.axes()) != titles.title(plain.axes())
    reason = reason_against(implementation("sdpa"), workload)
    assert reason is not None
    assert axis in reason


@pytest.mark.parametrize("axis", RETIRED)
def test_no_sweep_has_them(axis: str) -> None:
    with pytest.raises(ValueError, match=axis):
        sweep.parse_settings([f"{axis}=16"])
