"""Format quantities, text and tables; parse quantities; group items."""

import html
import itertools
import math
import re
import textwrap
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TypeVar

import msgspec

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

SCALES: dict[str, tuple[tuple[float, str], ...]] = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")),
    "bytes": ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B")),
    "bytes/s": ((1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s")),
    "flops/s": ((1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1e3, "kFLOP/s"), (1.0, "FLOP/s")),
    "flops": ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP"), (1.0, "FLOP")),
}
"""The divisors and symbols of each unit, largest divisor first."""
MISSING = "-"
FORMULA_STARTS = ("=", "+", "-", "@")  # characters with which a spreadsheet begins a formula
NARROWEST, UNBROKEN = 12, 40
"""Smallest widths, in characters, to which `text_lines` narrows columns: UNBROKEN for the first, NARROWEST for all
others."""


def scale_of(value: float, unit: str) -> tuple[float, str]:
    """Return the (divisor, symbol) of the largest scale in which `value`, given in `unit`, is at least 1 when rounded.

    Smaller values get the smallest scale. A unit without scales is shown unchanged: (1.0, unit).
    """
    scales = SCALES.get(unit, ((1.0, unit),))
    for divisor, symbol in scales:
        if float(f"{abs(value) / divisor:.2e}") >= 1:  # 999.6 us are 1.00 ms
            return divisor, symbol
    return scales[-1]


def show(value: float | None, unit: str = "", *, digits: int = 3) -> str:
    """Format `value` in a fitting scale of `unit`, to `digits` significant digits; "-" for None, NaN and infinity."""
    if value is None or not math.isfinite(value):
        return MISSING
    divisor, symbol = scale_of(value, unit)
    return f"{significant(value / divisor, digits)} {symbol}".rstrip()


def span(point: float, low: float | None, high: float | None, unit: str = "") -> str:
    """Format a value and its interval in one unit, with the precision of the interval: "1.23 ms (1.20 to 1.27)".

    Without an interval, format the value alone, as `show` does.
    """
    if low is None or high is None:
        return show(point, unit)
    divisor, symbol = scale_of(point, unit)
    lead = 1 + math.floor(math.log10(point / divisor))
    needed = 2 - math.ceil(math.log10((high - low) / 2 / point)) if high > low else 3
    decimals = max(0, min(max(needed, 3), 5) - lead)
    shown = [f"{value / divisor:.{decimals}f}" for value in (point, low, high)]
    return f"{shown[0]} {symbol}".rstrip() + f" ({shown[1]} to {shown[2]})"


UNITS = {
    "size": {"": 1, "B": 1}
    | {f"{name[0]}{end}": size for size, name in SCALES["bytes"][:-1] for end in ("", "B", "iB")},
    "duration": {"": 1, "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600},
    "share": {"": 1, "%": 0.01},
}
"""The units that users may write for each kind of quantity, as multiples of a byte, a second, or 1."""
WRITTEN = {"size": "8GiB, 512MiB or 1000000", "duration": "90, 90s, 2min or 1h", "share": "0.02 or 2%"}
LEAST_BYTES = 1024  # a smaller size without a unit is rejected, since its unit was probably forgotten


def quantity(text: str, kind: str) -> float:
    """Parse a size into bytes, a duration into seconds, or a share into a fraction: 8GiB, 2min, 2%.

    `kind` is `size`, `duration` or `share`. A number without a unit is in bytes, in seconds, or a fraction. GiB, GB and
    G are all 2**30 bytes.

    Raises:
        ValueError: the text is not such a quantity, or is a size of a few bytes, which probably lacks its unit.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(?:[eE](-?\d+))?\s*([a-zA-Z%]*)", text.strip())
    units = {unit.lower(): size for unit, size in UNITS[kind].items()}
    if found is None or found[3].lower() not in units:
        raise ValueError(f"{text} is not a {kind}: write it as {WRITTEN[kind]}")
    value = float(f"{found[1]}e{found[2] or 0}") * units[found[3].lower()]
    if kind == "size" and not found[3] and 0 < value < LEAST_BYTES:
        raise ValueError(f"{text} is a size of {value:g} bytes: add the unit, as in {text.strip()}GiB")
    return value


def percent(share: float) -> str:
    """Format a share as a percentage: 0.0213 becomes "2.1 %"."""
    return f"{significant(100 * share, 2)} %"


def duration(seconds: float) -> str:
    """Format an approximate waiting time: "4 s"; "12 min" for two minutes or more; "3 h" for two hours or more."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{math.ceil(seconds)} s"


def significant(value: float, digits: int) -> str:
    """Format `value` to `digits` significant digits, or to a whole number, without an exponent: "0.0123", "12345"."""
    if value == 0.0:
        return "0"
    rounded = abs(float(f"{value:.{digits - 1}e}"))
    decimals = max(0, digits - 1 - math.floor(math.log10(rounded)))
    return f"{value:.{decimals}f}"


def sanitize_line(text: str, limit: int = 0) -> str:
    """Put text from outside on one line, without control or text-direction characters; cut it at `limit` (0: never)."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if not limit or len(line) <= limit else line[: limit - 3].rstrip() + "..."


ALIASES = {"fp64": "float64", "double": "float64", "fp32": "float32", "float": "float32", "single": "float32"} | {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "bwd": "backward",
    "fwd": "forward",
    "training": "forward_backward",
    "train": "forward_backward",
    "eval": "inference",
    "heads": "num_heads",
    "batch": "batch_size",
    "length": "seq_len",
    "gpu": "cuda",
    "full": "none",
}
"""Names that other projects use for values and axes, each with its name in attnbench."""


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Suggest a known value for an unknown one, as " (did you mean X?)"; return "" if none is similar."""
    names = list(known)
    near = [name for name in (ALIASES.get(given.lower()),) if name in names] or get_close_matches(given, names, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def escaped(text: str) -> str:
    """Escape pipes, tags and emphasis in text from outside, for a cell of a Markdown table."""
    return re.sub(r"([\\`|*\[\]~$])", r"\\\1", html.escape(text, quote=False))


def guarded(text: str) -> str:
    """Return one line of text for a spreadsheet cell; a formula gets an apostrophe in front, so that it stays text.

    Source: https://owasp.org/www-community/attacks/CSV_Injection.
    """
    line = sanitize_line(text)
    return f"'{line}" if line.startswith(FORMULA_STARTS) else line


def text_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], *, width: int = 0, right: Collection[int] = ()
) -> list[str]:
    """Format a table as lines of text, headings first; columns whose index is in `right` are aligned to the right.

    If the table is wider than `width` characters (0: no limit), the widest columns are wrapped, down to NARROWEST
    characters, or to UNBROKEN in the first column.
    """
    sizes = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    while width and sum(sizes) + 2 * (len(sizes) - 1) > width:
        wide = [place for place, size in enumerate(sizes) if size > (NARROWEST if place else UNBROKEN)]
        if not wide:
            break
        sizes[max(wide, key=lambda place: sizes[place])] -= 1
    lines = []
    for row in (headings, *rows):
        parts = [textwrap.wrap(text, size) or [""] for text, size in zip(row, sizes, strict=True)]
        for texts in itertools.zip_longest(*parts, fillvalue=""):
            padded = [
                text.rjust(size) if place in right else text.ljust(size)
                for place, (text, size) in enumerate(zip(texts, sizes, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
    return lines


def readable_json(value: object) -> str:
    """Format data as indented JSON; instances of subclasses of str, such as warnings with a name, become plain strings.

    Raises:
        TypeError: the data contain an object that cannot be written as JSON.
    """

    def text(part: object) -> str:
        if isinstance(part, str):  # msgspec takes subclasses of str for unknown objects
            return str(part)
        raise TypeError(f"{type(part).__name__} cannot be written as JSON")

    return msgspec.json.format(msgspec.json.encode(value, enc_hook=text), indent=2).decode()


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Format rows as a Markdown table with all text escaped; each row has the same columns, with a text for each."""
    import tabulate  # here, because --help needs no table

    columns = list(rows[0]) if rows else []
    headings = [escaped(column) for column in columns]

    def texts(row: Mapping[str, str]) -> list[str]:
        return [escaped(row[column]) for column in columns]

    return str(tabulate.tabulate(list(map(texts, rows)), headings, "github", disable_numparse=True))


def markdown_list(facts: Mapping[str, str]) -> str:
    """Format facts by name as a Markdown list; the facts are escaped, and the names are not."""
    return "\n".join(f"- **{name}**: {escaped(text)}" for name, text in facts.items())


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items by key; the groups are in the order of their first item."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


HUGE = 1000.0  # smallest multiple of a tolerance that `multiple` shows with an exponent


def multiple(value: float) -> str:
    """Format an error divided by its tolerance (`value`): "0.12"; "3e+04" for a thousand or more."""
    return significant(value, 2) if value < HUGE else f"{value:.0e}"


def factors(values: Sequence[float]) -> str:
    """Format the range of factors: "1.10x to 1.52x", or "1.10x" if both ends round to it; "1.00x" without factors."""
    ends = dict.fromkeys(f"{end:.2f}x" for end in (min(values, default=1.0), max(values, default=1.0)))
    return " to ".join(ends)


def listed(names: Sequence[str]) -> str:
    """Join names for a sentence: "a, b and c"; "none" if there are no names."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]])) or "none"
