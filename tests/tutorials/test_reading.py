"""The table of docs/tutorials.md that compares the lengths of files."""

from pathlib import Path

from examples.tutorials import reading

ROOT = Path(__file__).parents[2]
SHOWPIECE = ("naive_loop", "module_list", "fused", "bmm", "einsum", "sdpa", "chunked")


def test_the_page_shows_files_of_at_most_sixty_lines_as_they_are():
    page = (ROOT / "docs" / "tutorials.md").read_text(encoding="utf-8")
    files = [ROOT / "implementations" / f"{name}.py" for name in SHOWPIECE]
    assert "\n".join(reading.rows(map(str, files))) in page
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 60 for file in files)
