"""Unusual honest forms, run through the real check: none may be rejected."""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from attnbench.storage.records import Status
from studies.trust import forms, sessions

LIMIT_S = 900
COMPILED = "+compile"
FULL, FEW = ("scope=attention",), ("scope=attention", "dtype=float32", "seq_len=67", "mask=none,causal,padding")
"""Reductions of the sweep `check`: projections are the harness's own."""
FEWEST = (
    *("scope=attention", "dtype=float32", "seq_len=67", "kv_len=67", "num_heads=4", "num_kv_heads=4", "head_dim=16"),
    *("value_dim=16", "mask=causal", "layout=contiguous", "batch_size=2", "direction=inference,forward_backward"),
)
"""Compiling takes ten seconds for each cell."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one honest form: the number of right cells, and the statuses of the others."""

    form: str
    does: str
    num_right: int
    num_unsupported: int
    num_rejected: int
    reason: str  # of the first rejected cell


def names() -> list[str]:
    """List the forms, and those that are also compiled."""
    return [*forms.NAMES, *(f"{name}{COMPILED}" for name in forms.COMPILED)]


def groups(chosen: Sequence[str]) -> dict[str, list[str]]:
    """Split the forms into plain and compiled ones."""
    compiled = [name for name in chosen if name.endswith(COMPILED)]
    return {"plain": [name for name in chosen if name not in compiled], "compiled": compiled}


def tried(chosen: Sequence[str], *, short: bool = False) -> list[Trial]:
    """Run `attnbench check` on the forms of one group: compiled ones at few shapes, the others at all of them."""
    if not chosen:
        return []
    settings = FEWEST if chosen[0].endswith(COMPILED) else FEW if short else FULL
    with tempfile.TemporaryDirectory(prefix="attnbench-trust-") as folder:
        file = Path(forms.__file__)
        (Path(folder) / file.name).write_bytes(file.read_bytes())
        command = [sys.executable, "-P", "-m", "attnbench", "check", "--json", "--timeout", "120"]
        command += [f"{file.name}:{name}" for name in chosen]
        command += [] if settings is FEWEST else ["--sweep", "check"]
        command += [option for setting in settings for option in ("--set", setting)]
        code, _, _ = sessions.call(command, Path(folder), LIMIT_S)
        text = f"\n{(Path(folder) / 'output.txt').read_text(encoding='utf-8', errors='replace')}"
    found: defaultdict[str, list[tuple[Status, str]]] = defaultdict(list)
    start = text.find("\n{")
    for cell in json.JSONDecoder().raw_decode(text[start + 1 :])[0]["cells"] if start >= 0 else ():
        found[cell["implementation"]].append((Status(cell["status"]), cell["message"]))
    printed = text.strip().splitlines()
    lost = f"it was not checked; exit code {code}: {printed[-1] if printed else ''}"
    return [_trial(name, found.get(name, []), lost) for name in chosen]


def _trial(name: str, found: list[tuple[Status, str]], lost: str) -> Trial:
    does = (getattr(forms, name.removesuffix(COMPILED)).__doc__ or "").splitlines()[0]
    rejected = [f"{status}: {message}" for status, message in found if status not in {Status.ok, Status.unsupported}]
    return Trial(
        form=name,
        does=does,
        num_right=sum(status is Status.ok for status, _ in found),
        num_unsupported=sum(status is Status.unsupported for status, _ in found),
        num_rejected=len(rejected) if found else 1,
        reason=next(iter(rejected), "" if found else lost),
    )
