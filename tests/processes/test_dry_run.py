"""A dry run lists the cells of a plan, and calls nothing."""

import json

from typer.testing import CliRunner

from attnbench.cli import app


def test_a_dry_run_lists_every_cell_and_measures_and_stores_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["run", "sdpa", "fused", "--dry-run", "--set", "seq_len=32,64", "--json"])
    assert done.exit_code == 0, done.output
    cells = json.loads(done.stdout)["cells"]
    assert {each["implementation"] for each in cells} == {"sdpa", "fused"}
    assert len({each["workload"] for each in cells}) * 2 == len(cells) > 2
    table = CliRunner().invoke(app, ["run", "sdpa", "fused", "--dry-run", "--set", "seq_len=32,64"]).stdout
    assert f"{len(cells)} cells on {len(cells) // 2} shapes" in table
    assert list(tmp_path.iterdir()) == []
    both = CliRunner().invoke(app, ["run", "--dry-run", "--resume", "x"])
    assert "give one of them" in str(both.exception)
