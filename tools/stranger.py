"""Install a wheel in a new environment, use it as a new user would, and remove it: `python -m tools.stranger WHEEL`.

The commands run in an empty folder. `--packages FOLDER` names a folder of site-packages with everything that the wheel
needs, so that torch is not downloaded again. Without this option, pip installs everything.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = ROOT / "constraints.txt"


def readme() -> str:
    """Return the example file mine.py from the README; the README's commands check the function in it."""
    found = re.search(
        r"```python\n# file: mine\.py\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL
    )
    assert found, "the README has no mine.py"
    return found[1]


def try_all(wheel: Path, folder: Path, packages: Path | None) -> None:
    """Install the wheel in a new environment below `folder`, use it, and uninstall it.

    Raises:
        RuntimeError: a command fails, its output lacks an expected text, or files are left after the removal.
    """
    venv.create(folder / "environment", with_pip=True)
    binaries, here = folder / "environment" / "bin", folder / "empty"
    here.mkdir()
    (here / "mine.py").write_text(readme(), encoding="utf-8")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COVERAGE", "ATTNBENCH"))
    }
    environment |= {
        "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "NO_COLOR": "1",
        "SHELL": "/bin/bash",
    }

    def run(command: str, *expected: str) -> None:
        sys.stdout.write(f"$ {command}\n")
        done = subprocess.run(  # noqa: S603 - commands of this file
            ["/bin/bash", "-euc", command],
            cwd=here,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        missing = [each for each in expected if each not in done.stdout]
        if done.returncode or missing:
            raise RuntimeError(f"{command}\nexit code {done.returncode}, without {missing}:\n{done.stdout}")

    run(f"python -m pip install {'--no-deps' if packages else f'-c {CONSTRAINTS}'} {wheel}", "Successfully installed")
    if packages:  # only now, so that pip did not see them
        (site,) = (folder / "environment" / "lib").glob("python*/site-packages")
        (site / "packages.pth").write_text(f"{packages}\n", encoding="utf-8")
    version = wheel.name.split("-")[1]
    run("attnbench --version", f"attnbench {version}")
    run("python -m attnbench --version", f"attnbench {version}")
    run("attnbench check mine.py:mine", "mine: right")
    run("attnbench --show-completion", "_ATTNBENCH_COMPLETE")
    run("attnbench --install-completion && test -s ~/.bash_completions/attnbench.sh", "completion installed")
    run("_ATTNBENCH_COMPLETE=complete_bash COMP_WORDS='attnbench com' COMP_CWORD=1 attnbench", "compare")
    run("python -m pip uninstall --yes attnbench", "Successfully uninstalled")
    run(f"! test -e {binaries}/attnbench && ! python -c 'import attnbench'")
    left = [path for path in (folder / "environment").rglob("*attnbench*") if path.exists()]
    if left:
        raise RuntimeError(f"left behind: {left}")


def main() -> None:
    """Try the wheel that is given as argument, in a temporary folder."""
    parser = argparse.ArgumentParser(description="Install a wheel in an empty environment, use it and remove it.")
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--packages", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="attnbench-stranger-") as folder:
        try_all(given.wheel.resolve(), Path(folder), given.packages)


if __name__ == "__main__":
    main()
