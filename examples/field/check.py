"""Check the attention of other packages, and write results/gallery/field/README.md: `nox -s field`.

Each file from_*.py is given by its path, as any user's file would be. The table is made from the run's journal. With a
run's folder as argument, it is made from that run, without another check.
"""

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnbench.analysis.results import Results, read
from attnbench.commands.running import execute
from attnbench.processes.execution import new_folder
from attnbench.processes.planning import build_plan
from attnbench.storage.records import Record, Status
from attnbench.units import escaped, plain, significant

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TABLE = ROOT / "results" / "gallery" / "field" / "README.md"
COLUMNS = ("implementation", "package", "checked", "masks", "outcome", "worst error / tolerance", "notes")
HUGE = 1000.0

INTRODUCTION = """# The field

Attention from other packages, each through an adapter of a few lines ([examples/field](../../../examples/field)),
checked against the float64 oracle: output, gradient of the input and gradients of all weights, forward and backward, in
scope `module`. `nox -s field` regenerates this page from the packages in
[requirements.txt](../../../examples/field/requirements.txt).

*Checked* counts the workloads of [sweep.toml](../../../examples/field/sweep.toml) that the module supports; the others
are `unsupported`, because the module has other biases, sizes or masks. Errors are relative to their tolerance: an
implementation with an error above 1 disagrees. A disagreement is not always a defect. If a package has another
convention, or an inviting call means something else, the note says so. Each note comes from reading the package's code.
"""
ABSENT = {
    "fairseq 0.12.2": "needs omegaconf 2.0, whose metadata pip refuses since 24.1; on Python 3.11 its import fails",
    "labml-nn 0.5.1 with labml 0.5": "labml.tracker no longer has what it calls; checked with labml 0.4",
    "speechbrain 1.1.2": "imports torchaudio, whose library does not load with a torch without CUDA",
    "torchtune 0.6.1 with torchao 0.18": "torchao no longer has what it imports; checked with torchao 0.9",
}
"""Packages that could not be loaded on the machine of the committed table, and why."""


def packages() -> dict[str, Any]:
    """Return each package with its file and its entries."""
    return tomllib.loads((HERE / "field.toml").read_text(encoding="utf-8"))


def checked(specs: Sequence[str]) -> Results:
    """Check all in one run, and return its results; the journal is kept with the other runs."""
    planned = build_plan(sweep=str(HERE / "sweep.toml"), implementations=specs, metrics=(), with_baseline=False)
    return execute(planned, new_folder(ROOT / "results", "field"), stages=("check",))


def table(results: Results) -> Iterator[str]:
    """Yield the page, line by line."""
    yield INTRODUCTION
    environment = next(record.environment for record in results.records if record.environment is not None)
    made = f"{results.started.time[:10]}, commit {results.started.commit}"
    yield f"On {escaped(environment.cpu)} with torch {environment.versions['torch']}, {made}."
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'|'.join(' --- ' for _ in COLUMNS)}|"
    for package, listing in packages().items():
        for name, note in listing["entries"].items():
            records = [record for record in results.records if record.implementation == name]
            yield f"| {' | '.join(_cells(name, package, records, note))} |"
    yield ""
    yield "Tried, but could not be loaded on this machine:"
    yield ""
    yield from (f"- {name}: {reason}" for name, reason in ABSENT.items())


def _cells(name: str, package: str, records: Sequence[Record], note: str) -> Iterator[str]:
    """Yield the cells of a row, none of them empty."""
    tried = [record for record in records if record.status is not Status.unsupported]
    counts = Counter(str(record.status) for record in tried)
    yield f"`{name}`"
    yield f"{package} {_version(package)}"
    yield f"{len(tried)} of {len(records)}"
    yield ", ".join(dict.fromkeys(record.workload.mask_rule.name for record in tried)) or "-"
    yield ", ".join(f"{number} {status}" for status, number in counts.items()) or "nothing could be checked"
    ratios = [record.agreement.error_ratio for record in tried if record.agreement is not None]
    finite = [ratio for ratio in ratios if ratio is not None]
    yield "not finite" if None in ratios else (_short(max(finite)) if finite else "-")
    yield escaped("; ".join(part for part in (note, _first_finding(tried)) if part)) or "-"


def _short(ratio: float) -> str:
    return significant(ratio, 2) if ratio < HUGE else f"{ratio:.0e}"


def _first_finding(records: Sequence[Record]) -> str:
    wrong = next((record for record in records if record.is_finding), None)
    if wrong is None:
        return ""
    return f"first on {wrong.workload.id}: {plain(wrong.message.partition('; also wrong')[0])}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(not installed)"


def main() -> None:
    """Run the check, or read a run, and write the page."""
    folder = HERE.relative_to(Path.cwd())
    specs = [f"{folder}/{listing['file']}:{name}" for listing in packages().values() for name in listing["entries"]]
    results = read(Path(sys.argv[1])) if sys.argv[1:] else checked(specs)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(table(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
