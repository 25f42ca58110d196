"""`attnbench fastest` with real workers on tiny shapes: texts, JSON, exit codes, mistakes."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from attnbench.cli import app
from attnbench.storage.journal import find_runs

pytestmark = pytest.mark.usefixtures("forked_workers")

TINY = [f"--set={axis}" for axis in ("seq_len=16", "num_heads=2", "head_dim=8", "num_threads=1")]
MINE = """def slow(query, key, value):
    for _ in range(40):
        out = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(dim=-1) @ value
    return out


def wrong(query, key, value):
    return (query @ key.transpose(-2, -1)).softmax(dim=-1) @ value


def broken(query, key, value):
    raise RuntimeError("boom")
"""


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)


def invoke(*words: str) -> Result:
    return CliRunner().invoke(app, [*words])


def test_what_is_wrong_or_crashes_is_excluded_and_a_finding() -> None:
    done = invoke("fastest", "mine.py:wrong", "mine.py:broken", "sdpa", *TINY, "--budget", "0.2", "--json")
    assert done.exit_code == 1, done.output
    (found,) = json.loads(done.stdout)["choices"]
    assert found["choice"] == "sdpa"
    assert found["excluded"]["wrong"].startswith("wrong: ")
    assert "It looks as if" in found["excluded"]["wrong"]
    (folder,) = find_runs(Path("results"))
    again = invoke("fastest", "--resume", folder.name, "-i", "mine.py:wrong", "-i", "mine.py:broken")
    assert again.exit_code == 1, again.output
    assert "Take PyTorch's own choice, sdpa: it is the only one left." in again.stdout
    assert "excluded, error: broken (RuntimeError: boom" in again.stdout
    assert "called slower" not in again.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fastest", "--set", "mask=casual"], "did you mean"),
        (["fastest", "fused", "--along", "length"], "crossovers need two implementations, and only fused is named"),
        (["fastest", "fused", "sdpa", "--along", "dtype"], "dtype"),
        (["fastest", "fused", "sdpa", "--along", "length", "--from", "512", "--to", "16"], "is no range"),
        (["fastest", "fused", "sdpa", "--from", "16"], "give that, too"),
        (["fastest", "fused", "sdpa", "--along", "length", "--memory", "1GiB"], "does not go with --memory"),
        (["fastest", *TINY, "--policy", "."], "is a folder: name a file"),
        (["fastest", *TINY, "--policy", "mine.py/policy.json"], "choose another folder with --policy"),
    ],
)
def test_mistakes_are_explained_and_nothing_is_left(words: list[str], said: str, tmp_path: Path) -> None:
    done = invoke(*words)
    assert isinstance(done.exception, ValueError)
    assert said in str(done.exception)
    assert not (tmp_path / "results").exists()


def test_a_crossover_that_is_none_says_who_is_faster() -> None:
    ends = ["--from", "16", "--to", "24", "--budget", "1"]
    done = invoke("fastest", "mine.py:slow", "sdpa", "--along", "length", *TINY, *ends, "--json")
    assert done.exit_code in {0, 3}, done.output
    (found,) = json.loads(done.stdout)["crossings"]
    assert found["implementations"] == ["slow", "sdpa"]
    assert found["changes"] == []
    assert set(found["points"]) <= {str(value) for value in range(16, 65)}
    assert "slow is faster" not in found["answer"]
    (folder,) = find_runs(Path("results"))
    again = invoke("fastest", "--resume", folder.name, "-i", "mine.py:slow", "--json")
    assert json.loads(again.stdout)["crossings"][0]["implementations"] == ["slow", "sdpa"]


def test_a_run_goes_on_with_its_command_and_whatever_is_asked_of_it_then(tmp_path: Path) -> None:
    words = ("fused", "sdpa", *TINY, "--budget", "1")
    done = invoke("fastest", *words, "--policy", "new/policy.json", "--json")
    assert json.loads(done.stdout)["choices"][0]["choice"] is not None
    found = json.loads(done.stdout)["policy"]
    assert found["file"] == "new/policy.json"
    assert Path(found["file"]).is_file()
    assert found["chosen"] == {"sdpa": 1}
    assert found["regret"] is None  # one workload alone predicts no others
    (folder,) = find_runs(tmp_path / "results")

    again = invoke("fastest", "--resume", folder.name, "--json", "--memory", "1B")
    assert again.exit_code == 3
    (restricted,) = json.loads(again.stdout)["choices"]
    assert restricted["choice"] is None
    assert all("more than the 1.00 B allowed" in reason for reason in restricted["excluded"].values())

    policy = invoke("fastest", "--resume", folder.name, "--policy", "new/policy.json", "--quiet")
    text = " ".join(policy.stdout.split())
    assert "Policy: sdpa at 1 of 1 shape. The table is in new/policy.json." in text

    refused = invoke("run", "--resume", folder.name)
    assert f"continue with attnbench fastest --resume {folder.name}" in str(refused.exception)
    assert list(find_runs(tmp_path / "results")) == [folder]
