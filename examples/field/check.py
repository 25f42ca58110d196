"""Check public implementations as a user would, and write results/gallery/field/README.md: `nox -s field`.

Each file of this folder that field.toml names is checked by `attnbench check FILE --seed 7 --json`. The answer is
stored in results/gallery/field/parts, and used again as long as the file does not change. `python
examples/field/check.py NAME ...` checks the named files again in any case.
"""

import ast
import hashlib
import json
import statistics
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnbench.units import escaped

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TABLE = ROOT / "results" / "gallery" / "field" / "README.md"
ENTRIES: dict[str, Any] = tomllib.loads((HERE / "field.toml").read_text(encoding="utf-8"))
COMMAND = ("-m", "attnbench", "check", "--seed", "7", "--json")
TIMEOUT_S = 900.0
BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
COLUMNS = ("file", "package", "lines", "tries", "verdict", "what it means")

INTRODUCTION = """# The field

Attention of public packages, each plugged in by a file of its own ([examples/field](../../../examples/field)) and
checked by `attnbench check FILE --seed 7`. `nox -s field` regenerates this page with the packages in
[requirements.txt](../../../examples/field/requirements.txt).

*Lines* are those that the adapter takes: lines with code, without imports, comments and blank lines. *Tries* are runs
that somebody needed who had only [docs/adapters.md](../../../docs/adapters.md), in a trial before the last changes of
that page. A check stops after a wrong answer. *What it means* comes from reading the package's code.
"""


def num_lines(text: str) -> int:
    """Count the lines with code, without imports."""
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {line for node in imports for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    tokens = tokenize.generate_tokens(iter(text.splitlines(keepends=True)).__next__)
    code = [token for token in tokens if token.type not in BLANK]
    lines = {line for token in code for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - imported)


def answer(name: str, *, again: bool) -> dict[str, Any]:
    """Return the report of one file's check, as --json prints it; `again` ignores a stored one.

    Raises:
        ValueError: the check prints nothing.
    """
    file = HERE / f"{name}.py"
    digest = hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    part = TABLE.parent / "parts" / f"{name}.{digest}.json"
    if again or not part.exists():
        command = [sys.executable, *COMMAND, str(file.relative_to(ROOT))]
        done = subprocess.run(  # noqa: S603 - of our own files
            command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        if not done.stdout:
            raise ValueError(f"the check of {file.name} gives no answer: {done.stderr}")
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(done.stdout, encoding="utf-8")
    stored: dict[str, Any] = json.loads(part.read_text(encoding="utf-8"))
    return stored


def row(name: str, entry: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yield the cells of a file's row in the table."""
    judged = found["implementations"].get(name, {})
    failed = [cell for cell in found["cells"] if cell["status"] in {"error", "timeout", "crashed", "out_of_memory"}]
    words = judged.get("verdict", "not judged")
    compared = f"{judged.get('num_compared', 0)} of {judged.get('num_planned', len(found['cells']))} cells compared"
    details = [words, compared, *([f"{len(failed)} failed"] if failed else [])]
    yield f"[{name}](../../../examples/field/{name}.py)"
    yield f"{entry['package']} {installed(entry['package'])}"
    yield str(num_lines((HERE / f"{name}.py").read_text(encoding="utf-8")))
    yield str(entry["tries"])
    yield f"{found['ending']}: {', '.join(details)}"
    yield escaped(entry["means"])


def installed(package: str) -> str:
    """Return the installed version of a package."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def page(answers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the lines of the page."""
    lines = [num_lines((HERE / f"{name}.py").read_text(encoding="utf-8")) for name in answers]
    tries = [ENTRIES[name]["tries"] for name in answers]
    packages = {ENTRIES[name]["package"] for name in answers}
    first = next(iter(answers.values()))
    yield INTRODUCTION
    yield (
        f"{len(answers)} implementations of {len(packages)} packages: {statistics.median(lines):g} lines in the "
        f"median, at most {max(lines)}; {statistics.median(tries):g} try in the median, at most {max(tries)}. "
        f"With torch {first['versions']['torch']}."
    )
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'|'.join(' --- ' for _ in COLUMNS)}|"
    for name, found in answers.items():
        yield f"| {' | '.join(row(name, ENTRIES[name], found))} |"


def main() -> None:
    """Check the files without a stored answer and those named on the command line, and write the page."""
    answers = {name: answer(name, again=name in sys.argv[1:]) for name in ENTRIES}
    TABLE.write_text("\n".join(page(answers)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
