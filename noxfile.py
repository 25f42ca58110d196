"""Sessions for all work on this project: `nox` alone runs lint and tests, and `nox --list` shows all sessions."""

import os
import shutil
from itertools import chain
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"  # uv's resolver does not find every CPU build of torch that pip finds
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True
nox.options.sessions = ["lint", "tests"]

RESULTS = Path("results")
SOURCE = Path("harness")
TEXTBOOK_AND_COMPILED = ("sdpa", "sdpa_mask", "sdpa_bias", "fused", "fused+compile", "flex")
GALLERY = {
    "quick": ["--sweep", "quick"],
    "full": ["--sweep", "full"],
    "compiled": [
        *(option for name in TEXTBOOK_AND_COMPILED for option in ("--implementation", name)),
        *("--set", "seq_len=512,2048", "--set", "mask=none,causal", "--set", "direction=inference"),
        *("--set", "dtype=float32", "--set", "scope=attention", "--set", "batch_size=1", "--budget", "240"),
    ],
}
"""Runs stored in the gallery, by name, as options of `attnbench run`."""
GROUPS = nox.project.load_toml("pyproject.toml")
OPTIONAL = ("cluster", "pytest", "tensorboard", "transformers")
"""The extras that the extra `all` combines."""
QUICKLY = ["--no-compile", "-c", "constraints.txt"]  # no bytecode: most modules of the packages are never imported
IN_PARALLEL = ["--numprocesses=logical", "--dist=worksteal"]
INCONCLUSIVE = 3
"""Exit code of a run on a machine that is too busy for verdicts; its report is written all the same."""
ONE_THREAD = {
    **dict.fromkeys(("CI", "BUILD_NUMBER"), ""),  # else pytest prints whole differences: hours for two pictures
    "OMP_NUM_THREADS": "1",  # each core has tests of its own: a second thread would only compete
    "PYTHONDONTWRITEBYTECODE": "",  # write bytecode: tests start hundreds of processes, which would all compile it
}


def install(session: nox.Session, *groups: str) -> None:
    """Install the project in editable mode with its extra `all`, and these dependency groups."""
    session.install(*QUICKLY, "-e", ".[all]", *nox.project.dependency_groups(GROUPS, *groups))


def borrow(session: nox.Session, *groups: str) -> None:
    """Install dependency groups, and use the packages of the session `tests`, since installing torch takes a minute.

    If that session has no environment, or another Python, everything is installed. Programs of packages that are not
    installed here must be started as modules, `python -m`.
    """
    here = Path(session.virtualenv.location)
    for packages in here.with_name("tests").glob("lib/python*/site-packages"):
        own = here / packages.relative_to(here.with_name("tests"))
        if own.exists():  # both have the same Python
            (own / "tests.pth").write_text(f"{packages.resolve()}\n{SOURCE.resolve()}\n", encoding="utf-8")
            parts = [GROUPS["project"]["optional-dependencies"][name] for name in OPTIONAL]
            requirements = [*GROUPS["project"]["dependencies"], *chain(*parts)]
            requirements += nox.project.dependency_groups(GROUPS, *groups)
            session.install(*QUICKLY, *requirements)
            return
    install(session, *groups)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style, types, the direction of imports, and spelling, always of the whole project.

    The whole project is installed with the packages of its tests, torch included: without torch's types, mypy would
    treat every tensor and module as Any, and strictness would mean little in the files that matter most.
    """
    if session.posargs:
        session.error("lint checks the whole project: leave out what follows --, or run ruff on these files")
    borrow(session, "lint", "test")
    programs = nox.project.dependency_groups(GROUPS, "lint")
    session.install(*QUICKLY, "--ignore-installed", "--no-deps", *programs)  # borrowed packages have no programs here
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("codespell")
    session.run("zizmor", "--offline", "--no-progress", ".", *map(str, sorted(Path("examples/ci").glob("*.yml"))))
    session.run("python", "-m", "tools.retired_words")
    session.run("python", "-m", "tools.ratchet")


@nox.session
def tests(session: nox.Session) -> None:
    """Run the tests except long ones, which takes five minutes; arguments after -- go to pytest."""
    install(session, "test")
    session.run("python", "-m", "pytest", *(session.posargs or [*IN_PARALLEL, "--durations=15"]), env=ONE_THREAD)


@nox.session
def tests_long(session: nox.Session) -> None:
    """Run the tests that take long; arguments after -- go to pytest."""
    borrow(session, "test")
    options = session.posargs or [*IN_PARALLEL, "--durations=15"]
    session.run("python", "-m", "pytest", "-m", "long and not browser", *options, env=ONE_THREAD)


@nox.session
def triton(session: nox.Session) -> None:
    """Compile Triton kernels for four GPUs, and check them in Triton's interpreter; no GPU is needed.

    It renews the table of shared memory, results/gallery/gpu/shared_memory.md. Arguments after -- go to pytest; then
    the kernels are only checked.
    """
    borrow(session, "test", "triton")
    if not session.posargs:
        session.run("python", "-m", "studies.ahead", "--to", str(RESULTS / "gallery" / "gpu"), env=ONE_THREAD)
    options = session.posargs or [*IN_PARALLEL, "--durations=5"]
    session.run(
        *("python", "-m", "pytest", "-m", "not browser", *options, "tests/implementations/test_triton.py"),
        env=ONE_THREAD,
    )


@nox.session
def second(session: nox.Session) -> None:
    """Build a second device for PyTorch with the C++ compiler, and test on it; arguments after -- go to pytest."""
    borrow(session, "test")
    options = session.posargs or [*IN_PARALLEL, "--durations=5"]
    session.run("python", "-m", "pytest", "-m", "not browser", *options, "tests/devices/test_second.py", env=ONE_THREAD)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run all tests but those of documents, and fail if they cover too few lines; tracing slows them by a third."""
    borrow(session, "test")
    session.run("python", "-m", "coverage", "erase")
    everything = [*IN_PARALLEL, "-m", "not browser", "--ignore=tests/test_documents.py"]
    session.run("python", "-m", "coverage", "run", "-m", "pytest", *everything, env=ONE_THREAD)
    session.run("python", "-m", "coverage", "combine", "--quiet")
    session.run("python", "-m", "coverage", "report")


@nox.session
def old_faults(session: nox.Session) -> None:
    """Bring back each fault of tests/old_faults.toml in a copy: its test must fail; arguments after -- go to pytest."""
    borrow(session, "test")
    session.run("python", "-m", "pytest", "tests/old_faults.py", *session.posargs, env=ONE_THREAD)


@nox.session
def bench(session: nox.Session) -> None:
    """Run the quick sweep on the CPU, and on CUDA if there is one; arguments after -- replace its options."""
    install(session)
    found = set(RESULTS.glob("runs/*"))
    try:
        options = session.posargs or ["--sweep", "quick"]
        session.run("attnbench", "run", *options, success_codes=[0, INCONCLUSIVE])
    finally:
        for page in sorted(set(RESULTS.glob("runs/*/report.html")) - {run / "report.html" for run in found}):
            session.log(f"open {page}")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site in build/site, without a network; a broken link or a missing page is an error."""
    borrow(session, "docs")
    session.run("python", "docs/site.py")
    session.run("python", "-m", "zensical", "build", "--clean", "--strict")
    session.log("open build/site/index.html")


@nox.session
def package(session: nox.Session) -> None:
    """Build the wheel and the source distribution, and check them as an index would."""
    session.install("-c", "constraints.txt", "build", "twine")
    shutil.rmtree("build/dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "build/dist")
    session.run("python", "-m", "twine", "check", "--strict", *map(str, Path("build/dist").glob("*")))


@nox.session
def stranger(session: nox.Session) -> None:
    """Install the wheel of `nox -s package` in an empty environment, use it as the README says, and remove it.

    If there is no such wheel, one is built. Dependencies come from the environment of `nox -s tests`, if it exists.
    """
    wheels = [*Path("build/dist").glob("*.whl")]
    if len(wheels) != 1:
        session.install("-c", "constraints.txt", "build")
        folder = Path(session.create_tmp())
        shutil.rmtree(folder, ignore_errors=True)
        session.run("python", "-m", "build", "--wheel", "--outdir", str(folder), silent=True)
        wheels = [*folder.glob("*.whl")]
    (wheel,) = wheels
    here = Path(session.virtualenv.location)  # packages of the session `tests` are used, if it has an environment
    found = here.with_name("tests").glob("lib/python*/site-packages")
    packages = [path for path in found if (here / path.relative_to(here.with_name("tests"))).exists()]
    session.run("python", "-m", "tools.stranger", str(wheel), *(f"--packages={path.resolve()}" for path in packages))


@nox.session
def newest(session: nox.Session) -> None:
    """Run the tests with the newest version of each package, and list the versions: renew results/gallery/newest.md.

    The list is written only if all tests pass.

    Only torch has the version of constraints.txt, since newer releases may bring gigabytes for GPUs on Linux. To use
    another torch, set ATTNBENCH_TORCH to its requirement, such as torch==2.15.0.
    """
    torch = os.environ.get("ATTNBENCH_TORCH", "torch==" + constrained("torch"))
    newer = ("--upgrade", "--upgrade-strategy", "eager")
    session.install("--no-compile", *newer, torch, "-e", ".[all]", *nox.project.dependency_groups(GROUPS, "test"))
    session.run("python", "-m", "pytest", *(session.posargs or IN_PARALLEL), env=ONE_THREAD)
    session.run("python", "-m", "tools.versions", "--to", str(RESULTS / "gallery" / "newest.md"))


def constrained(package: str) -> str:
    """Return the version of a package in constraints.txt."""
    lines = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line.partition("==")[2] for line in lines if line.startswith(f"{package}=="))


@nox.session
def field(session: nox.Session) -> None:
    """Check the attention of other packages, and renew results/gallery/field."""
    lines = Path("examples/field/requirements.txt").read_text(encoding="utf-8").splitlines()
    alone = [line.partition(" ")[0] for line in lines if "# without its dependencies" in line]
    needs = [line.partition(" ")[0] for line in lines if line[:1].isalpha()]
    session.install("-c", "constraints.txt", "-e", ".[all]", *(each for each in needs if each not in alone))
    session.install("--no-deps", *alone)
    session.run("python", "examples/field/check.py")


@nox.session
def detection(session: nox.Session) -> None:
    """Plant every known mistake, and check honest code with 1000 seeds: renew results/gallery/detection (long)."""
    install(session)
    folder = str(RESULTS / "gallery" / "detection")
    session.run("python", "-m", "studies.detection", *(session.posargs or ["--to", folder]))


@nox.session
def margins(session: nox.Session) -> None:
    """Measure how close honest code and numeric tests come to a limit: renew results/gallery/margins (15 minutes)."""
    borrow(session, "test")
    folder = RESULTS / "gallery" / "margins"
    session.run("python", "-m", "studies.margins", *(session.posargs or ["--to", str(folder)]), env=ONE_THREAD)
    closest = Path(session.create_tmp()) / "closest.jsonl"
    closest.unlink(missing_ok=True)
    env = ONE_THREAD | {"ATTNBENCH_CLOSEST": str(closest.resolve())}
    options = [*IN_PARALLEL, "-q", "-m", "not browser"]
    session.run("python", "-m", "pytest", *options, "tests/checking", "tests/contract", env=env)
    session.run("python", "-m", "tests.closest", env=env)


@nox.session
def places(session: nox.Session) -> None:
    """Run all tests in each of several places: renew results/gallery/places (40 minutes; -- NAME+NAME ... --sample).

    Places are instruction sets, shifted addresses, threads, a busy machine, a random order, and other environments.
    """
    borrow(session, "test")
    folder = str(RESULTS / "gallery" / "places")
    session.run("python", "-m", "tests.places", "--to", folder, *session.posargs, env=ONE_THREAD)


@nox.session
def audit(session: nox.Session) -> None:
    """Measure the cost of fixed choices: renew results/gallery/fastest.

    It takes an hour; rerun it to resume.
    """
    install(session)
    folder = str(RESULTS / "gallery" / "fastest")
    session.run("python", "-m", "studies.audit", "--run", str(RESULTS / "audit"), "--to", folder, *session.posargs)


@nox.session
def cheats(session: nox.Session) -> None:
    """Run cheats and contaminations under --referee: renew results/gallery/trust (half an hour)."""
    install(session)
    folder = str(RESULTS / "gallery" / "trust")
    session.run("python", "-m", "studies.trust", "--to", folder, *session.posargs)


@nox.session
def torture(session: nox.Session) -> None:
    """Kill, stop, damage and starve runs for real: renew results/gallery/torture (20 minutes; -- --short)."""
    install(session)
    folder = str(RESULTS / "gallery" / "torture")
    session.run("python", "-m", "studies.torture", "--to", folder, *session.posargs)


@nox.session
def acceptance(session: nox.Session) -> None:
    """Run real sessions with a known truth: renew results/gallery/acceptance (hours; -- --list says how many)."""
    install(session, "acceptance")
    session.run("python", "-m", "studies.acceptance", *session.posargs)


@nox.session
def first_answer(session: nox.Session) -> None:
    """Measure the time of a check: renew results/gallery/first_answer (6 minutes)."""
    install(session)
    folder = str(RESULTS / "gallery" / "first_answer")
    session.run("python", "-m", "studies.first_answer", "--to", folder, *session.posargs)


@nox.session
def gallery(session: nox.Session) -> None:
    """Renew results/gallery/quick, or the runs named after -- (quick, full, compiled), and the figures from them."""
    install(session)
    for name in session.posargs or ["quick"]:
        if name not in GALLERY:
            session.error(f"there is no {name} in the gallery: choose among {', '.join(GALLERY)}")
        found = set(RESULTS.glob("runs/*"))
        session.run("attnbench", "run", *GALLERY[name])
        for run in sorted(set(RESULTS.glob("runs/*")) - found):
            shutil.rmtree(RESULTS / "gallery" / name, ignore_errors=True)
            session.run("attnbench", "report", str(run), "--to", str(RESULTS / "gallery" / name))
    session.run("python", "docs/figures.py")  # reduces the gallery to its committed files


@nox.session
def browser(session: nox.Session) -> None:
    """Open reports and TensorBoard in a browser without a network, and renew their pictures in results/gallery.

    It needs Chromium: `apt install chromium`, or the path of an installed one in ATTNBENCH_CHROMIUM.
    """
    install(session, "browser")
    pictures = str((RESULTS / "gallery" / "tensorboard").resolve())
    session.run("pytest", "-m", "browser", "tests/browser", *session.posargs, env={"ATTNBENCH_PICTURES": pictures})
