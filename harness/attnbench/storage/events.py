"""The types of lines in a journal: the plan of a run, and its events. They are frozen, and are stored as JSON."""

import math
import shlex
from datetime import UTC, datetime

import msgspec

from attnbench.plugins import name_of, split, variant
from attnbench.storage import records
from attnbench.storage.records import BASE, CANDIDATE, Arm, DeviceState, Environment, Sample, Status
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

SCHEMA = 6  # version of the journal; docs/adr/0003-journal.md has the history
SUSTAINED_S = 3.0  # least seconds of calls before a sustained visit's samples; more while the device's clock varies
ALLOCATORS: dict[str, dict[str, str]] = {
    "system": {},
    "steady": {"MALLOC_MMAP_THRESHOLD_": str(2**25), "MALLOC_TRIM_THRESHOLD_": str(2**26)},
    "retain": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40)},
}
"""Environment variables of a worker, by the name of the allocator. With `system`, the C library returns large blocks to
the system when they are freed, and each call pays for their pages again. Earlier blocks change the size from which a
block is large. `steady` fixes this size at its maximum, 32 MiB, so that earlier calls do not matter; free memory above
64 MiB at the end of the heap is returned, too. With `retain` nothing is returned. Source: mallopt(3),
https://man7.org/linux/man-pages/man3/mallopt.3.html."""
SHARE_OF_FREE = 0.75  # share of the free memory that a call may use
LIMITS = {  # smallest and largest allowed values of fields of a Plan; inf: any finite value
    **dict.fromkeys(("budget_s", "call_limit_s", "timeout_s"), (0.0, math.inf)),
    **dict.fromkeys(("num_blocks", "num_rounds"), (1, math.inf)),
    "smallest_effect": (1e-6, 0.1),  # larger differences of times are never called equal
    "false_share": (1e-9, records.FALSE_SHARE),
}


def now() -> str:
    """Return the current UTC time in ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


class DamagedError(ValueError):
    """Error: a journal is incomplete, malformed or of another schema, or was removed during its run."""


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One of two states of the code that are compared: a revision, a folder, a file, or an environment."""

    given: str  # as the user wrote it
    implementations: dict[str, str] = msgspec.field(default_factory=dict)  # spec of each implementation, by name
    commit: str = ""  # commit of a revision; "" for any other side
    root: str = ""  # folder with the side's files; "" for a file or an environment
    python: str = ""  # path of the environment's interpreter; "": the interpreter of this process


class Sides(msgspec.Struct, frozen=True, kw_only=True):
    """The two compared states of the code; each implementation takes part once from each side."""

    base: Side
    candidate: Side
    is_apart: bool = False  # whether each side has its own processes; otherwise both sides share one
    lost: dict[str, str] = msgspec.field(default_factory=dict)  # why the candidate lacks an implementation, by name
    new: dict[str, str] = msgspec.field(default_factory=dict)  # why the base lacks an implementation, by name


class Ladder(msgspec.Struct, frozen=True, kw_only=True):
    """A workload at increasing values of one axis, to search for the value where the faster implementation changes."""

    axis: str  # a key of SEARCH_RANGES (processes/planning.py)
    values: tuple[int, ...]
    workloads: tuple[str, ...]  # workload id at each value
    pairs: tuple[tuple[str, str], ...] = ()  # names of implementations; each pair has a search of its own

    @property
    def by_value(self) -> dict[int, str]:
        """Workload ids by the value of the axis."""
        return dict(zip(self.values, self.workloads, strict=True))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The complete plan of a run, with which the run can continue after it was killed."""

    sweep: str
    workloads: tuple[Workload, ...]
    implementations: tuple[str, ...]  # specs: names, or path/to/file.py:Name; for two sides see `sides`
    baseline: str  # name of an implementation; "" for two sides, where each implementation is compared with its base
    metrics: tuple[str, ...]  # names
    budget_s: float  # seconds of wall time for the whole run; 0: only the first visits are timed
    call_limit_s: float  # cells with a longer predicted call are not tried
    timeout_s: float  # longer steps (a probe, a sample, a metric) are killed
    num_blocks: int = 8  # fewest blocks in each visit, if they fit into the budget
    num_rounds: int = 4  # fewest visits of each workload, each in a fresh process, even if all verdicts are decided
    smallest_effect: float = SMALLEST_EFFECT  # smaller relative differences of times are equivalent
    # at most this share of the verdicts faster and slower is expected to be false; for two sides, this is the largest
    # probability that any of these verdicts is false
    false_share: float = records.FALSE_SHARE
    seed: int = 0
    cache: str = "warm"  # warm: untimed calls fill it; cold: it is emptied before each call; rotating: only in old runs
    launch: str = "eager"  # eager: calls launch each kernel; graph: they replay one CUDA graph
    pace: str = "burst"  # burst: short visits with pauses; sustained: each visit begins with SUSTAINED_S of calls
    allocator: str = "system"  # the treatment of freed memory: a key of ALLOCATORS
    is_refereed: bool = False  # the coordinator measures the times (processes/worker_pool.py, `Referee`)
    digests: dict[str, str] = msgspec.field(default_factory=dict)  # digest of each implementation's source, by spec
    sides: Sides | None = None  # set if two states of the code are compared
    alone: tuple[str, ...] = ()  # names of implementations in processes of their own
    # by the name of an implementation: ids of the workloads in which it takes no part
    left_out: dict[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    why_left_out: dict[str, str] = {}  # by the name of each implementation that the sweep leaves out; "": no reason
    model: str = ""  # name of the model that defines the workloads; "": none
    stages: tuple[str, ...] = ()  # names, in any order; empty: those passed to `execute` (processes/execution.py)
    unasked: tuple[str, ...] = ()  # ids of workloads measured only at the request of a search
    ladders: tuple[Ladder, ...] = ()
    is_interpreted: bool = False  # Triton's interpreter runs its kernels on the CPU; they are only checked
    rejects: tuple[str, ...] = ()  # behaviours that a check rejects: values of REJECTABLE

    def __post_init__(self) -> None:
        """Reject values that are out of range or cannot be JSON, before anything is written.

        Raises:
            ValueError: a value is outside of LIMITS, or infinite.
        """
        for name, (least, most) in LIMITS.items():
            if not least <= (value := getattr(self, name)) <= most or value == math.inf:
                share = f"a share up to {most:g}, as in {most / 5:g} for {20 * most:g} %"
                raise ValueError(f"{name}={value} is not allowed: give {share if most < 1 else f'{least:g} or more'}")

    @property
    def specs(self) -> dict[Arm, str]:
        """The spec of each measured arm: a name, or path/to/file.py:Name."""
        if self.sides is None:
            return {Arm(implementation=name_of(spec)): spec for spec in self.implementations}
        by_side = {BASE: self.sides.base.implementations, CANDIDATE: self.sides.candidate.implementations}
        cells = [(name, side) for name in by_side[BASE] | by_side[CANDIDATE] for side in by_side]
        arms = {Arm(implementation=name, side=side): by_side[side].get(name) for name, side in cells}
        return {arm: spec for arm, spec in arms.items() if spec is not None}

    def cells(self, workload: Workload) -> dict[Arm, str]:
        """Return the arms (implementations, of both sides if there are two) that run a workload, each with its spec."""
        out = self.left_out
        return {arm: spec for arm, spec in self.specs.items() if workload.id not in out.get(arm.implementation, ())}

    @property
    def conditions(self) -> str:
        """The timing conditions in words; times under different conditions are never compared."""
        others = {"CUDA graphs": self.launch == "graph", "sustained": self.pace == "sustained"}
        others["refereed"] = self.is_refereed
        return ", ".join([self.cache, *(name for name, holds in others.items() if holds)])

    @property
    def asked(self) -> tuple[Workload, ...]:
        """Workloads that the user requested, without those measured only for a search."""
        return tuple(each for each in self.workloads if each.id not in set(self.unasked))

    @property
    def num_cells(self) -> int:
        """Number of cells: each arm on each requested workload, except those left out."""
        return sum(len(self.cells(workload)) for workload in self.asked)

    @property
    def num_searches(self) -> int:
        """The number of searches, one for each pair of implementations of each ladder.

        The error level FALSE_SHARE is divided among them (statistics/crossover.py).
        """
        return sum(len(each.pairs) for each in self.ladders)

    def reference(self, arm: Arm) -> Arm:
        """Return the arm with which `arm` is compared: the baseline or, for two states of the code, the base's."""
        if self.sides is None:
            return Arm(implementation=self.baseline)
        return Arm(implementation=arm.implementation, side=BASE)

    def runner(self, arm: Arm) -> str:
        """Return the name of the process that runs an arm; "" for the shared process."""
        if self.sides is not None and self.sides.is_apart:
            return arm.side
        return arm.implementation if arm.implementation in self.alone else ""

    @property
    def command(self) -> str:
        """The command of attnbench that continues a run of this plan: run, fastest or compare."""
        usual = "fastest" if {"choose", "search"} & set(self.stages) else "run"
        return usual if self.sides is None else "compare"

    def resume_command(self, run: str) -> str:
        """Return the command line that continues the run with the name or folder `run`.

        The command names the files and sides again, because a journal never decides which code is executed.
        """
        sides = [] if self.sides is None else [self.sides.base, self.sides.candidate]
        typed = [side.given for side in sides]
        of_sides = [spec for side in sides if not side.root for spec in side.implementations.values()]
        specs = dict.fromkeys([*self.implementations, *of_sides])
        files = [spec for spec in specs if split(variant(spec)[0])[0] is not None and spec not in typed]
        words = ["attnbench", self.command, *typed, "--resume", run]
        return shlex.join([*words, *(word for spec in files for word in ("-i", spec))])

    @property
    def has_runners(self) -> bool:
        """Whether several processes take turns in a visit, or the coordinator measures the times (`is_refereed`)."""
        return bool(self.alone) or (self.sides is not None and self.sides.is_apart) or self.is_refereed

    def is_alone(self, arm: Arm) -> bool:
        """Return whether an arm runs in a different process from the baseline; False for two states of the code."""
        return self.sides is None and self.runner(arm) != self.runner(self.reference(arm))

    def is_reference(self, arm: Arm) -> bool:
        """Return whether an arm is the reference with which other arms are compared."""
        return self.reference(arm) == arm


class RunStarted(msgspec.Struct, frozen=True, kw_only=True, tag="run_started"):
    """First line of a journal."""

    schema: int
    run: str
    time: str
    commit: str  # of the working folder, with "+" if tracked files had changed; "" outside of a repository
    plan: Plan


class WorkerStarted(msgspec.Struct, frozen=True, kw_only=True, tag="worker_started"):
    """A fresh process started. `environment` holds for all events until the next event of this type."""

    time: str
    environment: Environment
    base: Environment | None = None  # of the base's process, if each side has its own
    before: records.Counters | None = None  # counters just before the end of the previous process
    counters: records.Counters | None = None  # counters when the process was ready
    host: str = ""  # name of the host in a run on several machines; "" in any other run


class CellEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of one cell: an implementation (of one side, if two states of the code are compared) on a workload."""

    workload: str
    implementation: str
    side: str = ""

    @property
    def key(self) -> records.Key:
        """The key of the cell: workload id and arm."""
        return self.workload, Arm(implementation=self.implementation, side=self.side)


class CellChecked(CellEvent, frozen=True, kw_only=True, tag="cell_checked"):
    """The check of a cell ended: ok and worth measuring, or not ok with the reason."""

    status: Status
    message: str = ""
    is_predicted: bool = False  # the status is a prediction; the cell was not tried
    agreement: records.Agreement | None = None  # None: nothing was compared
    check_s: float = 0.0  # seconds of the check
    executed_flops: int | None = None  # of one call, reported by the implementation; None: not reported


class CellProfiled(CellEvent, frozen=True, kw_only=True, tag="cell_profiled"):
    """The operators of one call of a cell; if another backend ran than requested, its status becomes `fallback`."""

    operators: records.Operators


class CellMeasured(CellEvent, frozen=True, kw_only=True, tag="cell_measured"):
    """A metric of a cell was measured, apart from the timed blocks."""

    measurement: records.Measurement


class CellFailed(CellEvent, frozen=True, kw_only=True, tag="cell_failed"):
    """A cell failed after its check had passed; its samples no longer count."""

    status: Status
    message: str


class CeilingsMeasured(msgspec.Struct, frozen=True, kw_only=True, tag="ceilings_measured"):
    """The rates of matrix products and copies were measured for one device, dtype and number of threads."""

    ceilings: records.Ceilings
    spent_s: float = 0.0  # seconds of the measurement


class ArmSamples(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of one arm in a visit (a few blocks of one workload), in time order."""

    arm: Arm
    samples: tuple[Sample, ...]


class VisitFinished(msgspec.Struct, frozen=True, kw_only=True, tag="visit_finished"):
    """A visit ended: a few blocks of one workload, with the samples of each arm."""

    workload: str
    epoch: int  # number of the process in the run
    visit: int  # number of the visit of this workload
    arms: tuple[ArmSamples, ...]
    called_s: float = 0.0  # seconds inside calls of the arms, untimed ones and checks of their answers included
    elapsed_s: float = 0.0  # seconds of the run at the end of the visit
    # states of the device after every block, and before the first block of each request to a worker; empty: unknown
    states: tuple[DeviceState, ...] = ()
    probe: str = ""  # the kind of interference probe: its device and number of threads

    def samples(self, arm: Arm) -> tuple[Sample, ...]:
        """Return the samples of one arm; empty if it took no part."""
        return next((taken.samples for taken in self.arms if taken.arm == arm), ())


class RunFinished(msgspec.Struct, frozen=True, kw_only=True, tag="run_finished"):
    """The run ended without being killed. Journals of continued or merged runs may have several of these events."""

    time: str
    elapsed_s: float  # seconds of the run
    reason: str = ""  # why checks were cut short and why timing ended; "" if neither happened
    counters: records.Counters | None = None  # at the end


class BaselineAccepted(msgspec.Struct, frozen=True, kw_only=True, tag="baseline_accepted"):
    """`attnbench gate --accept` stored the run as a baseline, whose file also has these events of earlier baselines."""

    time: str
    run: str
    commit: str  # of the run
    reason: str


class LinesLost(msgspec.Struct, frozen=True, kw_only=True, tag="lines_lost"):
    """`attnbench report --salvage` left out lines of a damaged journal here."""

    run: str  # the damaged run
    lines: tuple[int, ...]  # line numbers in the damaged journal
    gaps: tuple[int, ...]  # numbers of intact lines before which lines were removed, added or moved


class JournalRestored(msgspec.Struct, frozen=True, kw_only=True, tag="journal_restored"):
    """Another process changed the journal during the run; its earlier content was restored."""

    time: str


RunEvent = RunStarted | WorkerStarted | RunFinished | BaselineAccepted | LinesLost | JournalRestored
Event = RunEvent | CellChecked | CellProfiled | CellMeasured | CellFailed | CeilingsMeasured | VisitFinished
