"""What an acceptance test found."""

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """One test's result: the limit was fixed before the test ran, and what misses it is printed as a miss."""

    id: str  # T1 to T16
    title: str  # what is tested, in a few words
    limit: str  # what was asked, in words with numbers
    found: str  # what was seen, in words with numbers
    passes: bool
    is_short: bool = False  # made with fewer repetitions than the limit asks for
    rivals: dict[str, str] = {}  # by tool, what it showed in the same session
    rows: tuple[dict[str, float | str], ...] = ()  # raw numbers behind it, for the tables and pictures
    cause: str = ""  # of a miss, where it is known
