"""The options that several commands share, with their help texts."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="AXIS=V,V", help="Values of an axis, in place of the sweep's. May be repeated."),
]
Implementations = Annotated[
    list[str] | None,
    typer.Option(
        "--implementation",
        "-i",
        metavar="NAME|FILE.py:NAME",
        help="Which to run; may be repeated. NAME+compile: by torch.compile. LABEL=FILE.py:NAME: under another name. "
        "Default: those of the sweep, or all.",
    ),
]
ResultsFolder = Annotated[Path, typer.Option("--results", metavar="DIR", help="Where runs are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")]
OpenPage = Annotated[bool, typer.Option("--open", help="Open the page in a browser.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the inputs that are checked and of all orders.")]
Timeout = Annotated[
    float,
    typer.Option(
        "--timeout", min=1.0, help="Seconds: a step (a probe, a sample, a metric) that lasts longer is killed."
    ),
]
CallLimit = Annotated[
    float | None,
    typer.Option(
        "--call-limit",
        min=0.0,
        help="Seconds: a cell whose call is predicted to last longer is not tried. Default: the sweep's.",
    ),
]
Budget = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="SECONDS",
        help="Wall time of the run, spent where doubt is. It ends earlier when all is decided, and later only "
        "where checks and first rounds take longer. Default: the sweep's.",
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        min=3,
        help="Visits that every cell gets, decided or not; 3 are usual, 12 for runs that a gate is to judge.",
    ),
]
SmallestEffect = Annotated[
    float | None,
    typer.Option(
        "--smallest-effect",
        metavar="SHARE",
        help="Times that differ by less are called equivalent, and never slower: 0.01 takes longer and sees more. "
        "Default: the sweep's, 0.02.",
    ),
]
MemoryLimit = Annotated[
    float, typer.Option("--memory-limit", min=0.0, help="GiB a call may need; 0: three quarters of what is free.")
]


class CacheMode(StrEnum):
    """What a timed call finds in the caches."""

    warm = "warm"
    cold = "cold"


Cache = Annotated[
    CacheMode, typer.Option("--cache", help="warm: after an untimed call; cold: emptied before every call.")
]


class AllocatorMode(StrEnum):
    """What the C library does with large blocks that are freed."""

    system = "system"
    retain = "retain"


Allocator = Annotated[
    AllocatorMode,
    typer.Option("--allocator", help="retain: freed memory stays with the process: no call pays for new pages."),
]
