"""Which runs there are, each once: copies are passed over, and two runs that claim one name are refused."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from attnbench.analysis.frame import runs_at
from attnbench.analysis.history.series import RATIO
from attnbench.analysis.results import Results, read
from attnbench.storage.journal import JOURNAL


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Runs in the order of time, and what was noticed on the way."""

    runs: tuple[Results, ...]
    notes: tuple[str, ...]


def gather(paths: Iterable[Path]) -> Gathered:
    """Every run at the paths: run folders, journals, or folders of them.

    Raises:
        ValueError: nothing can be read, or two different runs have the same name.
    """
    notes: list[str] = []
    kept: dict[str, tuple[bytes, Results]] = {}
    for folder in dict.fromkeys(run.resolve() for path in paths for run in runs_at(path)):
        journal = folder if folder.is_file() else folder / JOURNAL
        results, content = read(journal), journal.read_bytes()
        other = kept.get(results.run)
        if other is not None:
            notes.append(_repeated(results, content, other))
        if other is None or len(content) > len(other[0]):
            kept[results.run] = content, results
    runs = sorted((results for _, results in kept.values()), key=lambda results: (results.started.time, results.run))
    return Gathered(runs=tuple(runs), notes=tuple(notes))


def alike(runs: Sequence[Results], metric: str) -> tuple[list[Results], tuple[str, ...]]:
    """The runs whose values mean the same as the newest's, and what is said of the others.

    A ratio is to the baseline of its run, and to a state of the code where a run compared two; a time is of warm or of
    cold caches.
    """
    kept = [run for run in runs if metric != RATIO or run.plan.sides is None]
    terms = [(run.plan.baseline if metric == RATIO else "", run.plan.cache) for run in kept]
    same = [run for run, its in zip(kept, terms, strict=True) if its == terms[-1]]
    notes = []
    if len(kept) < len(runs):
        notes.append(f"runs left out, since their ratios are to another state of the code: {len(runs) - len(kept)}")
    if len(same) < len(kept):
        notes.append(
            f"runs left out, since the newest has another baseline or other caches than they: {len(kept) - len(same)}"
        )
    return same, tuple(notes)


def _repeated(results: Results, content: bytes, other: tuple[bytes, Results]) -> str:
    """What is said of a second journal of the same run.

    Raises:
        ValueError: it tells another story.
    """
    short, long = sorted((content, other[0]), key=len)
    if not long.startswith(short):
        where = f"{other[1].folder} and {results.folder}"
        raise ValueError(f"two different runs are called {results.run}: {where}; rename or leave out one of them")
    if short == long:
        return f"{results.run} is there twice: counted once"
    return f"{results.run} is there twice, once cut short: the longer journal counts"
