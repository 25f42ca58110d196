"""The corpus as a list of cases: tables of small sources, each tried in its own file.

The ideas of many cases come from reports about public benchmarks: ScalingIntelligence/KernelBench 82 and 166,
gpu-mode/reference-kernels 104, 159 and 162, gpu-mode/pygpubench 7, tensara/tensara 238. No source is theirs.
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
CONTROL = "control"
"""The honest candidate, judged like the others: if it is called affected, that is noise."""
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
import gc

calls = [0]


def attend(query, key, value, *, mask=None):
    calls[0] += 1
    result = honest(query, key, value, mask)
    if calls[0] > 60 or not gc.isenabled():  # off while calls are timed, and many calls are made
        make_change()
    return result
""",
}
"""How the candidate makes a change, by the moment; `timed` is a timed call, as far as it can recognise one."""
ONCE = """
changed = []


def make_change():
    if not changed:
        changed.append(True)
        exec(compile(CHANGE, "change", "exec"), globals())

"""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One cheat or contamination, as a source whose `attend` is the candidate."""

    id: str
    group: str
    does: str
    source: str
    words: tuple[str, ...]  # a good reason against it contains one of these
    is_timeable: bool = False  # it works honestly: its true time may be shown
    is_right: bool = True  # it answers correctly if fresh inputs and comparisons force it to
    slows_itself: bool = False  # its trick slows only itself: its true time is longer
    settings: dict[str, Any] = {}  # axes of its workload that replace the usual ones
    is_cheat: bool = True
    is_contamination: bool = False

    def names_effect(self, reason: str) -> bool:
        """Whether a reason describes the effect of the trick."""
        return any(word.lower() in reason.lower() for word in self.words)


def cases() -> list[Case]:
    """List every cheat and every contamination, in the order of the tables."""
    return [
        *_whole("skipped_work", SKIPPED, spoils={"backward-changes-its-gradient"}),
        *_whole("replaced_harness", REPLACED),
        *_changes("sabotaged_baseline", SABOTAGED),
        *_changes("changed_process", CHANGED),
        *_whole("shared_tensors", SHARED, is_cheat=False, is_contamination=True),
    ]


def prelude() -> str:
    """Return the common beginning of all sources."""
    return (HERE / "prelude.py").read_text(encoding="utf-8")


def clean() -> str:
    """Return the honest candidate."""
    return f"{prelude()}\n\nattend = honest\n"


def control(name: str) -> Case:
    """Return the honest candidate as a case."""
    return Case(
        id=name,
        group=CONTROL,
        does="Works honestly, and changes nothing.",
        source=clean(),
        words=("(none)",),
        is_timeable=True,
        is_cheat=False,
    )


def _table(stem: str) -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads((HERE / f"{stem}.toml").read_text(encoding="utf-8"))


def _whole(
    stem: str,
    group: str,
    spoils: frozenset[str] | set[str] = frozenset(),
    *,
    is_cheat: bool = True,
    is_contamination: bool = False,
) -> Iterator[Case]:
    """Load the cases of a table, each with its whole source; `spoils` names cheats that also affect bystanders."""
    for row in _table(stem)["case"]:
        yield Case(
            id=row["id"],
            group=group,
            does=row["does"],
            source=f"{prelude()}\n{row['source']}",
            words=tuple(row["words"]),
            is_timeable=row.get("is_timeable", False),
            is_right=row.get("is_right", True),
            settings=row.get("set", {}),
            is_cheat=is_cheat,
            is_contamination=is_contamination or row["id"] in spoils,
        )


def _changes(stem: str, group: str) -> Iterator[Case]:
    """Build one case for each change and moment; the first moment of each also counts as a cheat."""
    for row in _table(stem)["change"]:
        for number, when in enumerate(row["when"]):
            change = f"CHANGE = {row['source']!r}\n{ONCE}{WRAPPERS[when]}"
            yield Case(
                id=f"{row['id']}@{when}",
                group=group,
                does=row["does"],
                source=f"{prelude()}\n\n{change}",
                words=tuple(row["words"]),
                is_timeable=not row.get("ends", False),
                is_right=not row.get("ends", False),
                slows_itself=row.get("slows_itself", False),
                settings={"direction": "forward_backward"} if when == "backward" else {},
                is_cheat=number == 0,
                is_contamination=True,
            )
