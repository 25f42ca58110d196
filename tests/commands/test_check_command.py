"""`attnbench check` calls only wrong answers WRONG, and judges the others even if one implementation crashes."""

import json
import re
import subprocess
from itertools import count
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from attnbench.analysis.results import read
from attnbench.cli import app
from attnbench.console import watching
from attnbench.processes import execution
from attnbench.processes.messages import Target
from attnbench.storage.events import CellChecked
from attnbench.storage.records import Status
from studies.simulated import virtual
from studies.simulated.worlds import World
from tests.test_cli import command

pytestmark = pytest.mark.usefixtures("forked_workers")

MINE = """
from torch import nn
from attnbench.contract.adapters import adapt, packed


def right(query, key, value, *, is_causal=False, scale=None):
    return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=is_causal, scale=scale)


def mistaken(query, key, value):
    return (query @ key.mT).softmax(-1) @ value


def at_times(query, key, value):
    if query.shape[2] == 16:
        raise RuntimeError("not at 16")
    return nn.functional.scaled_dot_product_attention(query, key, value)


def greedy(query, key, value, window): ...


def fused(query, key, value): ...


def _helper(query, key, value): ...


misfit = adapt(
    lambda sizes: nn.MultiheadAttention(sizes.embed_dim, sizes.num_heads, batch_first=True), packed("qkv", out="proj")
)
"""
ODD = """
from attnbench.contract.adapters import adapt


def linear(query, key, value):
    query, key = query.softmax(-1), key.softmax(-2)
    return query @ (key.mT @ value)


near = adapt(linear, approximate=True)


def filled(query, key, value, *, mask=None):
    scores = query @ key.mT / query.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, -1e30)).softmax(-1) @ value
"""
FEW = ["--set", "seq_len=16,19", "--set", "num_heads=2", "--set", "head_dim=8", "--set", "dtype=float32"]
FEW += ["--set", "direction=inference", "--set", "mask=none", "--set", "batch_size=1", "--sweep", "small.toml"]
SWEEP = 'summary = "a few"\nmetrics = []\nbudget_s = 0.0\n[[grid]]\nscope = ["attention", "module"]\n'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("check")
    (made / "mine.py").write_text(MINE)
    (made / "odd.py").write_text(ODD)
    (made / "small.toml").write_text(SWEEP)
    (made / "broken.py").write_text("import nothing_of_this_name\ndef f(query, key, value): ...\n")
    (made / "unreadable.py").write_text("def g(:\n")
    return made


def checked(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command("check", *arguments, *FEW, cwd=folder)


def verdicts(said: dict[str, dict[str, dict[str, str]]]) -> dict[str, str]:
    """The verdict on each implementation, and on each spec that could not be loaded."""
    words = {name: each["sentence"].partition(" on ")[0] for name, each in said["implementations"].items()}
    short = {name: word.partition(":")[0].partition(" (")[0] for name, word in words.items()}
    return short | dict.fromkeys(said["not_judged"], "not judged")


def test_one_bad_name_does_not_condemn_the_others(folder: Path) -> None:
    given = ("mine.py", "odd.py:near", "broken.py:f", "unreadable.py:g", "mine.py:rihgt", "fusde", "sdpa", "sdpa_cudnn")
    found = checked(folder, *given, "--json")
    said = json.loads(found.stdout)
    assert found.returncode == 1, found.stderr  # something is wrong
    unread = {"mine.py:greedy", "unreadable.py:g", "mine.py:rihgt", "fusde"}
    assert verdicts(said) == dict.fromkeys({"misfit", "f", "sdpa_cudnn", "mine.fused"} | unread, "not judged") | {
        "right": "right",
        "sdpa": "right",
        "mistaken": "WRONG",
        "at_times": "right where tried",
        "near": "approximate, neither judged nor timed",
    }
    reasons = said["not_judged"]
    assert set(reasons) == unread
    assert "takes (query, key, value, window)" in reasons["mine.py:greedy"]
    assert "not valid Python" in reasons["unreadable.py:g"]
    assert "did you mean right?" in reasons["mine.py:rihgt"]
    assert "did you mean fused?" in reasons["fusde"]


def test_each_layout_of_the_inputs_is_judged(tmp_path: Path) -> None:
    """Every cell with strides once ended with KeyError: 'query', since weights alone were laid out, too."""
    layouts = "transposed,mixed,expanded,broadcast"
    few = [word for axis in (f"layout={layouts}", "seq_len=16", "scope=attention") for word in ("--set", axis)]
    found = command("check", "sdpa", "--json", *few, cwd=tmp_path)
    assert [cell["status"] for cell in json.loads(found.stdout)["cells"]] == ["ok"] * 4


def test_a_check_says_whose_keys_were_gathered_from_their_pages(tmp_path: Path) -> None:
    few = [word for axis in ("batch=2q5kv32,q1kv16", "page_size=16", "num_heads=2") for word in ("--set", axis)]
    found = command("check", "sdpa", "paged_gather", *few, cwd=tmp_path)
    line = "sdpa: the keys were gathered before the call, outside of its time."
    assert found.stdout.splitlines().count(line) == 1, found.stdout
    quiet = command("check", "paged_gather", *few, cwd=tmp_path)
    assert "gathered" not in quiet.stdout.replace("paged_gather", "")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("name", "says"), [("empty_rows", "sees no key"), ("hidden_nan", "NaN"), ("all", "NaN")])
def test_what_is_only_noted_is_a_finding_where_that_is_asked(folder: Path, name: str, says: str) -> None:
    axes = ("mask=padding_to_nothing", "seq_len=19", "batch_size=2", "num_heads=2", "head_dim=8", "dtype=float32")
    few = [f"--set={axis}" for axis in (*axes, "direction=inference", "scope=attention", "layout=contiguous")]
    lenient = command("check", "odd.py:filled", *few, cwd=folder)
    assert lenient.returncode == 0, lenient.stdout
    strict = command("check", "odd.py:filled", *few, "--reject", name, "--json", cwd=folder)
    assert strict.returncode == 1, strict.stdout
    assert json.loads(strict.stdout)["implementations"]["filled"]["verdict"] == "WRONG"
    assert says in strict.stdout


def test_what_is_shown_names_the_place_and_what_was_given(folder: Path) -> None:
    found = checked(folder, "mine.py:at_times", "odd.py:near", "mine.py:greedy", "broken.py:f", "unreadable.py:g")
    assert found.returncode == 3, found.stderr  # nothing is wrong, but not everything was judged
    assert " cells on cpu\n" in found.stderr
    assert found.stdout.splitlines()[-1].startswith("inconclusive: ")
    assert "WRONG" not in found.stdout
    for line in (
        "at_times: error on attention-inference-cpu-float32-b1-t16-h2-k8",
        "  RuntimeError: not at 16 (mine.py, line 16)",
        "mine.py:greedy takes (query, key, value, window), and is called with query, key and value",
        "  broken.py:f cannot be loaded: ModuleNotFoundError: No module named 'nothing_of_this_name' (broken.py, line",
        "unreadable.py:g: not judged",
        "near: approximate, neither judged nor timed: off by ",
    ):
        assert line in found.stdout
    assert found.stdout.count("is called with query, key and value") == 1  # once, for any number of cells


class Wrong(virtual.SimulatedClient):
    """Judges `bad` wrong from this many keys on."""

    def __init__(self) -> None:
        super().__init__(World(name="calm"), lambda *_: 1e-3)
        self.asked: list[tuple[str, int]] = []

    def check(self, cell: Target, **_: object) -> CellChecked:
        found = super().check(cell)
        assert isinstance(found, CellChecked)
        self.asked.append((cell.arm.implementation, cell.workload.kv_len))
        if cell.arm.implementation == "bad" and cell.workload.kv_len > 8:
            return msgspec.structs.replace(found, status=Status.disagrees, message="it is off by one. See there.")
        return found


def asked(folder: Path, *, stops: bool) -> list[tuple[str, int]]:
    client, plan = Wrong(), virtual.plan(4, ["good", "bad"], budget_s=0.0)  # of 8, 16, 24 and 32 keys
    with watching() as watch:
        execution.execute(plan, folder, watch, ("check",), stops_when_wrong=stops, client=client)
    return client.asked


def test_who_is_wrong_is_not_checked_any_further_and_the_cheap_that_tell_come_first(tmp_path: Path, capsys) -> None:
    everything = asked(tmp_path / "all", stops=False)
    assert everything == [(name, length) for length in (8, 16, 24, 32) for name in ("good", "bad")]
    assert asked(tmp_path / "few", stops=True) == [
        *[("good", 16), ("bad", 16), ("good", 24), ("good", 32), ("good", 8)]
    ]
    said = " ".join(capsys.readouterr().err.split())
    assert "WRONG: bad on attention-forward-cpu-float32-b1-t16-h8-k64: it is off by one" in said
    assert "See there" not in said


def test_checks_end_with_a_budget_and_say_what_they_have_not_reached(tmp_path: Path) -> None:
    """`check --report` was once estimated to take an hour on a machine with a GPU."""
    client, plan = Wrong(), virtual.plan(4, ["good", "bad"], budget_s=6.0)
    seconds = count()
    execution.execute(
        plan, tmp_path, lambda _: None, ("check",), stops_when_wrong=True, client=client, clock=lambda: next(seconds)
    )
    assert 0 < len(client.asked) < 5
    assert re.match(r"[1-7] of 8 cells were not reached in 6 s", read(tmp_path).reason)


def test_what_was_found_is_printed_on_ctrl_c(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    number, really = count(), execution.ask_cell

    def interrupted(*given: object, **more: object) -> bool:
        if next(number) == 3:
            raise KeyboardInterrupt
        return really(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(execution, "ask_cell", interrupted)
    sizes = [f"--set={axis}" for axis in ("seq_len=16,19,23", "num_heads=2", "head_dim=8", "num_threads=1")]
    done = CliRunner().invoke(app, ["check", "mine.py:mistaken", "fused", *sizes])
    assert done.exit_code == 130
    assert "WRONG" in done.output
    assert "stopped: 3 of 6 cells were checked" in done.output
