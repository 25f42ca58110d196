"""Atomic writes of files, and output folders."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomically(path: Path, content: str | bytes) -> Path:
    """Write a file, and replace the old file only when the new content is on the disk; return its path.

    Raises:
        OSError: the file cannot be written; the error names the file, and the old file is unchanged.
    """
    half = path.with_name(f"{path.name}.part")
    try:
        with half.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        half.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        half.unlink(missing_ok=True)
    return path


@contextmanager
def writing_to(folder: Path, option: str = "--to") -> Iterator[None]:
    """Create a folder for files that are written inside the `with` statement.

    Raises:
        ValueError: the folder or a file cannot be written; the message names `option`, which chooses another folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        what = error.filename or folder
        raise ValueError(f"cannot write to {what}: {error.strerror}; choose another folder with {option}") from None
