"""What the commands that run something share."""

import pytest
import typer

from attnbench.analysis.results import read
from attnbench.commands import ExitCode, running
from tests import journals


def test_who_stops_while_reports_are_written_hears_how_to_write_them(tmp_path, monkeypatch, capsys):
    journals.write(tmp_path / "run", journals.workloads(seq_len=(16,)), ("sdpa", "fused"), num_visits=1)

    class Slow:
        def write(self, *_):
            raise KeyboardInterrupt

    monkeypatch.setattr("attnbench.plugins.plugs", lambda *_: {"slow": Slow()})
    with pytest.raises(typer.Exit) as ends, running.finished(tmp_path / "run"):
        running.write_reports(read(tmp_path / "run"), tmp_path / "run")
    assert ends.value.exit_code == ExitCode.interrupted
    said = f"what was measured is kept; write its reports with: attnbench report {tmp_path / 'run'}"
    assert said in capsys.readouterr().err
