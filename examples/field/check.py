"""Check the attention of other packages, and write results/gallery/field/README.md: `nox -s field`.

Each file from_*.py takes part by its path, as anybody's would. The table is made from the run's journal; with a run's
folder as argument it is made anew from that run, without another check.
"""

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from attnbench.commands.progress import watching
from attnbench.processes import session as run
from attnbench.processes.planning import Selection, plan
from attnbench.reports.markdown import escaped
from attnbench.reports.words import plain
from attnbench.storage.journal import Results, read
from attnbench.storage.records import Record, Status
from attnbench.units import significant

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TABLE = ROOT / "results" / "gallery" / "field" / "README.md"
COLUMNS = ("implementation", "package", "checked", "masks", "outcome", "worst error / allowed", "notes")
HUGE = 1000.0

INTRODUCTION = """# The field

Attention that others wrote, each through an adapter of a few lines ([examples/field](../../../examples/field)), checked
against the float64 oracle: output, gradient of the input and gradients of all weights, forward and backward, in scope
`module`. `nox -s field` makes this page anew from what is installed by
[requirements.txt](../../../examples/field/requirements.txt).

*Checked* counts the workloads of [sweep.toml](../../../examples/field/sweep.toml) that the module takes part in; the
others are `unsupported`, since they have other biases, sizes or masks than it has. An error above 1 disagrees.
To disagree is not always a defect: where a package has another convention, or a call that its signature invites means
something else, the note says so. Each note was read off the package's code.
"""
ABSENT = {
    "fairseq 0.12.2": "needs omegaconf 2.0, whose metadata pip refuses since 24.1; on Python 3.11 its import fails",
    "labml-nn 0.5.1 with labml 0.5": "labml.tracker no longer has what it calls; checked with labml 0.4",
    "speechbrain 1.1.2": "imports torchaudio, whose library does not load beside a torch without CUDA",
    "torchtune 0.6.1 with torchao 0.18": "torchao no longer has what it imports; checked with torchao 0.9",
}
"""What was tried and could not be loaded on the machine of the committed table."""


def packages() -> dict[str, Any]:
    """Each package with its file and its entries."""
    return tomllib.loads((HERE / "field.toml").read_text(encoding="utf-8"))


def checked(specs: Sequence[str]) -> Results:
    """The results of one check of all; the journal is kept among the runs."""
    planned = plan(Selection(sweep=str(HERE / "sweep.toml"), implementations=specs, metrics=()), with_baseline=False)
    with watching() as watch:
        return run.execute(planned, run.new_folder(ROOT / "results", "field"), watch, stages=("check",))


def table(results: Results) -> Iterator[str]:
    """The page, line by line."""
    yield INTRODUCTION
    environment = next(record.environment for record in results.records if record.environment is not None)
    made = f"{results.started.time[:10]}, commit {results.started.commit}"
    yield f"On {escaped(environment.cpu)} with torch {environment.versions['torch']}, {made}."
    yield ""
    yield f"| {' | '.join(COLUMNS)} |"
    yield f"|{'|'.join(' --- ' for _ in COLUMNS)}|"
    for package, told in packages().items():
        for name, note in told["entries"].items():
            found = [record for record in results.records if record.implementation == name]
            yield f"| {' | '.join(_cells(name, package, found, note))} |"
    yield ""
    yield "Tried, and not loaded on this machine:"
    yield ""
    yield from (f"- {name}: {reason}" for name, reason in ABSENT.items())


def _cells(name: str, package: str, records: Sequence[Record], note: str) -> Iterator[str]:
    """What a row says, never blank."""
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
    """Check, or read a run, and write."""
    folder = HERE.relative_to(Path.cwd())
    specs = [f"{folder}/{told['file']}:{name}" for told in packages().values() for name in told["entries"]]
    results = read(Path(sys.argv[1])) if sys.argv[1:] else checked(specs)
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    TABLE.write_text("\n".join(table(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
