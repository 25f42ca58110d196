"""How caches are emptied before every call of a cold measurement: by writing twice as much as the largest one holds."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from attnbench.devices.cuda import l2_bytes

SYSTEM = Path("/sys/devices/system/cpu/cpu0/cache")
ASSUMED_BYTES = 32 * 2**20
"""Where the system does not tell."""
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "": 1}


def cpu_bytes(folder: Path = SYSTEM) -> int:
    """The size of the processor's largest cache, as the system tells it."""
    told = [path.read_text().strip() for path in folder.glob("index*/size")]
    sizes = [re.fullmatch(r"(\d+)([KMG]?)", text) for text in told]
    return max((int(size[1]) * UNITS[size[2]] for size in sizes if size), default=ASSUMED_BYTES)


def largest_bytes(device: str) -> int:
    """The size of the device's largest cache."""
    return cpu_bytes() if device == "cpu" else l2_bytes(device)


@cache
def flusher(device: str) -> Callable[[], object]:
    """What empties the caches of that device: a write to a buffer of twice their size."""
    buffer = torch.empty(2 * largest_bytes(device), dtype=torch.uint8, device=device)
    return lambda: buffer.add_(1)
