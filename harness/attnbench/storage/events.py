"""The lines of a journal: the plan of a run, and each thing that happened, as frozen types that become JSON."""

import math
import shlex

import msgspec

from attnbench.plugins import name_of, split, variant
from attnbench.storage.records import (
    BASE,
    CANDIDATE,
    FALSE_SHARE,
    LARGEST_EQUIVALENCE,
    REJECTABLE,
    Agreement,
    Arm,
    Ceilings,
    Counters,
    DeviceState,
    Environment,
    Key,
    Measurement,
    Operators,
    Sample,
    Status,
)
from attnbench.workloads.flashinfer_trace import Line
from attnbench.workloads.models import Mix
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

SCHEMA = 6
"""Version of the journal. A reader refuses a newer one; see docs/adr/0003-journal.md for its history."""

CACHES = ("warm", "cold", "rotating")
LAUNCHES = ("eager", "graph")
PACES = ("burst", "sustained")
SUSTAINED_S = 3.0
"""At a sustained pace the arms of a visit are called for these seconds before its samples, and longer where the
device's clock has not settled."""
TOUCH_BELOW_S = 10e-3
"""With warm caches, calls shorter than this get an untimed one first: their caches were emptied by the arm before.
Longer calls warm themselves, and a touch would double their cost."""
ALLOCATORS: dict[str, dict[str, str]] = {
    "system": {},
    "steady": {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)},
    "retain": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}
"""Set before a worker starts. The C library gives large blocks back when they are freed, and each call pays for
their pages again; what is large it adapts to what was freed before. `steady` is where that ends, so that what ran
before does not matter: blocks from 32 MiB on, and more than 64 MiB at the end of the heap. `retain` keeps everything.
Source: mallopt(3), https://man7.org/linux/man-pages/man3/mallopt.3.html."""

INTERPRETED = {"TRITON_INTERPRET": "1"}
"""Set before a worker starts where Triton's kernels are interpreted, since Triton reads it when it is imported.
Source: https://triton-lang.org/main/programming-guide/chapter-3/debugging.html"""


class DamagedError(ValueError):
    """A journal that cannot be read: it is not whole any more, never was one, or is newer than this version."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of two states of the code that are compared: a revision, a folder, or an environment."""

    given: str  # as typed
    implementations: dict[str, str] = msgspec.field(default_factory=dict)  # by name, from where each is loaded
    commit: str = ""  # of a revision
    root: str = ""  # the folder in which its files are found, from where the command was given
    python: str = ""  # the interpreter of its environment, where it has one of its own


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The two states of the code that are compared; each implementation takes part once from each side."""

    base: Side
    candidate: Side
    is_apart: bool = False  # each side has processes of its own; else both live in one
    lost: dict[str, str] = msgspec.field(default_factory=dict)  # what only the base has: the name, and why
    new: dict[str, str] = msgspec.field(default_factory=dict)  # what only the candidate has, likewise


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """Workloads that differ in one axis alone, in order, along which two implementations may change places.

    `pairs` names the implementations; without pairs the fastest at `base` is compared with the fastest at other values.
    """

    axis: str  # one of AXES_OF_LADDERS
    values: tuple[int, ...]
    workloads: tuple[str, ...]  # the id at each value
    base: str = ""  # the workload that was asked about
    pairs: tuple[tuple[str, str], ...] = ()

    @property
    def by_value(self) -> dict[int, str]:
        """The id of the workload at each value."""
        return dict(zip(self.values, self.workloads, strict=True))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that a run was asked to do: enough to go on with it after a kill."""

    sweep: str
    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]  # as given: a name, or path/to/file.py:Name; of two sides, see `sides`
    baseline: str  # empty where two sides are compared: each implementation has its own on the base
    metrics: tuple[str, ...]
    budget_s: float  # wall time of the whole run
    call_limit_s: float  # a cell whose single call is predicted to last longer is not tried
    timeout_s: float  # a step (a probe, a sample, a metric) that lasts longer is killed
    memory_limit_bytes: int  # a cell predicted to need more is not tried; 0: three quarters of what is free
    num_blocks: int = 4  # of one visit
    visit_s: float = 0.0  # a visit has fewer where they would last longer than this, but one; 0: it has not
    num_rounds: int = 4  # visits of each workload, decided or not, each in a fresh process
    smallest_effect: float = SMALLEST_EFFECT  # times that differ by less are called equivalent
    false_share: float = FALSE_SHARE  # of what is called faster or slower, the expected share that is false, at most
    seed: int = 0
    cache: str = "warm"  # warm: an untimed call first; cold: emptied before every call; rotating: each on other inputs
    launch: str = "eager"  # eager: a call launches each kernel; graph: it replays all of them as one CUDA graph
    pace: str = "burst"  # burst: short visits with pauses; sustained: each after SUSTAINED_S of calls without a pause
    allocator: str = "system"  # one of ALLOCATORS: what becomes of memory that is freed
    digests: dict[str, str] = msgspec.field(default_factory=dict)  # of each implementation's source, by its spec
    sides: Sides | None = None  # where two states of the code are compared
    alone: tuple[str, ...] = ()  # the implementations that have a process of their own, by name
    left_out: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)  # by name: workloads it has no part in
    model: str = ""  # whose attention the workloads are, where it was planned for a model
    mixes: tuple[Mix, ...] = ()  # how they make up its layers, at each point; or the calls of a service
    traced: dict[str, tuple[Line, ...]] = msgspec.field(default_factory=dict)  # by workload: the calls it stands for
    stages: tuple[str, ...] = ()  # in their order; none: those of a run
    unasked: tuple[str, ...] = ()  # workloads that are looked at only where something else asks for it
    ladders: tuple[Ladder, ...] = ()
    is_interpreted: bool = False  # Triton's kernels run in its interpreter, on the CPU, and are checked alone
    rejects: tuple[str, ...] = ()  # those of REJECTABLE that are findings, where a check otherwise notes them
    shortlist: int = 0  # so many implementations of each workload are tried, those predicted to be fastest; 0: all

    def __post_init__(self) -> None:
        """Numbers that JSON cannot hold, or that no run can have, are refused before anything is written."""
        for name in ("budget_s", "call_limit_s", "timeout_s", "visit_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: give seconds, 0 or more")
        for name in ("num_blocks", "num_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} is not allowed: give at least 1")
        if not 0 < self.smallest_effect <= LARGEST_EQUIVALENCE:
            allowed = f"a share above 0 and up to {LARGEST_EQUIVALENCE}, as in 0.02 for 2 %"
            raise ValueError(f"smallest_effect={self.smallest_effect} is not allowed: give {allowed}")
        if not 0 < self.false_share <= FALSE_SHARE:
            allowed = f"a share above 0 and up to {FALSE_SHARE}, as in 0.001 for one in a thousand"
            raise ValueError(f"false_share={self.false_share} is not allowed: give {allowed}")
        if self.allocator not in ALLOCATORS:
            raise ValueError(f"allocator={self.allocator} is not allowed: it is one of {', '.join(ALLOCATORS)}")
        if unknown := set(self.rejects) - set(REJECTABLE):
            raise ValueError(f"rejects={min(unknown)} is not allowed: it is one of {', '.join(REJECTABLE)}")
        for name, choices in {"cache": CACHES, "launch": LAUNCHES, "pace": PACES}.items():
            if (given := getattr(self, name)) not in choices:
                raise ValueError(f"{name}={given} is not allowed: {name} is one of {', '.join(choices)}")

    @property
    def specs(self) -> dict[Arm, str]:
        """From where each arm that is measured is loaded: a name, or path/to/file.py:Name."""
        if self.sides is None:
            return {Arm(implementation=name_of(spec)): spec for spec in self.implementations}
        base, candidate = self.sides.base.implementations, self.sides.candidate.implementations
        given = {BASE: base, CANDIDATE: candidate}
        return {
            Arm(implementation=name, side=side): given[side][name]
            for name in dict.fromkeys([*base, *candidate])
            for side in given
            if name in given[side]
        }

    def cells(self, workload: Workload) -> dict[Arm, str]:
        """The arms that take part in a workload, and from where each is loaded."""
        out = self.left_out
        return {arm: spec for arm, spec in self.specs.items() if workload.id not in out.get(arm.implementation, ())}

    @property
    def conditions(self) -> str:
        """Under what it is timed, in words: times under other conditions are never compared."""
        others = ["CUDA graphs"] * (self.launch == "graph") + ["sustained"] * (self.pace == "sustained")
        return ", ".join([self.cache, *others])

    @property
    def asked(self) -> tuple[Workload, ...]:
        """The workloads but for those that are looked at only where something else asks for it."""
        return tuple(each for each in self.workloads if each.id not in set(self.unasked))

    @property
    def num_cells(self) -> int:
        """Number of cells: each arm on each workload that was asked for, except those left out."""
        return len(self.asked) * len(self.specs) - sum(map(len, self.left_out.values()))

    @property
    def num_searches(self) -> int:
        """How many searches there are, at most, which share the probability of a false interval."""
        return sum(max(1, len(each.pairs)) for each in self.ladders)

    def reference(self, arm: Arm) -> Arm:
        """The arm that an arm is compared with: the baseline or, of two sides, the same implementation on the base."""
        if self.sides is None:
            return Arm(implementation=self.baseline)
        return Arm(implementation=arm.implementation, side=BASE)

    def runner(self, arm: Arm) -> str:
        """Which of the processes of a run holds an arm; "" for the one that most share."""
        if self.sides is not None and self.sides.is_apart:
            return arm.side
        return arm.implementation if arm.implementation in self.alone else ""

    @property
    def command(self) -> str:
        """The command that goes on with a run of this plan, where it has no two sides."""
        return "fastest" if {"choose", "search"} & set(self.stages) else "run"

    def resume_command(self, run: str) -> str:
        """The command that goes on with a run of this plan, by its name or folder.

        A journal never decides what is executed: files and the two sides are typed again.
        """
        if self.sides is None:
            files = [spec for spec in self.implementations if split(variant(spec)[0])[0] is not None]
            words = ["attnbench", self.command, "--resume", run]
        else:
            both = self.sides.base, self.sides.candidate
            specs = dict.fromkeys(spec for side in both for spec in side.implementations.values() if not side.root)
            files = [each for each in specs if split(each)[0] is not None and each not in {s.given for s in both}]
            words = ["attnbench", "compare", *(side.given for side in both), "--resume", run]
        return shlex.join([*words, *(word for spec in files for word in ("-i", spec))])

    @property
    def has_runners(self) -> bool:
        """Whether some arms are in another process than what they are compared with."""
        return bool(self.alone) or (self.sides is not None and self.sides.is_apart)

    def is_alone(self, arm: Arm) -> bool:
        """Whether an arm is in another process than what it is compared with, or its reference is."""
        return self.sides is None and self.runner(arm) != self.runner(self.reference(arm))

    def is_reference(self, arm: Arm) -> bool:
        """Whether others are compared with it."""
        return self.reference(arm) == arm


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="run_started"):
    """First line of a journal."""

    schema: int
    run: str
    time: str
    commit: str  # from where the command was given
    plan: Plan

    def commit_of(self, arm: Arm) -> str:
        """The commit of the code that an arm runs, which is its side's; "" where that is of none."""
        sides = self.plan.sides
        if sides is None:
            return self.commit
        return (sides.base if arm.side == BASE else sides.candidate).commit


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True, tag="worker_started"):
    """A fresh process took up the work; holds for every line until the next one of its kind."""

    time: str
    environment: Environment
    base: Environment | None = None  # of the base's process, where each side has one of its own
    before: Counters | None = None  # before the one before it was ended
    counters: Counters | None = None  # when it was there
    host: str = ""  # of a run on several machines, the one that it is on


class CellEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened to one cell."""

    workload: str
    implementation: str
    side: str = ""

    @property
    def key(self) -> Key:
        """The cell."""
        return self.workload, Arm(implementation=self.implementation, side=self.side)


class CellChecked(CellEvent, frozen=True, kw_only=True, tag="cell_checked"):
    """The check of a cell ended: ok and worth measuring, or not ok with the reason."""

    status: Status
    message: str = ""
    is_predicted: bool = False
    is_outpaced: bool = False  # predicted to be so much slower than others that it was left out of the shortlist
    agreement: Agreement | None = None
    check_s: float = 0.0
    executed_flops: int | None = None  # of one call, as the implementation says; None: it does not


class CellProfiled(CellEvent, frozen=True, kw_only=True, tag="cell_profiled"):
    """The operators of one call of a cell; where they are not the requested ones, the cell is a fallback from here."""

    operators: Operators


class StateChanged(CellEvent, frozen=True, kw_only=True, tag="state_changed"):
    """An implementation changed something of its process, in words; in journals before 2027 alone, and never read."""

    changes: tuple[str, ...]


class CellMeasured(CellEvent, frozen=True, kw_only=True, tag="cell_measured"):
    """A metric with a pass of its own was read."""

    measurement: Measurement


class CellFailed(CellEvent, frozen=True, kw_only=True, tag="cell_failed"):
    """A cell that had passed its check failed later; its samples no longer count."""

    status: Status
    message: str


class CeilingsMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="ceilings_measured"):
    """The rates of matrix products and copies, for the workloads of one device, dtype and number of threads."""

    ceilings: Ceilings
    spent_s: float = 0.0


class ArmSamples(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one arm of a visit, in time order."""

    arm: Arm
    samples: tuple[Sample, ...]


class VisitFinished(msgspec.Struct, frozen=True, kw_only=True, tag="visit_finished"):
    """A few blocks of one workload: the samples of each arm."""

    workload: str
    epoch: int
    visit: int
    arms: tuple[ArmSamples, ...]
    called_s: float = 0.0  # inside calls of the arms, untimed ones and the check of their answers included
    elapsed_s: float = 0.0  # what the run had taken when it ended
    states: tuple[DeviceState, ...] = ()  # of the device, before its blocks and after each; none: not known
    doubts: dict[str, str] = msgspec.field(default_factory=dict)  # by implementation: why its times so far may be wrong
    probe: str = ""  # which interference probe it had: those of one device and number of threads are alike

    def samples(self, arm: Arm) -> tuple[Sample, ...]:
        """Those of one arm; empty where it took no part."""
        return next((taken.samples for taken in self.arms if taken.arm == arm), ())


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="run_finished"):
    """Last line of a journal that was not killed."""

    time: str
    elapsed_s: float
    reason: str = ""  # why timing ended: everything is decided, or the budget is spent
    counters: Counters | None = None


class BaselineAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="baseline_accepted"):
    """The run became what later runs are held against, and why; written by `attnbench gate --accept` alone.

    A stored baseline carries those of its predecessors too: they are its history.
    """

    time: str
    run: str
    commit: str  # of the run
    reason: str


class LinesLost(msgspec.Struct, frozen=True, kw_only=True, tag="lines_lost"):
    """Lines of a damaged journal were left out here; written by `attnbench report --salvage`."""

    run: str  # the damaged one
    lines: tuple[int, ...]  # their numbers there
    gaps: tuple[int, ...]  # the intact lines before which something was changed, or is gone


class JournalRestored(msgspec.Struct, frozen=True, kw_only=True, tag="journal_restored"):
    """Another process changed the journal while the run was at work; its earlier content was put back."""

    time: str


Event = (
    RunStarted
    | WorkerStarted
    | CellChecked
    | CellProfiled
    | StateChanged
    | CellMeasured
    | CellFailed
    | CeilingsMeasured
    | VisitFinished
    | RunFinished
    | BaselineAccepted
    | LinesLost
    | JournalRestored
)
