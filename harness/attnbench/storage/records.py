"""The types of observations: results of checks, samples, machines and their ceilings, and records of cells.

Every type is frozen. A run is stored as events (storage/events.py), from which records are built when it is read.
Samples are stored unprocessed; statistics are computed when a run is read. This module needs no torch.
"""

import enum
import hashlib
import math
from collections.abc import Collection, Iterator, Sequence
from statistics import median
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from attnbench.workloads.workload import Workload


class Role(enum.StrEnum):
    """The role of an arm in a block."""

    measured = "measured"
    probe = "probe"  # fixed work of the harness, which reveals interference


class Arm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A member of a block: an implementation in a role, on one side if two states of the code are compared."""

    implementation: str = ""
    side: str = ""  # BASE or CANDIDATE; empty for a single state of the code
    role: Role = Role.measured

    def __str__(self) -> str:
        """Format for messages: `fused`, `fused (base)`, `(probe)`."""
        notes = [note for note in (self.side if self.side == BASE else "", self.role) if note and note != Role.measured]
        return f"{self.implementation} ({', '.join(notes)})".strip() if notes else self.implementation


BASE, CANDIDATE = "base", "candidate"  # the sides of a comparison of two states of the code
PROBE = Arm(role=Role.probe)  # the interference probe, which takes part in every block
Key = tuple[str, Arm]  # a cell of a run: the workload's id and the measured arm


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Processor seconds of the machine since its start, processor seconds of one process, and the free memory."""

    began_s: float  # when the process of `own_s` started, in seconds since 1970
    total_s: float  # of all processors together; idle_s and stolen_s are parts of it
    idle_s: float
    stolen_s: float  # by the hypervisor of a virtual machine
    own_s: float  # processor seconds of a process and its descendants
    free_bytes: int


class CheckVerdict(enum.StrEnum):
    """The verdict of a check on a tensor, a cell or an implementation, worst first; `not_judged` counts only alone."""

    wrong = "WRONG"
    approximate = "approximate"  # only meant to be close to attention: its error is reported, not judged
    imprecise = "imprecise"  # only rounding errors exceed the limits, as in half-precision sums
    right = "right"
    not_judged = "not judged"  # no answer to compare


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of a tensor (output or gradient) against the oracle, and their limits (checking/tolerance.py)."""

    tensor: str  # name, such as "output" or "gradient of key"
    error: float | None  # absolute difference at `worst`; None if it is not finite
    allowed: float  # limit of `error`
    worst: tuple[int, ...]  # the index at which the error is largest relative to its limit
    expected: float  # the oracle's value at `worst`
    actual: float | None  # the implementation's value at `worst`; None if it is not finite
    rms: float | None = 0.0  # root mean square error in `rows`; None if not finite, 0 in journals before 2026-11
    allowed_rms: float = 0.0  # limit of `rms`
    rows: tuple[int, int] = (0, 0)  # segment with the largest rms / limit: its first row, and one past its last row
    largest: float = 0.0  # largest absolute value of the right answer; 0 in journals written before 2026-12
    is_rounding: bool = False  # whether accumulated rounding errors explain errors beyond the limits

    @property
    def agrees(self) -> bool:
        """Whether the errors are finite and within their limits."""
        return self.grade is CheckVerdict.right

    @property
    def grade(self) -> CheckVerdict:
        """The grade: right if `ratio` is at most 1, otherwise imprecise if `is_rounding` is true, otherwise wrong."""
        if self.ratio is not None and self.ratio <= 1:
            return CheckVerdict.right
        return CheckVerdict.imprecise if self.is_rounding else CheckVerdict.wrong

    @property
    def ratio(self) -> float | None:
        """The larger of `error` and `rms`, each divided by its limit; None if either is not finite."""
        peak, rms = relative(self.error, self.allowed), relative(self.rms, self.allowed_rms)
        return None if peak is None or rms is None else max(peak, rms)

    @property
    def decisive(self) -> tuple[float | None, float]:
        """The error that decides the grade, and its limit: `rms` if only that exceeds its limit, otherwise `error`."""
        peak, ratio = relative(self.error, self.allowed), self.ratio
        is_rms = peak is not None and ratio is not None and peak <= 1 < ratio
        return (self.rms, self.allowed_rms) if is_rms else (self.error, self.allowed)

    @property
    def place(self) -> str:
        """The tensor's name and, if it has heads, the head of `worst`."""
        return f"{self.tensor} of head {self.worst[1]}" if len(self.worst) == 4 else self.tensor  # noqa: PLR2004 - (B,H,T,V)


def relative(error: float | None, allowed: float) -> float | None:
    """Divide an error by its limit `allowed`; with a limit of 0, return 0 for no error, else 1e9. None remains None."""
    if error is None:
        return None
    return error / allowed if allowed else float(error > 0) * 1e9


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of all compared tensors on one kind of input."""

    probe: str  # name of the kind of input, such as "normal"
    tensors: tuple[TensorError, ...]


class RuleResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a rule, a test of one property of attention on special rows, memory or layouts.

    If `is_noted`, the result does not affect the grade.
    """

    rule: str
    holds: bool
    found: str = ""  # description of the violation, if the rule is broken
    is_noted: bool = False
    convention: str = ""  # a key of CONVENTIONS, if that accepted behaviour explains why the rule is broken


def approximation_errors(agreement: "Agreement") -> dict[str, float]:
    """Return errors on normally distributed inputs, divided by the largest absolute right value.

    Each error has the name `TensorError.place`. An error that is not finite counts as infinite. Tensors whose right
    values are all 0 are left out.
    """
    tensors = [each for probe, each in agreement.tensors() if probe == "normal" and each.largest]
    return {each.place: math.inf if each.error is None else each.error / each.largest for each in tensors}


REPEATABLE = "repeatable"  # the rule that equal inputs give equal answers
EMPTY_ROWS, HIDDEN_NAN = "empty rows", "hidden NaN"
"""Names of rules. EMPTY_ROWS: a query that sees no key has an output other than 0. HIDDEN_NAN: NaN in a hidden key or
value reaches the output."""
FLOAT32, RANGE, PRODUCTS = "float32", "range", "products"
SIGN, BIAS, CAUSAL, ONE_MASK = "sign", "bias", "causal", "heads"
MINUS_INFINITY, LOST_NAN = "minus_infinity", "lost_nan"
CONVENTIONS = {
    "nan": "a query that sees no key gets NaN (SDPA gives 0)",
    "nan_gradient": "a query that sees no key makes gradients NaN (SDPA gives 0)",
    "mean": "a query that sees no key gets the mean of the values (SDPA gives 0)",
    "all": "a query that sees no key attends to all keys, as without a mask (SDPA gives 0)",
    FLOAT32: "it computes in float32 whatever the dtype of its inputs",
    RANGE: "in float16 its sums overflow if entries of the value tensor are in the hundreds",
    PRODUCTS: "in float16 products of query and key above 65504 overflow before they are scaled (SDPA's do not)",
    SIGN: "a negative scale gives NaN or Inf (SDPA on the CPU does so with is_causal)",
    BIAS: "a bias in float32 is rounded to the dtype of the query (SDPA keeps it)",
    MINUS_INFINITY: "a bias of -inf at the first keys of a long row gives NaN (SDPA hides the keys)",
    LOST_NAN: "NaN in the values does not reach the output (SDPA's does)",
    CAUSAL: "given both a mask and is_causal, it ignores one of them (SDPA raises an error)",
    ONE_MASK: "if the mask differs between heads, some heads use another head's (SDPA uses each head's own)",
}
"""Legitimate differences from SDPA's behaviour, in words, by their names in `Agreement.conventions`."""
OF_EMPTY_ROWS = ("nan", "nan_gradient", "mean", "all")  # the keys of CONVENTIONS for queries that see no key
REJECTABLE = {"empty_rows": EMPTY_ROWS, "hidden_nan": HIDDEN_NAN} | {
    name: name for name in CONVENTIONS if name not in OF_EMPTY_ROWS
}
"""What `check --reject` counts as wrong: the name that users type -> a key of CONVENTIONS, or the name of a rule."""


def rejectable(conventions: Collection[str]) -> list[str]:
    """Return the names for `check --reject` of accepted differences from SDPA (`conventions`, texts of CONVENTIONS)."""
    names = [name for name, words in CONVENTIONS.items() if words in conventions]
    return list(dict.fromkeys("empty_rows" if name in OF_EMPTY_ROWS else name for name in names))


class Agreement(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a check: the errors on each probe (kind of input), the rules, and a diagnosis if it fails."""

    probes: tuple[ProbeResult, ...]
    rules: tuple[RuleResult, ...] = ()
    diagnosis: str = ""
    mistakes: tuple[str, ...] = ()  # names of known mistakes that each give this answer
    step: str = ""  # the first step of attention with a different result, if known
    conventions: tuple[str, ...] = ()  # keys of CONVENTIONS

    def tensors(self) -> Iterator[tuple[str, TensorError]]:
        """Yield (name of the kind of input, errors of the tensor) for each compared tensor."""
        for probe in self.probes:
            for tensor in probe.tensors:
                yield probe.probe, tensor

    @property
    def agrees(self) -> bool:
        """Whether the answer is right."""
        return self.grade is CheckVerdict.right

    @property
    def grade(self) -> CheckVerdict:
        """Wrong if nothing was compared, a rule is broken or a fault was diagnosed; else the worst grade of a tensor.

        If none of the first three holds and the code computes in float32 (FLOAT32), the grade is right whatever the
        tensors' grades.
        """
        grades = {tensor.grade for _, tensor in self.tensors()}
        if not grades or self.broken_rules or self.diagnosis:
            return CheckVerdict.wrong
        if FLOAT32 in self.conventions:  # right by the tolerance of float32, not by that of the tensors here
            return CheckVerdict.right
        return next(grade for grade in CheckVerdict if grade in grades)

    @property
    def broken_rules(self) -> tuple[RuleResult, ...]:
        """The broken rules that affect the grade."""
        return tuple(rule for rule in self.rules if not rule.holds and not rule.is_noted)

    @property
    def notes(self) -> tuple[RuleResult, ...]:
        """The broken rules that do not affect the grade."""
        return tuple(rule for rule in self.rules if not rule.holds and rule.is_noted)

    @property
    def error_ratio(self) -> float | None:
        """The largest `ratio` of all tensors; None if nothing was compared or an error is not finite."""
        ratios = [tensor.ratio for _, tensor in self.tensors()]
        finite = [ratio for ratio in ratios if ratio is not None]
        return max(finite) if finite and len(finite) == len(ratios) else None


class Operator(msgspec.Struct, frozen=True, kw_only=True):
    """All calls of one operator within one call of a cell; `name` is the profiler's, such as aten::bmm."""

    name: str
    num_calls: int
    self_s: float  # seconds of its kernels or, on the host, of itself without nested operators, with the profiler on
    kernels: tuple[str, ...] = ()  # names of its kernels on devices other than the host


class Operators(msgspec.Struct, frozen=True, kw_only=True):
    """The operators of one call, profiled apart from timing, and whether the requested backend ran."""

    calls: tuple[Operator, ...]
    requested: str = ""  # the backend in the implementation's name; empty: none
    observed: str = ""  # the backend that ran; empty: no backend of PyTorch
    copies: str = ""  # declared copies inside the timed call; empty: none
    kernel_s: float = 0.0  # seconds with a running kernel on a device other than the host; 0: none was seen

    @property
    def fallback(self) -> str:
        """A note that the requested backend did not run, and which one did; "" if it ran, or none was requested."""
        if self.requested in {"", self.observed}:
            return ""
        ran = f"{self.observed} ran" if self.observed else "no backend of PyTorch's ran"
        return f"the {self.requested} backend was asked for and {ran}"


class Status(enum.StrEnum):
    """The result of a cell. Only an `ok` cell has a speed."""

    ok = "ok"
    disagrees = "disagrees"  # the answer is wrong
    approximate = "approximate"  # meant to be close to attention: compared, but neither judged nor timed
    unsupported = "unsupported"
    fallback = "fallback"  # another backend ran than the requested one, or the requested one cannot run
    out_of_memory = "out_of_memory"
    timeout = "timeout"
    crashed = "crashed"
    error = "error"
    invalid = "invalid"  # its process sent an impossible result, or a metric is not finite
    lost = "lost"  # no host of a cluster could measure it


FALSE_SHARE = 0.05
"""Error level of a session: at most this share of its verdicts faster and slower is expected to be false. If two states
of the code are compared, it is the largest probability of any false verdict (`judge` in statistics/verdict.py)."""


class Verdict(enum.StrEnum):
    """The conclusion of a comparison."""

    faster = "faster"
    slower = "slower"
    equivalent = "equivalent"
    undecided = "undecided"


class Flag(enum.IntFlag):
    """Observations about a sample, mostly reasons to suspect its time, on a device with queues or on the processor."""

    # its device time is below the host's time to issue it (older journals: 5 times this time), or it is `not_hidden`
    host_bound = 1
    not_hidden = 2  # the device waited for the host during the sample
    waits = 4  # the host waits for the device inside a call
    other_stream = 8  # the device was busy after the current stream had finished
    waits_read = 16  # the system reports how long threads wait for a processor
    waited = 32  # a thread waited for a processor for more than a tenth of the sample (WAITED in timing/blocks.py)
    host_near = 64  # not host-bound, but its device time is below 5 times the host's time to issue it (HOST_NEAR)


class DeviceState(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The state of a device at one moment, as its driver reports it; 0: unknown."""

    clock_mhz: float = 0.0  # of the multiprocessors
    temperature_c: float = 0.0
    power_w: float = 0.0
    slowed_by: Annotated[int, Meta(ge=0, lt=2**53)] = 0  # bits of NVML's reasons for a reduced clock (devices/nvml.py)


EPOCH_BITS, VISIT_BITS, BLOCK_BITS = 20, 22, 20  # bits of epoch, visit and block in `Samples.places`


class Sample(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One measured value, with the numbers of its process (epoch), visit and block, and its position (slot).

    A visit is a few blocks of one workload in one process. In old journals a sample has two more fields.
    """

    value: float  # of one call, in the measurement's unit
    num_calls: Annotated[int, Meta(ge=1, lt=2**53)] = 1
    epoch: Annotated[int, Meta(ge=0, lt=2**EPOCH_BITS)] = 0  # number of the process in the run
    visit: Annotated[int, Meta(ge=0, lt=2**VISIT_BITS)] = 0
    block: Annotated[int, Meta(ge=0, lt=2**BLOCK_BITS)] = 0
    slot: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # position in the block
    start_s: float = 0.0  # on the machine's monotonic clock, which orders the samples of one process
    num_faults: Annotated[int, Meta(lt=2**53)] = 0  # minor page faults during the sample
    load: float = 0.0  # the machine's one-minute load average at the start
    host_s: float = 0.0  # seconds in which the host issues a call on a device with queues; elsewhere 0
    flags: Annotated[int, Meta(ge=0, lt=2**31)] = 0  # bits of Flag


LATENCY = "latency"  # the time of a call, the only metric whose samples are taken in blocks
KEPT_MEMORY, KEPT_ONCE = KEPT = "kept_memory", "kept_once"
"""Metrics of memory that stays allocated after results are gone: by each call, and once by the first calls."""
FIRST_CALL, FIRST_CACHED = "first_call", "first_call_cached"
FIRST_OTHERS = {f"first_call_new_{what}": f"new {what}" for what in ("length", "batch", "dtype")}
FIRST_CALLS = (FIRST_CALL, FIRST_CACHED, *FIRST_OTHERS)
"""Metrics of first calls: in a fresh process, in a second one with filled compile caches, and later in the first
process at another length, batch and dtype (FIRST_OTHERS, with the words for them)."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """All raw samples of one metric of one cell, in time order."""

    metric: str
    unit: str
    samples: Sequence[Sample]
    warnings: tuple[str, ...] = ()


LIMITS = ("gpu power limit", "gpu ECC", "gpu MIG")  # entries of `Environment.clocks` that are part of the fingerprint
OF_PROCESS = ("num_threads", "settings", "flags")  # fields of an Environment that may differ between processes


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The machine and software of a run. It has neither a host name nor a path, which would identify people."""

    cpu: str
    cpu_capability: str
    num_physical_cores: int
    num_logical_cores: int
    memory_bytes: int
    system: str
    python: str
    versions: dict[str, str]  # of the loaded packages: torch, numpy, mkl, onednn, cuda, cudnn, attnbench
    accelerator: str = ""
    num_threads: int = 0
    settings: dict[str, str] = msgspec.field(default_factory=dict)  # thread and malloc variables, if set
    flags: dict[str, str] = msgspec.field(default_factory=dict)  # TF32, determinism, matmul precision
    clocks: dict[str, str] = msgspec.field(default_factory=dict)  # frequency governor, limits and modes of GPUs
    load: float | None = None  # one-minute load average at the start of the worker
    native_dtypes: tuple[str, ...] | None = None  # half-precision dtypes that the processor multiplies; None: unknown

    @property
    def fingerprint(self) -> str:
        """Eight hex digits of a hash of the fields that must match before times may be compared.

        Memory is rounded to whole GiB, since the part reserved by kernel and hypervisor differs between versions. The
        native dtypes are left out, since they follow from the processor and the version of torch.
        """
        return _digits_of(self.must_match())

    @property
    def machine_fingerprint(self) -> str:
        """The fingerprint of the machine, without the fields that each process sets."""
        return _digits_of(self.machine())

    def machine(self) -> dict[str, Any]:
        """Return the fields of `must_match` that describe the machine: all except OF_PROCESS."""
        return {name: value for name, value in self.must_match().items() if name not in OF_PROCESS}

    def must_match(self) -> dict[str, Any]:
        """Return the fields that must match before times may be compared, by name."""
        fields = msgspec.structs.asdict(self) | {"memory_bytes": round(self.memory_bytes / 2**30) * 2**30}
        for varies in ("load", "clocks", "native_dtypes"):
            del fields[varies]
        limits = {name: self.clocks[name] for name in LIMITS if name in self.clocks}
        return fields | ({"limits": limits} if limits else {})  # unchanged for a machine without a GPU


def _digits_of(fields: dict[str, Any]) -> str:
    return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()[:8]


MATMUL, COPY = "matmul", "copy"  # kinds of loads that measure ceilings
HardwareKey = tuple[str, str, int]  # device, dtype and number of threads (0: one for each core), as in `Workload.place`


class CeilingSample(msgspec.Struct, frozen=True, array_like=True):
    """Some calls of one load: a matrix product of `size` x `size` matrices, or a copy of `size` bytes."""

    kind: str
    dtype: str  # of the computation: half precision may be fastest in float32
    size: int
    amount: int  # work of one call: FLOPs of a product, bytes read and written by a copy
    value: float  # seconds of one call
    num_calls: int
    round: int  # every load runs once in a round


class Ceiling(msgspec.Struct, frozen=True, kw_only=True):
    """The best observed rate in FLOP/s or bytes/s; `spread` is `rate` / the median of the best rates of all rounds."""

    rate: float
    spread: float


class Ceilings(msgspec.Struct, frozen=True, kw_only=True):
    """The samples of matrix products and copies (loads) on one device, for one dtype and number of threads.

    A ceiling is the best rate in these samples. The run itself measured them; if there are none, `message` says why.
    Source of the idea: S. Williams, A. Waterman, D. Patterson, Roofline, 2009,
    https://doi.org/10.1145/1498765.1498785.
    """

    device: str
    dtype: str
    num_threads: int
    samples: tuple[CeilingSample, ...] = ()
    crowding: float = 0.0  # load average per usable processor before the measurement
    message: str = ""

    @property
    def key(self) -> HardwareKey:
        """Device, dtype and number of threads of the workloads for which the ceilings hold."""
        return self.device, self.dtype, self.num_threads

    @property
    def matmul(self) -> Ceiling | None:
        """FLOP/s of the fastest matrix product of any size, in `dtype` or a wider one; None without samples."""
        return self._best(MATMUL)

    def copy(self, num_bytes: float, *, is_cold: bool = False) -> Ceiling | None:
        """Return the bytes/s of the fastest copy of at least `num_bytes`, which caches below that size cannot speed up.

        If `is_cold` is true or no copy is that large, return the rate of the largest copy, which fits in no cache. If
        `num_bytes` is 0, return the best rate of any copy. Without samples, return None.
        """
        largest = max((sample.amount for sample in self.samples if sample.kind == COPY), default=0)
        return self._best(COPY, largest if is_cold else min(largest, num_bytes))

    def _best(self, kind: str, least: float = 0.0) -> Ceiling | None:
        """Return the best rate among samples whose amount of work is at least `least`; None without such samples."""
        rounds: dict[int, float] = {}
        for sample in self.samples:
            if sample.kind == kind and sample.amount >= least:
                rounds[sample.round] = max(rounds.get(sample.round, 0.0), sample.amount / sample.value)
        if not rounds:
            return None
        best = max(rounds.values())
        return Ceiling(rate=best, spread=best / median(rounds.values()))


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """All facts about one cell (an implementation on a workload). A record that is not `ok` has no speed."""

    run: str
    time: str  # start of the process that checked the cell or, if none did, of the run
    commit: str  # that of RunStarted or, with two sides, of the cell's side
    workload: Workload
    implementation: str
    side: str = ""  # as in Arm
    environment: Environment | None
    host: str = ""  # in a run on several machines, the machine that measured all samples of the cell
    status: Status
    message: str = ""
    is_predicted: bool = False  # the status is a prediction; the cell was not tried
    agreement: Agreement | None = None
    operators: Operators | None = None
    executed_flops: int | None = None  # of one call, reported by the implementation; None: not reported
    measurements: tuple[Measurement, ...] = ()

    @property
    def arm(self) -> Arm:
        """The cell's arm, in the role `measured`."""
        return Arm(implementation=self.implementation, side=self.side)

    @property
    def key(self) -> Key:
        """The cell's key, unique in its run."""
        return self.workload.id, self.arm

    def measurement(self, metric: str) -> Measurement | None:
        """Return the measurement of a metric; None if it was not measured."""
        return next((each for each in self.measurements if each.metric == metric), None)

    def samples(self, metric: str) -> Sequence[Sample]:
        """Return the samples of a metric; empty if it was not measured."""
        return next((each.samples for each in self.measurements if each.metric == metric), ())

    @property
    def is_finding(self) -> bool:
        """Whether the cell is wrong or failed: its status is not a prediction, nor ok, unsupported or approximate."""
        accepted = {Status.ok, Status.unsupported, Status.approximate}
        return self.status not in accepted and not self.is_predicted

    @property
    def is_wrong(self) -> bool:
        """Whether the answer is wrong; other failures, such as an error, have no answer."""
        return self.status is Status.disagrees
