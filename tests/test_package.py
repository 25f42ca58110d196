"""An installed wheel of the project: the package alone, which works outside of the checkout."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from attnbench import plugins
from attnbench.cli import app
from attnbench.commands import options
from attnbench.reports import pytest_benchmark

ROOT = Path(__file__).parents[1]
AXES = ("mask=none", "scope=attention", "seq_len=8", "dtype=float32", "layout=contiguous")
SMALL = [f"--set={each}" for each in AXES]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """Install a wheel built from a copy of the tree: the build writes next to its sources."""
    copy, site = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("site-packages")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for folder in ("harness", "implementations", "studies", "examples", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored, symlinks=True)
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "THIRD_PARTY_NOTICES"):
        shutil.copy(ROOT / file, copy)
    build = "from setuptools import build_meta; build_meta.build_wheel('.')"
    environment = os.environ | {"GITHUB_REPOSITORY": "someone/attnbench", "GITHUB_SERVER_URL": "https://github.com"}
    subprocess.run([sys.executable, "-c", build], cwd=copy, env=environment, check=True, capture_output=True)
    (wheel,) = copy.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    return site


def test_it_holds_the_package_and_nothing_else(installed):
    assert {path.name.partition("-")[0] for path in installed.iterdir()} == {"attnbench"}
    source = ROOT / "harness" / "attnbench"
    kept = {".py", ".toml", ".jinja", ".mplstyle", ".js", ".typed"}
    expected = {path.relative_to(source) for path in source.rglob("*.*") if path.suffix in kept}
    expected |= {Path("implementations") / path.name for path in (ROOT / "implementations").glob("*.*")}
    found = {path.relative_to(installed / "attnbench") for path in (installed / "attnbench").rglob("*.*")}
    assert found == {path for path in expected if "__pycache__" not in path.parts and path.name != "__pycache__"}
    assert Path("implementations/fused.py") in found


def test_an_index_gets_addresses_in_place_of_relative_links():
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = (ROOT / "README.md").read_text(encoding="utf-8") + "\n[here](#there)\n"
    readme = description(text, "https://h.example", "o/n", "v1")
    assert re.findall(r"\]\((?!https://|#)[^)]*\)", readme) == []
    assert "[![ci](https://h.example/o/n/actions/workflows/ci.yml/badge.svg)](" in readme
    assert "](https://raw.githubusercontent.com/o/n/v1/results/gallery/" in readme
    assert "](https://h.example/o/n/blob/v1/docs/" in readme
    assert "[here](#there)" in readme


def test_the_package_knows_who_publishes_it(installed):
    (information,) = installed.glob("*.dist-info/METADATA")
    text = information.read_text(encoding="utf-8")
    assert "Project-URL: Issues, https://github.com/someone/attnbench/issues\n" in text
    assert "Project-URL: Documentation, https://someone.github.io/attnbench/\n" in text
    assert "](https://raw.githubusercontent.com/someone/attnbench/" in text


def test_the_version_of_the_package_heads_the_changes_and_is_cited_with_its_day(installed):
    (information,) = installed.glob("*.dist-info")
    version = information.name.removesuffix(".dist-info").partition("-")[2]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest, day = re.findall(r"^## \[(\d\S*)\] - (\S+)$", changes, re.MULTILINE)[0]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert newest == version
    assert f"\nversion: {version}\ndate-released: {day}\n" in citation


def test_the_wheel_names_the_licences_of_all_that_is_in_it(installed):
    (information,) = installed.glob("*.dist-info")
    expression = re.search(r"^License-Expression: (.*)$", (information / "METADATA").read_text(), re.MULTILINE)[1]
    licences = {"MIT", "BSD-3-Clause", "ISC", "Apache-2.0", "0BSD", "Unlicense"}
    assert set(expression.split(" AND ")) == licences
    notices = (information / "licenses" / "THIRD_PARTY_NOTICES").read_text(encoding="utf-8")
    assert (information / "licenses" / "LICENSE").exists()
    library = (installed / "attnbench" / "reports" / "vega.js").read_text(encoding="utf-8")
    assert library.startswith(f"/*!\n{notices}*/\n")
    versions = re.findall(r'(?:const|var) [$\w]+="(\d+\.\d+\.\d+)"', library)
    assert len(versions) == 3
    assert all(f" {version}" in notices[:800] for version in versions), "another Vega: renew THIRD_PARTY_NOTICES"


def test_what_few_need_is_optional_and_says_how_to_install_it(monkeypatch):
    """`pip install attnbench` has what check, run and compare use; the set-up commands install the rest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = {re.split(r"[><=\[]", each)[0] for each in project["dependencies"]}
    optional = {"tensorboard", "torch-tb-profiler", "pytest", "pytest-benchmark", "ray", "transformers"}
    assert needed.isdisjoint(optional)
    extras = project["optional-dependencies"]
    offered = {re.split(r"[><=\[]", each)[0] for name in extras for each in extras[name]}
    assert optional <= offered
    assert "torch-tb-profiler==0.4.3" in extras["tensorboard"]  # retired: no later release is meant for us
    assert extras["all"] == ["attnbench[cluster,pytest,tensorboard,transformers]"]
    assert '"-e", ".[all]"' in (ROOT / "noxfile.py").read_text(encoding="utf-8")
    assert "pip install -c constraints.txt -e '.[all]'\n" in (ROOT / "README.md").read_text(encoding="utf-8")
    monkeypatch.setattr(options, "find_spec", lambda _: None)
    for words, extra in ((["tensorboard"], "tensorboard"), (["model", "."], "transformers")):
        done = CliRunner().invoke(app, words)
        assert f"pip install -e '.[{extra}]'" in str(done.exception)


HIDDEN = """
import sys
for name in ("tensorboard", "torch_tb_profiler", "pytest", "pytest_benchmark", "ray", "transformers"):
    sys.modules[name] = None  # importing it raises
"""


def test_no_module_imports_an_optional_part_when_it_is_imported(monkeypatch):
    optional = re.compile(r"^(from|import) (tensorboard|torch_tb|pytest|ray|transformers)", re.MULTILINE)
    files = [path for path in (ROOT / "harness").rglob("*.py") if optional.search(path.read_text(encoding="utf-8"))]
    assert {path.name for path in files} == {"plugin.py", "pytest_plugin.py", "server.py"}  # TensorBoard's and pytest's
    monkeypatch.setitem(sys.modules, "pytest_benchmark.stats", None)
    with pytest.raises(ValueError, match=r"\.\[pytest\]"):
        pytest_benchmark.document(None)


@pytest.mark.long
def test_it_works_outside_of_the_checkout_and_without_the_optional_parts(installed, tmp_path):
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(HIDDEN)
    (tmp_path / "mine.py").write_text(
        "def mine(query, key, value):\n    return (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value\n"
    )
    path = os.pathsep.join([str(tmp_path / "first"), str(installed)])
    environment = {"PATH": "", "PYTHONPATH": path, "COLUMNS": "200", "OMP_NUM_THREADS": "1"}
    for arguments, words in (
        (["-c", "import attnbench; print(attnbench.__file__)"], [str(installed)]),
        (["-m", "attnbench", "list", "implementations"], plugins.implementation_names()),
        (["-m", "attnbench", "list", "sweeps"], ["quick", "full", "check"]),
        (["-m", "attnbench", "check", "mine.py:mine", *SMALL], ["right"]),
        (["-m", "attnbench", "run", "mine.py:mine", *SMALL, "--budget", "1"], ["mine"]),
        (["-m", "attnbench", "compare", "mine.py:mine", "mine.py:mine", *SMALL, "--budget", "1"], ["mine"]),
        (["-m", "attnbench", "explain", "undecided"], ["interval"]),
    ):
        command = [sys.executable, "-P", *arguments]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode in {0, 3}, done.stderr
        assert [word for word in words if word not in done.stdout] == []
