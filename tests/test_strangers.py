"""What a stranger meets: the script of the session of that name, the table of versions, and two threat models."""

import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from tools import stranger, versions

ROOT = Path(__file__).parents[1]


def test_the_script_takes_the_readme_and_fails_where_a_command_does(tmp_path):
    assert "def mine(query, key, value" in stranger.readme()
    wheel = tmp_path / "attnbench-9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("attnbench-9.dist-info/nothing", "")
    with pytest.raises(
        RuntimeError, match=r"pip install --no-deps .*\nexit code 1, without \['Successfully installed'\]"
    ):
        stranger.try_all(wheel, tmp_path, packages=tmp_path)


def test_the_table_of_versions_has_what_the_project_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = dict(re.findall(r"^\| (\S+) \| (\S+) \|", versions.table(), re.MULTILINE))
    assert {"torch", "numpy", "ray", "transformers"} <= {*versions.asked()}
    assert len(versions.asked()) > len(project["dependencies"])
    assert {"Python", "torch", "jinja2"} <= rows.keys()
    assert all(versions.pinned()[name] for name in versions.asked())


def test_the_versions_that_were_tried_have_the_oldest_and_the_newest_python():
    rows = [line.strip("| ").split(" | ") for line in versions.tried().splitlines()[2:]]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = sorted(re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"])), key=lambda each: int(each[2:]))
    assert {named[0], named[-1]} <= {".".join(python.split(".")[:2]) for _, python, *_ in rows}
    assert any(torch.startswith(versions.pinned()["torch"]) for _, _, torch, *_ in rows)
    assert [day for day, *_ in rows] == sorted((day for day, *_ in rows), reverse=True)


def test_every_action_is_pinned_by_a_hash_and_says_its_version():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / "action.yml", *(ROOT / "examples" / "ci").glob("*.yml")]
    used = [line.strip() for file in files for line in file.read_text().splitlines() if "uses: " in line]
    assert len(used) > 10
    assert [line for line in used if not re.search(r"uses: [\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)] == []


def test_the_threat_models_are_those_of_the_document_on_trust():
    security, trust = ((ROOT / name).read_text(encoding="utf-8") for name in ("SECURITY.md", "docs/trust.md"))
    assert "Neither is a sandbox" in security
    assert "sandbox" in trust
    for fact in (
        *("`--referee`", "20 ms", "mistakes", "code from a file or another package has a process of its own"),
        *("other values", "inputs of its own", "impossible time", "nder dropout no output is judged"),
        *("code written against attnbench itself", "code that patches torch changes the other side as well"),
        *("`model`, `inspect` and `check --invariance`", "code that wants to win"),
    ):
        assert fact in " ".join(security.split())
        assert fact in " ".join(trust.split())
