"""The corpus of cheats and contaminations: a list of cases, whose sources come from the tables (TOML) of this folder.

The ideas of many cases come from reports about public benchmarks: ScalingIntelligence/KernelBench 82 and 166,
gpu-mode/reference-kernels 104, 159 and 162, gpu-mode/pygpubench 7, tensara/tensara 238. No source is copied.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).parent
SKIPPED, REPLACED, SABOTAGED, CHANGED, SHARED = (
    "skipped work",
    "replaced harness",
    "sabotaged baseline",
    "changed process",
    "shared tensors",
)
CONTROL, NUM_CONTROLS = "control", 8
"""Group and number of the controls: cases whose candidate is the honest function, to show the noise of judgements."""
WRAPPERS = {
    "import": """
make_change()
attend = honest
""",
    "build": """
from attnbench.contract import Attention, repeat_heads


class attend(Attention):
    def __init__(self, weights):
        super().__init__(weights)
        make_change()

    def attend(self, query, key, value, mask):
        heads = query.shape[1]
        return honest(query, repeat_heads(key, heads), repeat_heads(value, heads), mask.visible)
""",
    "forward": """
def attend(query, key, value, *, mask=None):
    result = honest(query, key, value, mask)
    make_change()
    return result
""",
    "backward": """
class Changing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, mask):
        ctx.save_for_backward(query, key, value)
        ctx.mask = mask
        return honest(query, key, value, mask)

    @staticmethod
    def backward(ctx, grad_output):
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            made = torch.autograd.grad(honest(*leaves, ctx.mask), leaves, grad_output)
        make_change()
        return *made, None


def attend(query, key, value, *, mask=None):
    return Changing.apply(query, key, value, mask)
""",
    "timed": """
def attend(query, key, value, *, mask=None):
    result = honest(query, key, value, mask)
    if is_timed():
        make_change()
    return result
""",
}
"""Last part of a candidate's source, by the moment at which the candidate calls `make_change()`."""
ONCE = """
changed = []


def make_change():
    if not changed:
        changed.append(True)
        exec(compile(CHANGE, "change", "exec"), globals())

"""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One cheat, contamination or control; `attend` in its source is the candidate."""

    id: str
    group: str
    does: str
    source: str
    settings: dict[str, Any] = {}  # axes of its workload that replace the usual ones


def cases() -> list[Case]:
    """List the controls, and then all other cases in the order of the tables."""
    controls = [
        Case(id=f"honest-{number}", group=CONTROL, does="Works honestly, and changes nothing.", source=clean())
        for number in range(1, NUM_CONTROLS + 1)
    ]
    return [
        *controls,
        *_whole("skipped_work", SKIPPED),
        *_whole("replaced_harness", REPLACED),
        *_changes("sabotaged_baseline", SABOTAGED),
        *_changes("changed_process", CHANGED),
        *_whole("shared_tensors", SHARED),
    ]


def prelude() -> str:
    """Return the common beginning of all sources."""
    return (HERE / "prelude.py").read_text(encoding="utf-8")


def clean() -> str:
    """Return the source of the honest candidate."""
    return f"{prelude()}\n\nattend = honest\n"


def _table(stem: str) -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads((HERE / f"{stem}.toml").read_text(encoding="utf-8"))


def _whole(stem: str, group: str) -> Iterator[Case]:
    """Load the cases of a table whose entries are whole sources."""
    for row in _table(stem)["case"]:
        source = f"{prelude()}\n{row['source']}"
        yield Case(id=row["id"], group=group, does=row["does"], source=source, settings=row.get("set", {}))


def _changes(stem: str, group: str) -> Iterator[Case]:
    """Build a case for each change in a table; the key `when` names the moment at which the candidate makes it."""
    for row in _table(stem)["change"]:
        yield Case(
            id=f"{row['id']}@{row['when']}",
            group=group,
            does=row["does"],
            source=f"{prelude()}\n\nCHANGE = {row['source']!r}\n{ONCE}{WRAPPERS[row['when']]}",
            settings={"direction": "forward_backward"} if row["when"] == "backward" else {},
        )
