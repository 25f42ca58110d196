"""Stage the pages of the documentation site below build/pages, and write those generated from the code.

Command: `python docs/site.py`, then `zensical build`; `nox -s docs` runs both commands. Documents keep their places
relative to each other, so that links that work in the repository also work on the site.
"""

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from typer.testing import CliRunner

from attnbench import plugins
from attnbench.cli import app
from attnbench.commands import EXIT_CODES, Command
from attnbench.explained import KINDS, explanations
from attnbench.reports import verdict
from attnbench.storage import events

ROOT = Path(__file__).parent.parent
PAGES = ROOT / "build" / "pages"
SINGLE = ("CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md", "LICENSE", "THIRD_PARTY_NOTICES")
SHOWN = {".md", ".png", ".svg", ".js", ".css"}
BADGE = re.compile(r"^\[?!\[[^\]]*\]\((?:\.\./\.\./|https:)[^\n]*\n", re.MULTILINE)
"""Badges are loaded from other servers; the site leaves them out."""
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
WIDTH = 100


def stage() -> None:
    """Copy documents and pictures to their places, with the README as the first page, and write the reference."""
    shutil.rmtree(PAGES, ignore_errors=True)
    PAGES.mkdir(parents=True)
    for folder in ("docs", "results/gallery"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and path.suffix in SHOWN:
                _copy(path, PAGES / path.relative_to(ROOT))
    for name in SINGLE:
        _copy(ROOT / name, PAGES / name)
    _copy(ROOT / "README.md", PAGES / "index.md")
    reference = PAGES / "reference"
    reference.mkdir()
    (reference / "commands.md").write_text("\n".join(commands()), encoding="utf-8")
    (reference / "words.md").write_text("\n".join(words()), encoding="utf-8")
    (reference / "words").mkdir()
    for kind in KINDS:
        (reference / "words" / f"{kind}.md").write_text("\n".join(meanings(kind)), encoding="utf-8")
    (reference / "verdict.md").write_text("\n".join(report()), encoding="utf-8")
    (reference / "journal.md").write_text("\n".join(journal()), encoding="utf-8")
    (reference / "decisions.md").write_text("\n".join(decisions()), encoding="utf-8")


def _copy(path: Path, to: Path) -> None:
    """Copy a file; in a document, drop badges and turn links to files that have no page into plain text."""
    to.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(path, to)
        return
    text = BADGE.sub("", path.read_text(encoding="utf-8"))
    to.write_text(LINK.sub(lambda found: _link(found, path), text), encoding="utf-8")


def _link(found: "re.Match[str]", path: Path) -> str:
    """Rewrite a link for the site: to the README as the first page, to a folder's README, or as plain text.

    Raises:
        ValueError: the target of the link does not exist.
    """
    target, anchor = (path.parent / found[1]).resolve(), found[2] or ""
    if not target.is_relative_to(ROOT) or not target.exists():
        raise ValueError(f"{path.relative_to(ROOT)} links to {found[1]}, which is not there")
    if target == ROOT / "docs" / "adr":
        target = PAGES / "reference" / "decisions.md"
    elif target.is_dir():
        target /= "README.md"
    if target == ROOT / "README.md":
        target = ROOT / "index.md"
    elif target.is_relative_to(ROOT / "build"):
        target = ROOT / target.relative_to(PAGES)
    elif not (target.exists() and _has_page(target)):
        return "]"
    here = ROOT if path == ROOT / "README.md" else path.parent
    return f"]({Path(os.path.relpath(target, here)).as_posix()}{anchor})"


def _has_page(target: Path) -> bool:
    place = target.relative_to(ROOT)
    is_shown = place.parts[0] == "docs" or place.parts[:2] == ("results", "gallery")
    return place.as_posix() in SINGLE or (is_shown and target.suffix in SHOWN)


def commands() -> Iterator[str]:
    """Build the page of the command line: the help of each command, and the exit codes."""
    yield from ("# Commands", "", "What `attnbench COMMAND --help` prints.", "", "## Exit codes", "")
    yield from ("| code | means |", "| --- | --- |")
    yield from (f"| {int(code)} | {text} |" for code, text in EXIT_CODES.items())
    found: dict[str, Command] = plugins.plugs("attnbench.commands", "COMMAND")
    for name in sorted(found, key=lambda name: found[name].order):
        yield from ("", f"## attnbench {name}", "", "```text", _help(name), "```")


def _help(name: str) -> str:
    environment = {"COLUMNS": str(WIDTH), "NO_COLOR": "1", "TERM": "dumb"}
    done = CliRunner().invoke(app, [name, "--help"], env=environment, prog_name="attnbench")
    return "\n".join(line.rstrip() for line in done.stdout.strip().splitlines())


def words() -> Iterator[str]:
    """Build the page that lists the words on screens and in JSON by kind, each with a link to its entry."""
    yield from ("# What a word means", "", "`attnbench explain NAME` prints one of these entries.", "")
    for kind, title in KINDS.items():
        names = [f"[{each.name}](words/{kind}.md#{anchor(each.name)})" for each in explanations() if each.kind == kind]
        yield from (f"**[{title}](words/{kind}.md)**: {', '.join(names)}", "")


def meanings(kind: str) -> Iterator[str]:
    """Build the page of one kind of words: an entry for each, as `attnbench explain NAME` prints it."""
    yield from (f"# {KINDS[kind]}", "", "`attnbench explain NAME` prints one of these entries.", "")
    for each in explanations():
        if each.kind == kind:
            yield from (f"## `{each.name}` {{#{anchor(each.name)}}}", "", each.means, "")
            yield from (f"- **Why it matters**: {each.why}", f"- **Example**: `` {each.example} ``")
            yield from (f"- **What to do**: {each.do}", "")


def anchor(name: str) -> str:
    """Return the anchor of a word on its page."""
    return re.sub(r"\W+", "-", name).strip("-").lower()


def journal() -> Iterator[str]:
    """Build the page of the journal's schema: every kind of line and every structure, with its fields."""
    yield from ("# The journal", "")
    yield f"A run's `journal.jsonl` has one JSON object in each line; schema {events.SCHEMA}."
    yield from ("Its `type` says which. [The decision](../docs/adr/0003-journal.md) says why.", "")
    yield from structures(events.Event)


def report() -> Iterator[str]:
    """Build the page of what --json prints: every structure, with its fields."""
    yield from ("# The verdict for programs", "")
    yield f"`attnbench check`, `run`, `compare` and `fastest` print one `Report` with --json; schema {verdict.SCHEMA}."
    yield from ("[The decision](../docs/adr/0050-one-verdict-for-programs.md) says why.", "")
    yield from structures(verdict.Report)


def structures(top: object) -> Iterator[str]:
    """Describe a type and the types of its fields: each with a table of fields, or its values."""
    _, parts = msgspec.json.schema_components([top])
    for name, part in parts.items():
        yield from (f"## {name}", "", str(part.get("description", "")).partition("\n")[0], "")
        fields = part.get("properties", {})
        if fields:
            yield from ("| field | kind | where it is left out |", "| --- | --- | --- |")
        needed = part.get("required", [])
        for field, kind in fields.items():
            default = "never" if field in needed else f"`{kind.get('default', '')!r}`"
            yield f"| `{field}` | {_kind(kind)} | {default} |"
        if "enum" in part:
            yield ", ".join(f"`{value}`" for value in part["enum"])
        yield ""


def _kind(schema: dict[str, Any]) -> str:
    """Describe a JSON schema in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array" and "items" in schema and schema["items"]:
        return f"list of {_kind(schema['items'])}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_kind(schema['additionalProperties'])}"
    return str(kind)


def decisions() -> Iterator[str]:
    """Build the page that lists the decision records of docs/adr, in their order."""
    yield from ("# Decisions", "", "Each says what was decided, why, and what follows.", "")
    for path in sorted((ROOT / "docs" / "adr").glob("*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        yield f"- [{title}](../docs/adr/{path.name})"


if __name__ == "__main__":
    stage()
