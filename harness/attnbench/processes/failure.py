"""The one place that turns an exception into a status and a line of text."""

import traceback
from pathlib import Path

import torch

from attnbench.checking.reference import UncheckableError
from attnbench.contract.compiled import NotOneGraphError
from attnbench.storage.records import Status

LONGEST_MESSAGE = 300
MEMORY_SIGNS = ("can't allocate memory", "out of memory", "not enough memory")
OURS = Path(__file__).parents[1]
INSTALLED = Path(torch.__file__).parents[1]


class OutOfReachError(Exception):
    """A cell is predicted not to fit; carries the status and the reason."""

    def __init__(self, status: Status, reason: str) -> None:
        """Keep both."""
        super().__init__(reason)
        self.status = status


def describe(error: BaseException) -> tuple[Status, str]:
    """The status of a cell that raised `error`, and a message that names the line in the implementation's own file."""
    if isinstance(error, OutOfReachError):
        return error.status, str(error)
    if isinstance(error, UncheckableError | NotOneGraphError):
        return Status.unsupported, str(error)
    lines = str(error).strip().splitlines()
    first = lines[0][:LONGEST_MESSAGE] if lines else "no message"
    message = f"{type(error).__name__}: {first}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.exists() and OURS not in path.parents and INSTALLED not in path.parents:
            message += f" ({path.name}, line {frame.lineno})"
            break
    is_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
    if is_memory or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in MEMORY_SIGNS)):
        return Status.out_of_memory, message
    return Status.error, message
