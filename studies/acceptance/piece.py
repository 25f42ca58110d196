"""`python -m studies.acceptance.piece T1 0 FOLDER [--short]`: one piece, left in the folder whole or not at all."""

import sys
from pathlib import Path

import msgspec

from studies.acceptance import suite


def main(test: str, number: str, folder: str, *, short: bool) -> None:
    """Make it and write it."""
    made = suite.signed(suite.make(test, int(number), short=short), test, short=short)
    path = Path(folder) / f"{test}-{int(number):02d}.json"
    draft = path.with_suffix(".draft")
    written = msgspec.json.encode(made)
    msgspec.json.decode(written, type=suite.Piece)  # what cannot be read back is a crash of this piece
    draft.write_bytes(written)
    draft.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:4], short="--short" in sys.argv[4:])
