"""Plant a slower commit in a history of 16, and find it: `python examples/planted_history.py [FOLDER]`.

It takes two to four minutes and needs git. Every commit changes the function without changing its answer. The tenth
computes the scores four times. The script exits with 0 if `git bisect run attnbench compare ... --bisect` names it.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

PLANTED, NUM_COMMITS = 10, 16
FUNCTION = '''"""Version {number}."""

import math


def attention(query, key, value, *, mask=None, scale=None):
    """Query (B, H, T, K), key and value (B, H, S, K); mask: True may attend -> (B, H, T, K)."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query @ key.mT * scale
{more}    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    return scores.softmax(-1) @ value
'''
SLOWER = "    scores = sum(query @ key.mT * scale for _ in range(4)) / 4\n"
COMPARE = (
    *(sys.executable, "-m", "attnbench", "compare", "rev:good", "rev:WORKTREE", "-i", "mine.py:attention"),
    *("--bisect", "--quiet"),
    *("--set", "seq_len=256", "--set", "mask=none", "--set", "scope=attention", "--set", "direction=inference"),
    *("--set", "dtype=float32", "--set", "num_threads=1", "--budget", "40", "--smallest-effect", "0.1"),
)


def git(folder: Path, *words: str) -> str:
    """Run git in a folder, and return its output.

    Raises:
        subprocess.CalledProcessError: the command fails.
    """
    command = ["git", "-c", "user.name=someone", "-c", "user.email=someone@example.org", *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout  # noqa: S603


def plant(folder: Path) -> str:
    """Make a repository of 16 commits, the tenth of which makes the function slower; return the hash of that commit."""
    git(folder, "init", "--quiet")
    for number in range(1, NUM_COMMITS + 1):
        text = FUNCTION.format(number=number, more=SLOWER if number >= PLANTED else "")
        (folder / "mine.py").write_text(text, encoding="utf-8")
        git(folder, "add", "mine.py")
        git(folder, "commit", "--quiet", "--message", f"Version {number}")
        if number == 1:
            git(folder, "tag", "good")
    return git(folder, "rev-parse", f"HEAD~{NUM_COMMITS - PLANTED}").strip()


def main(folder: Path) -> int:
    """Plant the history and bisect it; return 0 if the planted commit is named."""
    planted = plant(folder)
    git(folder, "bisect", "start", "HEAD", "good")
    done = subprocess.run(["git", "bisect", "run", *COMPARE], cwd=folder, check=False, text=True)  # noqa: S603, S607
    named = git(folder, "rev-parse", "refs/bisect/bad").strip()
    subject = git(folder, "log", "-1", "--format=%s", named).strip()
    print(f"planted {planted[:10]}, found {named[:10]} ({subject}), git's exit code {done.returncode}")
    return int(named != planted or done.returncode != 0)


if __name__ == "__main__":
    if sys.argv[1:]:
        Path(sys.argv[1]).mkdir(parents=True)
        sys.exit(main(Path(sys.argv[1])))
    with tempfile.TemporaryDirectory(prefix="attnbench-bisect-") as name:
        sys.exit(main(Path(name)))
