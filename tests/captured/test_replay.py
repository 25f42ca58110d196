"""`attnbench check --replay FILE` judges a function on captured inputs, with their strides."""

import json

import pytest
import torch
from typer.testing import CliRunner

from attnbench.captured import replay
from attnbench.cli import app
from attnbench.storage.records import CheckVerdict
from tests.captured.test_repro import RIGHT

pytestmark = pytest.mark.usefixtures("forked_workers")

START = "    scale = query"


def variant(name, before, after):
    """Rename the right function, and change its text."""
    assert before in RIGHT
    return RIGHT.replace("def mine", f"def {name}").replace(before, after)


CODE = {
    "mine": RIGHT,
    "by_memory": variant(
        "by_memory", START, f"    key = key.as_strided(key.shape, torch.empty(key.shape).stride())\n{START}"
    ),
    "unmasked": variant("unmasked", "is not None", "is False"),
    "printing": variant("printing", START, f"    print('no line end', end='')\n{START}"),
    "forging": """import os, sys

def forging(query, key, value, *, mask=None):
    sys.stdout.write('{"oracle":"float64","probes":[],"rules":[]}')
    sys.stdout.flush()
    os._exit(0)
""",
    "crashing": "def crashing(query, key, value, *, mask=None):\n    raise KeyError('boom')\n",
}


PATIENT = ("--timeout", "600")
"""The code is run in a new process, which may start slowly on a busy machine."""
ONES = dict.fromkeys(("query", "key", "value"), torch.ones(1, 1, 2, 4))


def capture(folder, **more):
    """Save inputs whose key is a view of a packed buffer, as of one projection."""
    torch.manual_seed(1)
    query, packed = torch.randn(2, 4, 9, 8), torch.randn(2, 13, 2, 4, 8)
    key, value = packed.permute(2, 0, 3, 1, 4)  # (B, S, 2, H, K) -> two of (B, H, S, K)
    torch.save({"query": query, "key": key, "value": value, **more}, folder / "tensors.pt")
    for name, text in CODE.items():
        (folder / f"{name}.py").write_text(text)
    return folder / "tensors.pt"


def grades(folder, file, names=("mine", "by_memory", "unmasked")) -> dict[str, CheckVerdict]:
    saved, found = replay.load(file), {}
    for name in names:
        replay.answer(f"{folder / name}.py:{name}", str(file), str(folder / name))
        found[name] = replay.judge(saved, replay.reference(saved), folder / name).grade
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "more",
    [
        {"mask": torch.ones(9, 13, dtype=torch.bool).tril(4)},
        {"mask": torch.zeros(2, 1, 1, 13).index_fill(-1, torch.tensor([1, 5]), -torch.inf), "scale": 0.3},
        {"mask": torch.ones(9, 13, dtype=torch.bool).tril(), "gradient": torch.randn(2, 4, 9, 8)},
    ],
)
def test_replay_accepts_a_right_function_and_rejects_two_wrong_ones(tmp_path, dtype, more):
    file = capture(tmp_path, **more)
    saved = {
        name: each.to(dtype) if isinstance(each, torch.Tensor) and each.dtype != torch.bool else each
        for name, each in torch.load(file, weights_only=True).items()
    }
    torch.save(saved, file)
    assert replay.load(file)["key"].stride() == saved["key"].stride() != torch.empty(2, 4, 13, 8).stride()
    assert grades(tmp_path, file) == {
        "mine": CheckVerdict.right,
        "by_memory": CheckVerdict.wrong,
        "unmasked": CheckVerdict.wrong,
    }


def test_the_command_shows_the_verdicts_and_an_error_is_not_judged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = capture(tmp_path, mask=torch.ones(9, 13, dtype=torch.bool).tril(4))
    specs = [f"{name}.py:{name}" for name in ("mine", "by_memory")]
    done = CliRunner().invoke(app, ["check", *specs, "--replay", str(file), "--json", *PATIENT])
    found = json.loads(done.stdout)
    assert done.exit_code == 1
    assert {name: each["verdict"] for name, each in found["implementations"].items()} == {
        "mine": "right",
        "by_memory": "WRONG",
    }
    assert found["cells"][0]["axes"]["kv_len"] == 13
    alone = CliRunner().invoke(app, ["check", "mine.py:mine", "--replay", str(file), *PATIENT])
    assert (alone.exit_code, alone.stdout.splitlines()[-1]) == (0, "pass: right.")
    names = ("printing", "forging", "crashing")
    others = CliRunner().invoke(
        app, ["check", *(f"{name}.py:{name}" for name in names), "--replay", str(file), *PATIENT]
    )
    assert others.exit_code == 3
    assert others.stdout.splitlines()[0].startswith("printing: right on 1 of 1 cell")
    assert "forging: error" in others.stdout
    assert "its process ended without answers" in others.stdout
    assert "KeyError: 'boom'" in others.stdout


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({"query": torch.ones(1, 1, 2, 4)}, "no inputs of attention: give query"),
        (dict.fromkeys(ONES, torch.ones(2, 2)), "no inputs of attention: give query"),
        ({**ONES, "key": torch.ones(1, 1, 3, 4)}, "no inputs of attention: give query"),
        ({**ONES, "window": 3}, "no inputs of attention: give query"),
        ({**ONES, "value": 3}, "no inputs of attention: give query"),
        ({**ONES, "mask": torch.ones(2, 2, dtype=torch.long)}, "no inputs of attention: give query"),
        ({**ONES, "mask": "x"}, "no inputs of attention: give query"),
        ({**ONES, "scale": "x"}, "no inputs of attention: give query"),
        ({**ONES, "gradient": [1.0]}, "no inputs of attention: give query"),
        (torch.ones(3), "no inputs of attention: give query"),
        ({**ONES, "mask": torch.ones(3, 5, dtype=torch.bool)}, "no inputs of attention"),
        ({**ONES, "gradient": torch.ones(2, 2)}, "no inputs of attention"),
        ({**ONES, "value": torch.full((1, 1, 2, 4), torch.nan)}, "not finite"),
        (dict.fromkeys(ONES, torch.arange(-4e3, 4e3, 1e3).half().view(1, 1, 2, 4)), "overflows float16"),
    ],
)
def test_a_file_of_another_form_is_refused_with_the_form(tmp_path, saved, says):
    torch.save(saved, tmp_path / "a.pt")
    with pytest.raises(ValueError, match=says):
        replay.reference(replay.load(tmp_path / "a.pt"))


def test_a_scale_of_zero_is_a_scale(tmp_path):
    file = capture(tmp_path, scale=0.0)
    assert grades(tmp_path, file, ["mine"]) == {"mine": CheckVerdict.right}


def test_a_file_that_would_execute_something_is_refused(tmp_path):
    torch.save({"query": print, "key": 1, "value": 2}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="cannot be loaded"):
        replay.load(tmp_path / "a.pt")
