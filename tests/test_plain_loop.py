"""The plain loop, against which printed times are judged: it borrows nothing and sets nothing."""

import ast
import subprocess
import sys
from pathlib import Path

LOOP = Path(__file__).parents[1] / "examples" / "plain_loop.py"
SETTINGS = {"environ", "putenv", "mallopt", "backends", "compile", "sched_setaffinity", "nice", "disable", "freeze"}


def test_it_imports_torch_and_the_standard_library_only() -> None:
    nodes = list(ast.walk(ast.parse(LOOP.read_text(encoding="utf-8"))))
    imported = {each.name for node in nodes if isinstance(node, ast.Import) for each in node.names}
    imported |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    roots = {name.partition(".")[0] for name in imported}
    assert "torch" in roots
    assert not roots - {"torch"} - sys.stdlib_module_names
    assert not roots & {"os", "ctypes", "gc", "importlib", "subprocess"}


def test_it_sets_no_threads_environment_allocator_or_flags() -> None:
    nodes = list(ast.walk(ast.parse(LOOP.read_text(encoding="utf-8"))))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    assert not {name for name in names if name.startswith("set_")}
    assert not names & SETTINGS
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    assert not [target for target in targets if isinstance(target, ast.Attribute)]


def test_it_times_functions_in_turns(tmp_path: Path) -> None:
    source = "def attention(query, key, value, mask=None):\n    return query\n"
    (tmp_path / "mine.py").write_text(source, encoding="utf-8")
    command = [sys.executable, str(LOOP), "torch:sdpa", "mine.py:attention", "--seq=16", "--seconds=0.1", "--causal"]
    lines = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["torch:sdpa", "mine.py:attention"]
    assert lines[0].endswith("median ratio to the first 1.000")
