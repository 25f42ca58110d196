"""Report retired words in documents and in Python strings: `python -m tools.retired_words [ROOT]`.

`retired_words.toml` next to this file holds the words, what to write instead, and every exception with its reason. Each
hit is printed as `file:line: word -> replacement`; the exit code is 1 if there is any. `nox -s lint` runs this.
"""

import ast
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".toml")
DOCUMENTS = {".md", ".toml", ".jinja", ".yml", ".cff"}
GENERATED = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.DOTALL)
"""A block that a program writes into a document. It is not checked; the strings of that program are."""
TEMPLATE_CODE = re.compile(r"{[{%#].*?[}%#]}", re.DOTALL)
"""Code in a template, such as names of variables, which is no text."""


@dataclass(frozen=True)
class Word:
    """A word or phrase that is no longer used."""

    pattern: re.Pattern[str]
    use: str
    messages_only: bool
    """Whether only messages and how-to pages must avoid it; docstrings and documents about the method may use it."""


@dataclass(frozen=True)
class Exemption:
    """Files that may use some retired words."""

    path: str
    """A glob, relative to the root; `*` also matches folders."""
    pattern: re.Pattern[str]
    """The retired words that these files may use: the matched text must match this pattern, too."""
    reason: str


@dataclass(frozen=True)
class Table:
    """The contents of retired_words.toml."""

    words: tuple[Word, ...]
    exemptions: tuple[Exemption, ...]
    skipped: tuple[str, ...]
    """Globs of files and folders that are not checked at all."""
    explanations: tuple[str, ...]
    """Globs of documents that explain the method, where words with `messages_only` are allowed."""


@dataclass(frozen=True, order=True)
class Hit:
    """A retired word in a file."""

    path: str
    line: int
    word: str
    use: str

    def __str__(self) -> str:
        """Format one line, as a compiler reports an error."""
        return f"{self.path}:{self.line}: {self.word} -> {self.use}"


@dataclass(frozen=True)
class Text:
    """A piece of text and the line of its file on which it begins."""

    text: str
    line: int
    is_message: bool


def load(path: Path = TABLE) -> Table:
    """Read a table.

    Raises:
        ValueError: an exemption has no reason, or a word no replacement.
    """
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    words = [Word(_whole(entry["pattern"]), entry["use"], entry.get("messages_only", False)) for entry in data["word"]]
    exemptions = [
        Exemption(entry["path"], _whole(entry["pattern"]), entry["reason"]) for entry in data.get("exemption", ())
    ]
    if not all(word.use for word in words) or not all(exemption.reason for exemption in exemptions):
        raise ValueError(f"{path}: each word needs `use`, and each exemption needs `reason`")
    return Table(tuple(words), tuple(exemptions), tuple(data["skipped"]), tuple(data["explanations"]))


def _whole(pattern: str) -> re.Pattern[str]:
    """Compile a pattern for whole words, in either case; a space also matches a line break, even inside a comment."""
    spaced = pattern.replace(" ", r"\s+(?:# )?")
    return re.compile(rf"(?<!\w)(?:{spaced})(?!\w)", re.IGNORECASE)


def check(root: Path, table: Table) -> list[Hit]:
    """Find every retired word below a folder, in the order of files and lines."""
    return sorted(hit for path in _files(root, table) for hit in _check_file(path, root, table))


def _files(root: Path, table: Table) -> Iterator[Path]:
    """Yield all documents and Python files that are not skipped; symbolic links are not followed."""
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [
            name for name in folders if not name.startswith(".") and not _is_any(here / name, root, table.skipped)
        ]
        for name in names:
            path = here / name
            if path.suffix in DOCUMENTS | {".py"} and not _is_any(path, root, table.skipped):
                yield path


def _is_any(path: Path, root: Path, globs: Iterable[str]) -> bool:
    relative = path.relative_to(root).as_posix()
    return any(fnmatchcase(relative, glob) for glob in globs)


def _check_file(path: Path, root: Path, table: Table) -> Iterator[Hit]:
    source = path.read_text(encoding="utf-8")
    is_explanation = _is_any(path, root, table.explanations)
    texts = strings(source) if path.suffix == ".py" else [_document(source, is_message=not is_explanation)]
    exempt = [exemption.pattern for exemption in table.exemptions if _is_any(path, root, [exemption.path])]
    for text in texts:
        for word in table.words:
            if word.messages_only and (is_explanation or not text.is_message):
                continue
            for match in word.pattern.finditer(text.text):
                if not any(pattern.fullmatch(match[0]) for pattern in exempt):
                    line = text.line + text.text.count("\n", 0, match.start())
                    yield Hit(str(path.relative_to(root)), line, " ".join(match[0].split()), word.use)


def _document(source: str, *, is_message: bool) -> Text:
    """Remove generated blocks and template code from a document, but keep their line breaks for the line numbers."""
    for left_out in (GENERATED, TEMPLATE_CODE):
        source = left_out.sub(lambda block: "\n" * block[0].count("\n"), source)
    return Text(source, 1, is_message)


def strings(source: str) -> Iterator[Text]:
    """Yield the string literals of a Python file, with public docstrings; `is_message` is False for a docstring.

    Private docstrings are left out, since no user sees them. Dictionary keys and indices are left out, since they are
    names of fields. Of an f-string, only the constant parts are yielded.
    """
    tree = ast.parse(source)
    left_out: set[ast.AST | None] = set()
    docstrings: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            left_out.update(node.keys)
        elif isinstance(node, ast.Subscript):
            left_out.add(node.slice)
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = getattr(node, "name", "")
            is_private = name.startswith("_") and not name.endswith("__")
            for statement in node.body:  # the docstring, and strings below fields, which document them
                if isinstance(statement, ast.Expr):
                    (left_out if is_private else docstrings).add(statement.value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            yield Text(node.value, node.lineno, node not in docstrings)


def main() -> None:
    """Print the hits in this repository, or in the folder that is given as argument; exit with 1 if there are any."""
    hits = check(Path(sys.argv[1]) if sys.argv[1:] else ROOT, load())
    sys.stdout.writelines(f"{hit}\n" for hit in hits)
    sys.exit(1 if hits else 0)


if __name__ == "__main__":
    main()
