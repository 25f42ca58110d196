"""A table of the amount of code to read: `python -m examples.tutorials.reading FILE.py[:NAME,NAME] ...`.

It counts the lines of a file, or of the named classes and functions, without blank lines, comments, imports and
docstrings. It also lists the names to look up: functions, methods and layers that are called but not defined there.
"""

import ast
import builtins
import sys
from collections.abc import Iterable
from pathlib import Path

KNOWN = {*dir(builtins), "append"}


def read(spec: str) -> list[ast.stmt]:
    """Parse the statements that a spec names: all of a file, or some of its classes and functions."""
    path, _, names = spec.partition(":")
    body = ast.parse(Path(path).read_text(encoding="utf-8")).body
    if names:
        body = [node for node in body if getattr(node, "name", "") in names.split(",")]
    return [node for node in body if not isinstance(node, ast.Import | ast.ImportFrom)]


def code_lines(nodes: Iterable[ast.stmt]) -> int:
    """Count the lines with code, without imports and docstrings."""
    lines: set[int] = set()
    for node in (inner for outer in nodes for inner in ast.walk(outer)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.stmt) and not is_text:
            last = node.lineno if hasattr(node, "body") else node.end_lineno or node.lineno
            lines |= set(range(node.lineno, last + 1))
        elif isinstance(node, ast.arg | ast.expr) and not isinstance(node, ast.Constant):
            lines.add(node.lineno)
    return len(lines)


def names_to_look_up(nodes: Iterable[ast.stmt]) -> list[str]:
    """List the names that are called but not defined in these statements, in alphabetical order."""
    walked = [inner for outer in nodes for inner in ast.walk(outer)]
    defined = {node.name for node in walked if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    defined |= {node.id for node in walked if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {node.arg for node in walked if isinstance(node, ast.arg)}
    names: set[str] = set()
    for node in walked:
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="self"))):
                pass  # a layer or a method of what is read
            case ast.Call(func=ast.Attribute(attr=name)):
                names |= {name} - KNOWN
            case ast.Call(func=ast.Name(id=name)):
                names |= {name} - KNOWN - defined
    return sorted(name for name in names if not name.startswith("__"))


def rows(specs: Iterable[str]) -> Iterable[str]:
    """Yield the lines of the table, a row for each spec."""
    yield "| file | lines | names to look up |"
    yield "| --- | --- | --- |"
    for spec in specs:
        path, _, names = spec.partition(":")
        title = f"{Path(path).stem}: {names.replace(',', ', ')}" if names else f"`{Path(path).stem}`"
        nodes = read(spec)
        found = names_to_look_up(nodes)
        yield f"| {title} | {code_lines(nodes)} | {len(found)}: {', '.join(found)} |"


if __name__ == "__main__":
    sys.stdout.write("\n".join(rows(sys.argv[1:])) + "\n")
