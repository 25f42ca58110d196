"""The one place that turns an exception into a status and a line of text."""

import torch

from harness.predict import OutOfReachError
from harness.records import Status

LONGEST_MESSAGE = 300
MEMORY_SIGNS = ("can't allocate memory", "out of memory", "not enough memory")


def describe(error: BaseException) -> tuple[Status, str]:
    """What became of a cell that raised `error`."""
    if isinstance(error, OutOfReachError):
        return error.status, str(error)
    lines = str(error).strip().splitlines()
    first = lines[0][:LONGEST_MESSAGE] if lines else "no message"
    message = f"{type(error).__name__}: {first}"
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)):
        return Status.out_of_memory, message
    return Status.error, message
