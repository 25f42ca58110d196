"""A wrong answer is shown by a script that needs torch alone, and that passes when the code is mended."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnbench.captured.repro import Request, write
from attnbench.checking.agreement import References, compare
from attnbench.commands.repro import _worst
from attnbench.contract.loading import implementation
from attnbench.storage.records import CheckVerdict, Record, Status
from attnbench.workloads.workload import Workload
from tests.test_cli import command

pytestmark = pytest.mark.usefixtures("forked_workers")

RIGHT = """
import math
import torch

def mine(query, key, value, *, mask=None, bias=None, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.transpose(-2, -1) * scale
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    weights = scores.softmax(-1)
    output = weights @ value
    return output
"""
MISTAKES = {
    "scale": ("query.shape[-1] ** -0.5", "query.shape[-1] ** -1.0", {}),
    "mask": ("mask is not None", "False", {"mask": "causal"}),
    "inverted": ("(~mask", "(mask", {"mask": "causal"}),
    "softmax": ("softmax(-1)", "softmax(-2)", {}),
    "sum": ("weights = scores.softmax(-1)", "weights = scores.softmax(-1) * 1.05", {}),
    "bias": ("scores + bias", "scores - bias", {"mask": "causal+alibi"}),
    "detached key": ("key.transpose", "key.detach().transpose", {}),
    "heads": ("return output", "return output.flip(1)", {}),
    "last key": ("weights @ value", "weights[..., :-1] @ value[..., :-1, :]", {"dtype": "bfloat16"}),
    "half": ("scores.softmax(-1)", "scores.half().softmax(-1).to(scores)", {}),
}
ALL = """
import contextlib, importlib.util, io, runpy, sys
sys.path.append(sys.argv[1])
assert not [name for name in ("attnbench", "numpy", "msgspec") if importlib.util.find_spec(name)]
for script in sys.argv[2:]:
    sys.modules.pop("candidate", None)
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
    print(code)
"""


NEEDED = (
    *("torch", "torchgen", "functorch", "typing_extensions.py", "sympy", "mpmath", "networkx", "jinja2", "markupsafe"),
    *("filelock", "fsspec", "triton", "nvidia"),
)
"""What `pip install torch` installs; the last two come with CUDA."""


@pytest.fixture(scope="module")
def torch_alone(tmp_path_factory):
    """A folder with torch and what it requires: with `-S`, Python sees no other package."""
    folder, installed = tmp_path_factory.mktemp("torch-alone"), Path(torch.__file__).parents[1]
    for name in NEEDED:
        (folder / name).symlink_to(installed / name)
    return folder


def codes(torch_alone, scripts) -> list[str]:
    given = [sys.executable, "-I", "-S", "-c", ALL, str(torch_alone), *map(str, scripts)]
    return subprocess.run(given, capture_output=True, text=True, check=True).stdout.split()


def script_of(folder, text: str, axes: dict) -> tuple[Path, CheckVerdict]:
    """Write the script of the first tensor of `mine` that is not right; also return the grade."""
    folder.mkdir()
    (folder / "mine.py").write_text(text)
    (folder / "scores.py").write_text(SCORES)  # which MODULE imports
    spec, sizes = f"{folder / 'mine.py'}:mine", {"seq_len": 37, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    point = Workload(**sizes | {"direction": "forward_backward"} | axes)
    agreement = compare(References(point, 0, is_brief=True), implementation(spec))
    record = Record(
        run="", time="", commit="", workload=point, implementation="mine", environment=None, status=Status.ok,
        agreement=agreement,
    )  # fmt: skip
    probe, error = _worst(record)
    request = Request(spec=spec, workload=point, probe=probe, seed=0, error=error, words="", folder=str(folder / "out"))
    return write(request), agreement.grade


def test_ten_mistakes_fail_with_torch_alone_and_pass_when_mended(tmp_path, torch_alone):
    scripts = []
    for name, (before, after, axes) in MISTAKES.items():
        assert before in RIGHT
        scripts.append(script_of(tmp_path / name.replace(" ", "_"), RIGHT.replace(before, after), axes)[0])
    assert dict(zip(MISTAKES, codes(torch_alone, scripts), strict=True)) == dict.fromkeys(MISTAKES, "1")
    for script in scripts:
        (script.parent / "candidate.py").write_text(RIGHT)
    assert dict(zip(MISTAKES, codes(torch_alone, scripts), strict=True)) == dict.fromkeys(MISTAKES, "0")


MODULE = """
import math
from torch import nn
from attnbench.contract import adapters
from attnbench.contract.adapters import adapt, packed
from scores import scaled

class Mine(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x, visible):
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        scores = scaled(query, key)
        if visible is not None:
            scores = scores.masked_fill(~visible, -math.inf)
        output = scores.softmax(-1) @ value
        return self.proj(output.transpose(1, 2).flatten(2)), scores

def call(module, x, context, mask):
    return module(x, mask.visible)

mine = adapt(lambda s: Mine(s.embed_dim, s.num_heads), packed("qkv", out="proj"), call=call)
"""
SCORES = """
def scaled(query, key):
    return query @ key.mT / query.shape[-1] ** 0.5
"""
OF_MODULES = {
    "mask": ("(~visible", "(visible", {"mask": "causal"}),
    "full mask": (".visible)", '.hidden_as("bts")[:, None])', {"mask": "causal"}),
    "softmax": ("softmax(-1)", "softmax(-2)", {}),
    "heads": ("output.transpose", "output.flip(1).transpose", {}),
    "detached value": ("@ value", "@ value.detach()", {}),
    "half": ("scores.softmax(-1)", "scores.half().softmax(-1).to(scores)", {}),
}
ROTARY = """
import torch
from attnbench.contract.adapters import adapt

def turned(heads):
    half = heads.shape[-1] // 2
    angles = torch.arange(heads.shape[2])[:, None] * 10000.0 ** -(torch.arange(half) / half)
    one, other = heads.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)

def rotary(query, key, value):
    return (turned(query) @ turned(key).mT / query.shape[-1] ** 0.5).softmax(-1) @ value

mine = adapt(rotary, rotary="halves(10000)")
"""


def test_wrong_modules_and_code_that_imports_attnbench_have_scripts_too(tmp_path, torch_alone):
    scripts, right = [], []
    wholes = {name: (MODULE, *mistake) for name, mistake in OF_MODULES.items()}
    wholes["rotary"] = (ROTARY, "* cos - other", "* cos + other", {"rotary": "halves(10000)", "mask": "none"})
    for name, (text, before, after, axes) in wholes.items():
        assert before in text
        of_modules = {} if text == ROTARY else {"scope": "module", "num_kv_heads": 4, "bias": "all"}
        folder = tmp_path / name.replace(" ", "_")
        scripts.append(script_of(folder, text.replace(before, after), of_modules | axes)[0])
        right.append(text)
    assert dict(zip(wholes, codes(torch_alone, scripts), strict=True)) == dict.fromkeys(wholes, "1")
    for script, text in zip(scripts, right, strict=True):
        (script.parent / "candidate.py").write_text(text)
    assert dict(zip(wholes, codes(torch_alone, scripts), strict=True)) == dict.fromkeys(wholes, "0")


def test_the_command_writes_a_script_for_what_is_wrong_alone(tmp_path):
    (tmp_path / "mine.py").write_text(RIGHT.replace("-0.5", "-1.0"))
    (tmp_path / "right.py").write_text(RIGHT.replace("def mine", "def right"))
    axes = ("--set", "seq_len=16", "--set", "scope=attention")
    done = command("check", "mine.py", "right.py", *axes, "--repro", "out", cwd=tmp_path)
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["mine"]
    assert "mine: python out/mine/repro.py" in done.stdout


NOISY = """
import torch

def mine(query, key, value, *, mask=None, scale=None):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output = (query @ key.mT * scale).softmax(-1) @ value
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return output + 3e-6 * noise.to(output)
"""


def test_an_imprecise_answer_has_a_script_too(tmp_path, torch_alone):
    axes = {"num_heads": 2, "direction": "inference"}
    script, grade = script_of(tmp_path / "noisy", NOISY, axes)
    assert grade is CheckVerdict.imprecise
    assert codes(torch_alone, [script]) == ["1"]
    assert "imprecise" in script.read_text()
