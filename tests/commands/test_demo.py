"""The demo: a wrong function is found, a right one is not, and a report is there in the end."""

import json
from pathlib import Path

import pytest

from attnbench import cli, plugins
from attnbench.commands import demo

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("document", ["README.md", "docs/guide.md"])
def test_the_documents_have_the_same_functions(document):
    assert demo.SOURCE in (ROOT / document).read_text(encoding="utf-8")


def test_a_folder_with_an_equals_sign_is_no_label(tmp_path, monkeypatch):
    class AskedError(Exception):
        pass

    def checked(spec):
        raise AskedError(plugins.name_of(spec))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "_checked", checked)
    with pytest.raises(AskedError, match=r"^mistaken$"):
        demo.demo(budget_s=0.0, results=Path("seq_len="))


@pytest.mark.long
def test_it_ends_in_a_report_and_keeps_a_file_that_is_there(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(demo, "SETTINGS", ("seq_len=16", "num_heads=2", "head_dim=8", "mask=causal"))
    file = tmp_path / "results" / "demo" / "mine.py"
    file.parent.mkdir(parents=True)
    file.write_text(mine := demo.SOURCE + "# changed by its user\n")
    monkeypatch.setattr("sys.argv", ["attnbench", "demo", "--budget", "0", "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    said = capsys.readouterr()
    assert left.value.code == 0, said.err
    found = json.loads(said.out)
    assert found["verdicts"] == {"mistaken": "WRONG", "mine": "right"}
    assert Path(found["report"]).is_file()
    assert {cell["implementation"] for cell in found["cells"]} == {"mine", "fused", "sdpa"}
    assert "$ attnbench check results/demo/mine.py:mistaken" in said.err
    assert file.read_text() == mine
