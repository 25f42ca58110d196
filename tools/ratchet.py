"""Fail if a number that may only fall has risen: `python -m tools.ratchet [--renew]`.

It counts lines of code in each folder, comprehensions inside others, long functions, stilted phrases in texts, and
words of the documents. Docstrings, comments and blank lines are not lines of code, but they count in the length of a
function. `ratchet.toml` next to this file contains the limits and the goals. `--renew` lowers each limit to today's
number and never raises one; limits of words are fixed.

Source of the idea: https://github.com/tinygrad/tinygrad, sz.py.
"""

import ast
import functools
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMITS = Path(__file__).with_suffix(".toml")
FREE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MOST_FUNCTION_LINES = 60
"""Most lines of a function, from `def` to the last line of the body, its docstring included."""
FEWEST_WORDS = 4
"""Fewest words of a text: a string with fewer words is a name or a format."""
OPENINGS = re.compile(r"^(Of|Where|What|Who|Whoever|Likewise|The same|As above|Itself|One more|So )\b")
"""Beginnings of docstrings that refer to the previous docstring, or that have a clause in place of a noun."""
PHRASES = re.compile(
    r"\bso (?:many|long|often|much) \b(?!that)|\b(?:what|who|whose) (?:is|was|are|were|has|have|takes?) ", re.IGNORECASE
)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Count:
    """One number with its limit; `goal` is the intended final value."""

    name: str
    number: int
    limit: int
    goal: int

    @property
    def is_fine(self) -> bool:
        """Whether the number is at most its limit."""
        return self.number <= self.limit

    def __str__(self) -> str:
        """Format one line of the table."""
        mark = "" if self.is_fine else "  OVER ITS LIMIT"
        return f"{self.name:32} {self.number:7,} of at most {self.limit:7,}; goal {self.goal:7,}{mark}"


def bare_strings(tree: ast.AST) -> list[ast.Constant]:
    """List docstrings, and strings that document a variable: expressions that are a string and nothing else."""
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]


@functools.cache
def code_lines(source: str) -> int:
    """Count the lines of a source text that have code; docstrings, comments and blank lines have none."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in FREE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for string in bare_strings(parsed(source)):
        lines.difference_update(range(string.lineno, (string.end_lineno or string.lineno) + 1))
    return len(lines)


@functools.cache
def parsed(source: str) -> ast.Module:
    """Parse the source text of a file, once for all counts."""
    return ast.parse(source)


def python_files(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder, except symbolic links and files in linked folders."""
    for path in sorted(folder.rglob("*.py")):
        if not any(parent.is_symlink() for parent in path.parents) and not path.is_symlink():
            yield path


def texts(path: Path) -> Iterator[tuple[str, bool]]:
    """Yield (text, whether it is a docstring): a whole document, or the docstrings and longer strings of a module."""
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield FENCE.sub("", source), False
        return
    tree = parsed(source)
    documented = {id(each): each for each in bare_strings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_docstring = id(node) in documented
            if is_docstring or len(node.value.split()) >= FEWEST_WORDS:
                yield node.value, is_docstring


def nested_comprehensions(path: Path) -> int:
    """Count the comprehensions and generator expressions of a file that are inside another one."""
    inner = {
        id(inside)
        for node in ast.walk(parsed(path.read_text(encoding="utf-8")))
        if isinstance(node, COMPREHENSIONS)
        for inside in ast.walk(node)
        if isinstance(inside, COMPREHENSIONS) and inside is not node
    }
    return len(inner)


def long_functions(path: Path) -> int:
    """Count the functions of a file with more than MOST_FUNCTION_LINES lines."""
    nodes = ast.walk(parsed(path.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum((node.end_lineno or node.lineno) - node.lineno >= MOST_FUNCTION_LINES for node in functions)


def stilted(path: Path) -> int:
    """Count the stilted phrases in the texts of a file."""
    number = 0
    for text, is_docstring in texts(path):
        number += len(PHRASES.findall(text)) + (is_docstring and OPENINGS.match(text) is not None)
    return number


def counts(root: Path, limits: dict[str, dict[str, dict[str, int]]]) -> list[Count]:
    """Measure every number that has a limit: code, nested comprehensions, long functions, stilted phrases, words."""
    measured = []
    for folder, limit in limits["code"].items():
        number = sum(code_lines(path.read_text(encoding="utf-8")) for path in python_files(root / folder))
        measured.append(Count(f"code in {folder}", number, limit["limit"], limit["goal"]))
    for section, count in (("nested", nested_comprehensions), ("long", long_functions)):
        for folder, limit in limits[section].items():
            number = sum(map(count, python_files(root / folder)))
            measured.append(Count(f"{section} in {folder}", number, limit["limit"], limit["goal"]))
    for kind, limit in limits["stilted"].items():
        paths = sorted((root / "docs").rglob("*.md")) if kind == "docs" else list(python_files(root / kind))
        paths += [root / "README.md"] if kind == "docs" else []
        measured.append(Count(f"stilted in {kind}", sum(map(stilted, paths)), limit["limit"], limit["goal"]))
    for place, limit in limits["words"].items():
        pages = (root / place).rglob("*.md") if (root / place).is_dir() else [root / place]
        number = sum(len(path.read_text(encoding="utf-8").split()) for path in pages)
        measured.append(Count(f"words in {place}", number, limit["limit"], limit["goal"]))
    return measured


def load(path: Path = LIMITS) -> dict[str, dict[str, dict[str, int]]]:
    """Load the limits and goals."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def renew(measured: list[Count], path: Path = LIMITS) -> None:
    """Lower each limit that is higher than today's number, except the limits of words."""
    text = path.read_text(encoding="utf-8")
    for count in measured:
        if count.name.startswith("words"):
            continue
        name = count.name.split(" in ", 1)[1]
        place = re.compile(rf'^("?{re.escape(name)}"? = \{{ limit = )\d+', re.MULTILINE)
        section, number = count.name.split(" in ", 1)[0], min(count.number, count.limit)
        start = text.index(f"[{section}]")
        text = text[:start] + place.sub(rf"\g<1>{number}", text[start:], count=1)
    path.write_text(text, encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Print the table; if no number is over its limit, lower the limits with --renew and return 0, else return 1."""
    measured = counts(ROOT, load())
    print(*measured, sep="\n")  # noqa: T201 - this is its output
    if "--renew" in arguments and all(count.is_fine for count in measured):
        renew(measured)
    return 0 if all(count.is_fine for count in measured) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
