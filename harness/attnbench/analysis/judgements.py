"""The verdict of a check on each implementation, with its coverage and its gaps.

A verdict without its coverage misleads: "right" after 4 of 75 cells is a guess. So a judgement counts the compared
cells, and names the features that no compared cell had. It uses records only, without torch.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import combinations

from attnbench.analysis.results import Results
from attnbench.storage.records import (
    CONVENTIONS,
    FLOAT32,
    KEPT_MEMORY,
    CheckVerdict,
    Record,
    Status,
    approximation_errors,
)
from attnbench.units import grouped, multiple, percent
from attnbench.workloads.masks import (
    Chunks,
    Document,
    Mask,
    Padding,
    Prefix,
    Ragged,
    SlidingWindow,
    SlidingWindowBottomRight,
    Window,
)
from attnbench.workloads.workload import Workload

LEAST_SHARE, LEAST_CELLS = 1 / 3, 12  # a verdict needs answers from a third of the planned cells; 12 are enough
LONG, WIDE = 256, 128  # LONG: two tiles of the usual 128 keys; WIDE: the head width of most language models


def verdict_of(record: Record) -> CheckVerdict:
    """Return the verdict on the answer of one cell."""
    if record.is_wrong:
        return CheckVerdict.wrong
    if record.agreement is None:
        return CheckVerdict.not_judged
    if record.status is Status.approximate:
        return CheckVerdict.approximate
    return record.agreement.grade


def _hides_all(workload: Workload) -> bool:
    """Return whether the mask may hide every key from some query."""
    is_short = "causal_bottom_right" in workload.mask and workload.kv_len < workload.seq_len
    return is_short or workload.mask.startswith("padding_to_nothing")


def _has_part(workload: Workload, kinds: tuple[type[Mask], ...]) -> bool:
    """Return whether the mask has a part of one of the `kinds`."""
    return any(isinstance(part, kinds) for part in workload.mask_rule.parts)


FEATURES: dict[str, Callable[[Workload], bool]] = {
    "gradients": lambda w: w.direction != "inference",
    "inference": lambda w: w.direction == "inference",
    "modules": lambda w: w.scope == "module",
    "half precision": lambda w: w.dtype in {"bfloat16", "float16"},
    "float64": lambda w: w.dtype == "float64",
    "masks": lambda w: w.mask_rule.hides,
    "windows": partial(_has_part, kinds=(SlidingWindow, SlidingWindowBottomRight, Window)),
    "padding": partial(_has_part, kinds=(Padding,)),
    "prefix masks": partial(_has_part, kinds=(Prefix,)),
    "document masks": partial(_has_part, kinds=(Document,)),
    "chunked masks": partial(_has_part, kinds=(Chunks,)),
    "ragged lengths": partial(_has_part, kinds=(Ragged,)),
    "scores with a bias": lambda w: any(part.is_additive for part in w.mask_rule.changes),
    "softcap": lambda w: any(not part.is_additive for part in w.mask_rule.changes),
    "queries that see no key": _hides_all,
    "grouped heads": lambda w: w.num_kv_heads < w.num_heads,
    "decode": lambda w: w.seq_len == 1 < w.kv_len,
    "T != S": lambda w: 1 < w.seq_len != w.kv_len,
    "values of another width": lambda w: w.value_dim != w.head_dim,
    f"heads {WIDE} wide": lambda w: w.head_dim >= WIDE,
    f"lengths beyond {LONG}": lambda w: w.kv_len > LONG,
    "strided memory": lambda w: w.layout != "contiguous",
    "dropout": lambda w: w.dropout > 0,
    "a scale of its own": lambda w: w.scale > 0,
    "sinks": lambda w: w.sinks != "none",
}
"""Features of a workload by the names that users see, each with the test for it."""
MASKS = ("windows", "padding", "prefix masks", "document masks", "chunked masks", "ragged lengths")
PAIRED: tuple[str, ...] = (
    "gradients",
    "half precision",
    "windows",
    "padding",
    "scores with a bias",
    "softcap",
    "sinks",
)
PAIRED += ("grouped heads", "decode", "T != S", "values of another width", f"lengths beyond {LONG}")
"""Features whose pairs are counted, too, since many mistakes show only where two features meet."""
MOST_PAIRS = 3  # largest number of untested pairs that a verdict names
EXPECTED, MANY_CELLS = ("gradients", "masks", "decode", "T != S"), 40
"""Features that checks of at least MANY_CELLS cells, none with requests, report as never tried even if no planned cell
has them. A reader expects them, but an adapter may exclude them, as `has_cache` excludes gradients."""


def _as_compared(record: Record) -> Workload:
    """Return the record's workload, with inference as its direction if the implementation has no backward pass."""
    notes = () if record.agreement is None else record.agreement.notes
    has_backward = all(note.rule != "backward" for note in notes)
    return record.workload if has_backward else record.workload.with_axes({"direction": "inference"})


def _features(workload: Workload) -> frozenset[str]:
    """Return the names of the features of a workload."""
    return frozenset(name for name, has in FEATURES.items() if has(workload))


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on one implementation, with the cells behind it."""

    implementation: str
    records: tuple[Record, ...]
    planned: tuple[Workload, ...]

    @cached_property
    def compared(self) -> tuple[Record, ...]:
        """Cells whose answer was compared with the answer of the oracle."""
        return tuple(record for record in self.records if record.agreement is not None)

    @cached_property
    def wrong(self) -> tuple[Record, ...]:
        """Cells with a wrong answer."""
        return tuple(record for record in self.records if record.is_wrong)

    @cached_property
    def failed(self) -> tuple[Record, ...]:
        """Cells with a finding other than a wrong answer, such as an error or a timeout."""
        return tuple(record for record in self.records if record.is_finding and not record.is_wrong)

    @property
    def verdict(self) -> CheckVerdict:
        """The worst verdict of all cells; `not judged` if no cell was judged."""
        verdicts = set(map(verdict_of, self.records))
        return next((each for each in CheckVerdict if each in verdicts), CheckVerdict.not_judged)

    @property
    def is_enough(self) -> bool:
        """Whether enough cells were compared for an unqualified verdict, and none failed."""
        return len(self.compared) >= self.least and not self.failed

    @property
    def least(self) -> int:
        """The number of compared cells that an unqualified verdict needs."""
        return max(1, min(LEAST_CELLS, math.ceil(LEAST_SHARE * len(self.planned))))

    @property
    def is_unsupported(self) -> bool:
        """Whether the implementation supports none of the cells, or is not installed."""
        return not self.compared and not self.failed

    @property
    def never_tried(self) -> tuple[str, ...]:
        """Features of planned cells, and the features in EXPECTED, that no compared cell has.

        The last entry counts the pairs of features in PAIRED that were tried only apart, if there are any.
        """
        compared = [_features(_as_compared(record)) for record in self.compared]
        planned = [_features(workload) for workload in self.planned]
        seen, possible = (set[str]().union(*each) for each in (compared, planned))
        if len(self.planned) >= MANY_CELLS and not any(workload.requests for workload in self.planned):
            possible.update(EXPECTED)
        names = [name for name in FEATURES if name in possible - seen]
        if not seen.intersection(MASKS) and len(possible.intersection(MASKS)) > 1:
            names = [name for name in names if name not in MASKS] + ["masks other than causal"] * ("masks" in seen)
        elif "masks" in names:
            names = [name for name in names if name not in MASKS]
        trained = {"modules", "gradients"}
        rules = {rule.rule for each in self.compared if each.agreement for rule in each.agreement.rules}
        if any(trained <= each for each in compared) and "training mode" not in rules:
            names.append("training mode")
        pairs = [pair for pair in combinations(PAIRED, 2) if any(map({*pair}.issubset, planned))]
        known = [pair for pair in pairs if seen.issuperset(pair)]
        if missing := [pair for pair in known if not any(map({*pair}.issubset, compared))]:
            some = ", ".join(map(" with ".join, missing[:MOST_PAIRS]))
            more = ", ..." * (len(missing) > MOST_PAIRS)
            names.append(f"{len(missing)} of {len(known)} pairs of these features ({some}{more})")
        return tuple(names)

    @property
    def keeps(self) -> str:
        """The warning about memory that grows with each call, from the first cell that has one; "" if there is none."""
        kept = filter(None, (record.measurement(KEPT_MEMORY) for record in self.records))
        return next((each.warnings[0] for each in kept if each.warnings and each.samples[0].value), "")

    @property
    def conventions(self) -> tuple[str, ...]:
        """Accepted differences from SDPA's behaviour, such as NaN for a query that sees no key, each described once."""
        agreements = filter(None, (record.agreement for record in self.compared))
        return tuple(dict.fromkeys(CONVENTIONS[name] for one in agreements for name in one.conventions))

    @property
    def notes(self) -> Mapping[str, str]:
        """The first note of each rule, by the name of the rule. Notes do not affect the verdict."""
        notes: dict[str, str] = {}
        for record in self.compared:
            for note in record.agreement.notes if record.agreement is not None else ():
                notes.setdefault(note.rule, note.found)
        return notes

    @property
    def worst(self) -> float | None:
        """The largest error / tolerance; None if an error is not finite or nothing was compared.

        Float64 cells of code that computes in float32 do not count: they are judged by the tolerance of float32.
        """
        agreements = (record.agreement for record in self.compared)
        ratios = [one.error_ratio for one in agreements if one is not None and FLOAT32 not in one.conventions]
        finite = [ratio for ratio in ratios if ratio is not None]
        return max(finite) if finite and len(finite) == len(ratios) else None

    @property
    def error(self) -> str:
        """A description of the largest error of each tensor of an approximation, on normally distributed inputs."""
        worst = dict[str, tuple[float, str]]()
        for record in self.compared:
            for where, share in approximation_errors(record.agreement).items() if record.agreement is not None else ():
                name = where.partition(" of head")[0]
                worst[name] = max(worst.get(name, (0.0, where)), (share, where))
        output, *others = worst.values() or [(0.0, "output")]
        size = f"off by up to {percent(output[0])} of the largest value" if math.isfinite(output[0]) else "not finite"
        rest = "".join(
            f", {where} {percent(share) if math.isfinite(share) else 'not finite'}" for share, where in others
        )
        return f"{size} on {len(self.compared)} of {len(self.planned)} cells (worst: {output[1]}{rest})"

    @property
    def _least_precise(self) -> str:
        """A description of the imprecise tensor with the largest error / tolerance, and of its cell."""
        seen = [
            (each.ratio or 0.0, each.tensor, probe, record.workload.id)
            for record in self.compared
            for probe, each in (record.agreement.tensors() if record.agreement is not None else ())
            if each.grade is CheckVerdict.imprecise
        ]
        ratio, tensor, probe, cell = max(seen)
        return f"errors of up to {multiple(ratio)} times the tolerance: {tensor} on {probe} inputs of {cell}"

    @property
    def word(self) -> str:
        """The verdict in a few words; "where tried" is added to right and imprecise if `is_enough` is false."""
        is_reserved = self.verdict in {CheckVerdict.right, CheckVerdict.imprecise} and not self.is_enough
        return f"{self.verdict} where tried" if is_reserved else str(self.verdict)

    @property
    def sentence(self) -> str:
        """The verdict with its coverage, in words."""
        compared, planned = len(self.compared), len(self.planned)
        cells = f"{planned} cell{'s' if planned != 1 else ''}"
        if self.verdict is CheckVerdict.wrong:
            return f"{self.verdict} on {len(self.wrong)} of {compared} cells compared"
        if self.is_unsupported:
            return f"{self.verdict}: {self.records[0].message or 'unsupported'}"
        if self.verdict is CheckVerdict.approximate:
            return f"{self.verdict}, neither judged nor timed: {self.error}"
        covered = f"on {compared} of {cells}" if self.is_enough else f"({compared} of {cells})"
        parts = [f"{self.word} {covered}" if self.compared else f"{self.verdict} on any of {cells}"]
        if self.verdict is CheckVerdict.imprecise:
            parts.append(self._least_precise)
        if self.failed:
            statuses = ", ".join(sorted({record.status for record in self.failed}))
            parts.append(f"{len(self.failed)} not judged ({statuses})")
        if self.never_tried:
            parts.append(f"never tried: {', '.join(self.never_tried)}")
        if 0 < compared < self.least:
            parts.append(f"a verdict needs {self.least} cells: limit the check to supported cells with --set")
        return "; ".join(parts)


def judgements(results: Results) -> list[Judgement]:
    """Judge each implementation that has a record, in the order of the records."""
    by_name = grouped(results.records, lambda record: record.implementation)
    planned = tuple(results.plan.asked)
    return [
        Judgement(implementation=name, records=tuple(records), planned=planned) for name, records in by_name.items()
    ]
