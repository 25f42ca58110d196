"""Closing screens of made-up sweeps; `python -m tests.reports.snapshots` renews the stored texts of the tests."""

import tempfile
from collections.abc import Callable
from pathlib import Path

from attnbench.analysis.results import Results
from attnbench.reports.screen import screen
from tests import journals

FOLDER = Path(__file__).parents[1] / "data" / "screens"
LARGE = (
    *journals.workloads(
        scope=("attention", "module"),
        direction=("inference", "forward_backward"),
        dtype=("float32", "bfloat16", "float16"),
        mask=("none", "causal", "sliding_window(64)", "padding"),
        seq_len=(64, 512),
    ),
    *journals.workloads(num_kv_heads=(1, 2, 4), seq_len=(1,), kv_len=(128, 1024, 8192)),
)
NAMES = ("sdpa", "sdpa_flash", "fused", "bmm", "chunked")
SWEEPS: dict[str, Callable[[Path], Results]] = {
    "quick": journals.quick,
    "usual": journals.write,
    "one shape": lambda folder: journals.write(folder, journals.USUAL[:1], ("sdpa", "fused")),
    "one implementation": lambda folder: journals.write(folder, journals.USUAL, ("sdpa",)),
    "no baseline": lambda folder: journals.write(folder, journals.USUAL, ("fused", "bmm")),
    "wrong": lambda folder: journals.write(folder, journals.USUAL, ("sdpa", "liar", "module_list")),
    "unfinished": lambda folder: journals.write(folder, num_epochs=1, is_finished=False),
    "empty": lambda folder: journals.write(folder, (), ()),
    "many lengths": lambda folder: journals.write(
        folder, journals.workloads(mask=("none", "causal"), seq_len=tuple(range(64, 64 * 21, 64))), num_epochs=4
    ),
    "large": lambda folder: journals.write(folder, LARGE, NAMES, num_epochs=4),
}


def text(results: Results) -> str:
    """Return the text of the closing screen, with RUN in place of the run's folder."""
    lines = "".join(f"{line.text}\n" for line in screen(results))
    return lines.replace(str(results.folder), "RUN")


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, make in SWEEPS.items():
        with tempfile.TemporaryDirectory() as folder:
            (FOLDER / f"{name}.txt").write_text(text(make(Path(folder))), encoding="utf-8")


if __name__ == "__main__":
    main()
