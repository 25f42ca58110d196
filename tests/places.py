"""Run all tests once in each of several places: instruction sets, addresses, threads, load, environments.

`nox -s places` runs all and renews results/gallery/places/places.md; `nox -s places -- avx2 shifted+order` renews two
rows. Names joined by + are one run in all of these places at once: if all tests pass, they pass in each of them; if a
test fails, run the places one by one. The outputs of pytest are in build/places.
"""

import argparse
import atexit
import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from attnbench.devices import processor

ROOT = Path(__file__).parents[1]
SHIFTING = Path(__file__).with_name("shifting.c")
LOGS = ROOT / "build" / "places"
ORDER = "ATTNBENCH_TEST_ORDER"
"""Environment variable with a seed: if it is set, the tests run in a random order (conftest.py)."""
SAMPLE = (
    *("tests/captured", "tests/checking", "tests/contract", "tests/implementations", "tests/inspection"),
    *("tests/invariance", "tests/models", "tests/ranks", "tests/processes/test_remote.py", "tests/test_case.py"),
)
"""The tests that compute tensors, for the places SAMPLED, where results differ in their last bits."""
SAMPLED = ("avx2+shifted", "default")
WHOLE = ("native", "avx2", "default+order", "shifted+folder+no_home", "threads+locale", "one_processor", "busy")
"""All places. Since a run takes minutes, places share a run if none can hide a failure of another."""
BUSY = "while True: pass"
LIMIT_S = 1800
"""Time limit of a test that hangs; busy processes slow tests down."""
HEAD = ("place", "what differs", "passed", "failed", "skipped", "seconds", "processor")
COUNTS = re.compile(r"(\d+) (passed|failed|skipped|error)")
SUMMARY = re.compile(rf"{COUNTS.pattern}.* in [\d.]+s")


@dataclass(frozen=True)
class Surroundings:
    """The differences of a place from `nox -s tests`, such as environment variables (None: unset)."""

    words: str
    variables: Mapping[str, str | None] = field(default_factory=dict)
    prefix: tuple[str, ...] = ()
    num_busy: int = 0


def capability() -> str:
    """Return the instruction set that PyTorch uses."""
    return torch.backends.cpu.get_cpu_capability().lower()


def of(name: str) -> Surroundings:
    """Limit PyTorch to an instruction set."""
    return Surroundings(f"instruction set {name}", {"ATEN_CPU_CAPABILITY": name})


def shift() -> Mapping[str, str | None]:
    """Compile the allocator that shifts tensors; return the variables that preload it."""
    library = Path(tempfile.mkdtemp(dir="/tmp")) / "shifting.so"  # LD_PRELOAD allows no blanks, TMPDIR does
    atexit.register(shutil.rmtree, library.parent)
    subprocess.run([compiler(), "-O2", "-shared", "-fPIC", "-o", str(library), str(SHIFTING)], check=True)
    return {"LD_PRELOAD": str(library)}


def compiler() -> str:
    """Return the path of a C compiler; "" if there is none."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), "")


def locale() -> str:
    """Return an installed locale of another language than English, or the locale C if there is none."""
    known = subprocess.run(["sh", "-c", "locale -a"], capture_output=True, text=True, check=False).stdout.split()
    return next((name for name in known if not name.startswith(("C", "POSIX", "en"))), "C")


def places(folder: Path) -> dict[str, Surroundings]:
    """Return the places that this machine offers, by name; `folder` gets a folder for temporary files."""
    strange = folder / "mit Leerzeichen und Umläuten"
    strange.mkdir()
    seed = os.environ.get(ORDER) or str(time.time_ns())
    found = {
        "native": Surroundings(f"nothing: instruction set {capability()}"),
        "avx2": of("avx2"),
        "default": of("default"),
        "threads": Surroundings("2 threads", {"OMP_NUM_THREADS": "2"}),
        "order": Surroundings(f"random order of tests, {ORDER}={seed}", {ORDER: seed}),
        "busy": Surroundings("beside two busy processes", num_busy=2),
        "locale": Surroundings(f"locale {locale()}, another time zone", {"LC_ALL": locale(), "TZ": "Pacific/Chatham"}),
        "no_home": Surroundings("no HOME", {"HOME": None}),
        "folder": Surroundings("blanks and umlauts in TMPDIR", {"TMPDIR": str(strange)}),
    }
    if shutil.which("taskset"):
        first = str(min(os.sched_getaffinity(0)))
        found["one_processor"] = Surroundings("one processor", prefix=("taskset", "--cpu-list", first))
    if compiler():
        found["shifted"] = Surroundings("tensors at shifted addresses", shift())
    return found


def together(places: Sequence[Surroundings]) -> Surroundings:
    """Combine places into one."""
    return Surroundings(
        "; ".join(place.words for place in places),
        {name: value for place in places for name, value in place.variables.items()},
        prefix=tuple(word for place in places for word in place.prefix),
        num_busy=sum(place.num_busy for place in places),
    )


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Keep this many processors busy within the context."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(name: str, place: Surroundings, options: Sequence[str]) -> tuple[str, ...]:
    """Run the tests in a place; return its row."""
    environment = {key: value for key, value in (os.environ | place.variables).items() if value is not None}
    command = [*place.prefix, sys.executable, "-m", "pytest", "-q", f"--timeout={LIMIT_S}"]
    number = "1" if "OMP_NUM_THREADS" in place.variables else "logical"  # threads that wait for each other spin
    command += [f"--numprocesses={number}", "--dist=worksteal"]
    LOGS.mkdir(parents=True, exist_ok=True)
    start_s = time.monotonic()
    with busy(place.num_busy), (LOGS / f"{name}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run([*command, *options], cwd=ROOT, env=environment, stdout=log, stderr=log, check=False)
    lines = (LOGS / f"{name}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    summary = next(filter(SUMMARY.search, reversed(lines)), "")
    counts = {kind: int(number) for number, kind in COUNTS.findall(summary)}
    failed = counts.get("failed", 0) + counts.get("error", 0) or int(code.returncode != 0)
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            print(line)  # noqa: T201 - its output
    numbers = (counts.get("passed", 0), failed, counts.get("skipped", 0), round(time.monotonic() - start_s))
    return (name, place.words, *map(str, numbers), f"{processor()}, {len(os.sched_getaffinity(0))} processors")


def table(rows: Iterable[Sequence[str]]) -> str:
    """Format the rows as a Markdown table."""
    lines = [HEAD, ["---"] * len(HEAD), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def rows_of(page: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """Parse the rows of a page, by place and processor."""
    cells = [tuple(line.strip("| ").split(" | ")) for line in page.splitlines() if line.startswith("| ")]
    return {(row[0], row[-1]): row for row in cells[2:]}


def main() -> None:
    """Run the tests in the places named, or in all; exit with 1 if a test fails."""
    parser = argparse.ArgumentParser(description=__doc__, prog="nox -s places --")
    parser.add_argument("names", nargs="*")
    parser.add_argument("--to", type=Path, help="the folder of the table")
    parser.add_argument("--sample", action="store_true", help="tests that compute tensors, in three places; no table")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        known = places(Path(folder))
        if unknown := {name for names in asked.names for name in names.split("+")} - set(known):
            parser.error(f"no {', '.join(sorted(unknown))} here: choose among {', '.join(known)}")
        page = asked.to / "places.md"
        rows = rows_of(page.read_text(encoding="utf-8")) if page.exists() else {}
        usual = SAMPLED if asked.sample else WHOLE
        made = {}
        for names in asked.names or [name for name in usual if name != capability()]:
            name = "+".join(part for part in names.split("+") if part in known)
            if not name:
                continue
            made[name] = run(name, together([known[part] for part in name.split("+")]), SAMPLE if asked.sample else ())
            print(" | ".join(made[name]), flush=True)  # noqa: T201 - its output
            if not asked.sample:
                asked.to.mkdir(parents=True, exist_ok=True)
                rows[name, made[name][-1]] = made[name]
                page.write_text(f"# The tests in other places\n\n`nox -s places` made this.\n\n{table(rows.values())}")
    sys.exit(any(row[3] != "0" for row in made.values()))


if __name__ == "__main__":
    main()
