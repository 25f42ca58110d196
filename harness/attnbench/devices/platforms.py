"""Systems other than Linux: the first line of every command says what works there."""

import platform
import sys
from importlib.util import find_spec

NEEDED = ("fcntl", "resource")  # modules of Python that every command needs, and that Windows lacks
WORKS = "Linux"
ELSEWHERE = (
    "{}: untried. check: answers are compared as on Linux, with workers that take seconds to start. run: times are of "
    "the same clock, but page faults and waits for a processor are not counted, and memory is not limited."
)
NOTHING = "{}: nothing works here, since Python has no {} here. On Windows, run attnbench in WSL 2."


def first_line() -> str:
    """Return a sentence on what works on this system; "" on Linux, where everything works."""
    system = platform.system()
    return "" if system == WORKS else ELSEWHERE.format(system)


def require() -> None:
    """Exit with code 2 and one line of explanation on systems where the commands cannot even be imported."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        sys.stderr.write(f"{NOTHING.format(platform.system(), ' and no '.join(missing))}\n")
        raise SystemExit(2)
