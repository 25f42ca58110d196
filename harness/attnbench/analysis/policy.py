"""Learn a policy from runs: the small decision tree whose choices cost least time, judged on workloads it has not seen.

What counts is the mean logarithm of the time divided by that of `sdpa`, which comes from blocks that have both. A tree
is grown until its leaves are small, pruned by the least loss for each leaf, and cut to the size that does best on
workloads that were left out. A leaf may name an implementation only where it is faster than `sdpa` on the whole, by
more than the smallest effect and by more than noise explains, where it ran on each of the leaf's workloads, and where
it was on none of them slower beyond both.

Source: L. Breiman, J. Friedman, R. Olshen, C. Stone, Classification and Regression Trees, 1984, chapters 3 and 8, with
times in place of classes.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attnbench import plugins
from attnbench.analysis.comparisons import compared
from attnbench.analysis.results import Results
from attnbench.storage.records import Environment, Status
from attnbench.workloads.policy import (
    ITSELF,
    KINDS,
    NUMBERS,
    OTHERWISE,
    SIZES,
    Condition,
    Evidence,
    Policy,
    Regret,
    Rule,
    Values,
    is_plain,
    values_of,
)
from attnbench.workloads.sweep import SMALLEST_EFFECT
from attnbench.workloads.workload import Workload

MOST_LEAVES = 12
FEWEST_WORKLOADS = 5
"""Of a leaf."""
NUM_FOLDS = 10
SURE, CERTAIN = 3.0, 4.0
"""So many standard errors are no noise: of one log ratio, and of the best of many means of many parts."""
UNKNOWN_ERROR = 0.05
"""The standard error of a log ratio of too few visits for one."""
LOST = math.log(2.5)
"""What it is taken to cost to choose what failed, or was left out as predicted to take this or more."""

Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Workloads by their axes, and for each candidate the log of its time divided by `sdpa`'s; NaN: it did not run."""

    values: tuple[Values, ...]
    names: tuple[str, ...]
    logs: Floats  # (workloads, candidates)
    errors: Floats  # standard errors of these
    is_refused: Booleans  # unsupported there: whoever chooses it gets sdpa

    def part(self, chosen: Any) -> "Measured":  # noqa: ANN401 - whatever indexes an array
        """Some of the workloads."""
        values = tuple(self.values[each] for each in np.arange(len(self.values))[chosen])
        return replace(
            self,
            values=values,
            logs=self.logs[chosen],
            errors=self.errors[chosen],
            is_refused=self.is_refused[chosen],
        )

    def cost(self, row: int, name: str) -> float:
        """The log ratio of choosing that candidate, known or not."""
        if name == OTHERWISE:
            return 0.0
        column = self.names.index(name)
        log = float(self.logs[row, column])
        if math.isnan(log):
            return 0.0 if self.is_refused[row, column] else LOST
        return log

    @property
    def best(self) -> Floats:
        """The least log ratio of each workload, sdpa's own 0 included."""
        known: Floats = np.nan_to_num(self.logs, nan=math.inf).min(axis=1, initial=0.0)
        return known


@dataclass(kw_only=True)
class Node:
    """A part of the workloads: what to choose there, and perhaps how to divide it."""

    num_workloads: int
    choice: str
    cost: float  # the sum of the log ratios of that choice
    condition: Condition | None = None
    inside: "Node | None" = None  # where the condition holds
    outside: "Node | None" = None

    @property
    def leaves(self) -> int:
        """How many it has, itself included where it is one."""
        return 1 if self.inside is None or self.outside is None else self.inside.leaves + self.outside.leaves

    @property
    def total(self) -> float:
        """The cost of its leaves."""
        return self.cost if self.inside is None or self.outside is None else self.inside.total + self.outside.total

    def branches(self) -> Iterator["Node"]:
        """All that divide."""
        if self.inside is not None and self.outside is not None:
            yield self
            yield from self.inside.branches()
            yield from self.outside.branches()

    def close(self) -> None:
        """Make it a leaf."""
        self.condition = self.inside = self.outside = None


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a tree must keep to."""

    smallest_effect: float = SMALLEST_EFFECT
    most_leaves: int = MOST_LEAVES
    fewest_workloads: int = FEWEST_WORKLOADS

    @property
    def margin(self) -> float:
        """The smallest effect on the log scale."""
        return math.log1p(self.smallest_effect)


@dataclass(frozen=True, kw_only=True)
class Learned:
    """The rules, and how they did on workloads that they were not learned from: log ratios to the fastest."""

    rules: tuple[Rule, ...]
    regrets: Floats
    sdpa_regrets: Floats


def learn(
    results: Sequence[Results],
    *,
    smallest_effect: float = SMALLEST_EFFECT,
    most_leaves: int = MOST_LEAVES,
    fewest_workloads: int = FEWEST_WORKLOADS,
) -> Policy:
    """The policy that runs of one machine support; candidates are implementations that have a name.

    Raises:
        ValueError: the runs are of several machines, or have no workload on which `sdpa` and another were timed.
    """
    runs = [each for each in results if each.plan.sides is None]
    environments = [environment for each in runs for environment in each.environments.values()]
    machines = {each.machine_fingerprint: each for each in environments}
    if len(machines) != 1:
        found = ", ".join(machines) or "none"
        raise ValueError(f"a policy holds for one machine, and these runs are of {found}: give the runs of one")
    machine: Environment = environments[0]
    measured = table(runs)
    limits = Limits(smallest_effect=smallest_effect, most_leaves=most_leaves, fewest_workloads=fewest_workloads)
    learned = learn_rules(measured, limits)
    return Policy(
        machine=machine.machine_fingerprint,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        environment=machine.machine(),
        num_threads=machine.num_threads,
        evidence=Evidence(
            runs=tuple(each.run for each in runs),
            num_workloads=len(measured.values),
            candidates=measured.names,
            fingerprints=tuple(dict.fromkeys(each.fingerprint for each in environments)),
            smallest_effect=smallest_effect,
        ),
        regret=Regret(
            mean=math.expm1(float(learned.regrets.mean())),
            worst=math.expm1(float(learned.regrets.max())),
            sdpa_mean=math.expm1(float(learned.sdpa_regrets.mean())),
            sdpa_worst=math.expm1(float(learned.sdpa_regrets.max())),
        ),
        covers=tuple(covers(measured.values)),
        rules=learned.rules,
    )


def table(results: Sequence[Results]) -> Measured:
    """What runs say of the workloads on which `sdpa` was timed; of one that several have, the mean.

    Raises:
        ValueError: there is none, or no other implementation was timed.
    """
    logs: dict[Workload, dict[str, list[tuple[float, float]]]] = {}
    refused: set[tuple[Workload, str]] = set()
    wrong: set[str] = set()
    threads: dict[Workload, int] = {}
    for run in results:
        named = {plugins.name_of(spec) for spec in run.plan.implementations if is_named(spec)}
        ratios = {
            each.record.key: (math.log(each.ratio.point), each.ratio.standard_error or UNKNOWN_ERROR)
            for each in compared(run)
        }
        for record in run.records:
            if record.is_wrong:
                wrong.add(record.implementation)
            if record.status is Status.ok and run.plan.is_reference(record.arm):
                ratios[record.key] = (0.0, 0.0)
        sdpa = {key[0]: each for key, each in ratios.items() if key[1].implementation == OTHERWISE}
        for record in run.records:
            workload, name = record.workload, record.implementation
            if workload.id not in sdpa or name not in named or not is_plain(workload):
                continue
            if record.environment is not None:
                threads[workload] = record.environment.num_threads
            own = logs.setdefault(workload, {})
            if record.status is Status.unsupported:
                refused.add((workload, name))
            if record.key in ratios and name != OTHERWISE:
                (log, error), (zero, zero_error) = ratios[record.key], sdpa[workload.id]
                own.setdefault(name, []).append((log - zero, math.hypot(error, zero_error)))
    names = sorted({name for own in logs.values() for name in own} - wrong)
    if not names:
        raise ValueError(
            f"these runs have no workload of a policy on which {OTHERWISE} and another were timed: run several "
            "implementations in scope attention, sdpa among them"
        )
    workloads = list(logs)
    shape = (len(workloads), len(names))
    means, errors, is_refused = np.full(shape, math.nan), np.full(shape, math.nan), np.zeros(shape, dtype=bool)
    for row, workload in enumerate(workloads):
        for column, name in enumerate(names):
            if several := logs[workload].get(name):
                means[row, column] = np.mean([log for log, _ in several])
                errors[row, column] = math.sqrt(sum(error**2 for _, error in several)) / len(several)
            is_refused[row, column] = (workload, name) in refused
    values = tuple(values_of(workload, threads.get(workload, 0)) for workload in workloads)
    return Measured(values=values, names=tuple(names), logs=means, errors=errors, is_refused=is_refused)


def is_named(spec: str) -> bool:
    """Whether a spec is a plain name, which means the same in another process, and not the policy's own."""
    base, _ = plugins.variant(spec)
    return base in plugins.implementation_names() and base != ITSELF


def learn_rules(measured: Measured, limits: Limits | None = None) -> Learned:
    """The rules for a table, and the regrets of such rules on workloads that they were learned without."""
    limits = limits or Limits()
    count = len(measured.values)
    sizes = range(1, limits.most_leaves + 1)
    held = np.zeros((len(sizes) + 1, count))  # the cost of each workload by size; of size 0, always sdpa, it is 0
    num_folds = min(NUM_FOLDS, count)
    fold_of = np.random.default_rng(0).permutation(count) % num_folds
    for fold in range(num_folds if count > 1 else 0):
        rest = measured.part(fold_of != fold)
        cut_trees = pruned(grow(rest, limits), sizes)
        for row in np.flatnonzero(fold_of == fold):
            for size, leaves in zip(sizes, cut_trees, strict=True):
                held[size, row] = measured.cost(int(row), chosen(leaves, measured.values[row]))
    best = measured.best
    size = _size(held)
    rules: tuple[Rule, ...] = ()
    if size:
        tree = cut(grow(measured, limits), size)
        merge(tree)
        rules = tuple(rules_of(tree))
    return Learned(rules=rules, regrets=held[size] - best, sdpa_regrets=-best)


def _size(held: Floats) -> int:
    """The number of leaves that does best on what was left out; a larger one only where that is no chance."""
    chosen = 0
    for size in range(1, len(held)):
        gain = held[chosen] - held[size]
        spread = float(gain.std(ddof=1)) / math.sqrt(len(gain)) if len(gain) > 1 else math.inf
        if gain.mean() > spread and gain.mean() > 0:
            chosen = size
    return chosen


Leaves = list[tuple[list[Condition], str]]
"""Of a tree: what holds there, and what is chosen. Exactly one has conditions that hold."""


def chosen(leaves: Leaves, values: Values) -> str:
    """The choice of the leaf where these values belong."""
    return next(name for conditions, name in leaves if all(each.holds(values) for each in conditions))


def pruned(tree: Node, sizes: Iterable[int]) -> list[Leaves]:
    """The tree cut to each of the sizes, which rise."""
    found = []
    for size in sorted(sizes, reverse=True):
        cut(tree, size)
        found.append([(conditions, leaf.choice) for leaf, conditions in _leaves(tree, ())])
    return found[::-1]


def cut(tree: Node, size: int) -> Node:
    """Close the branch that saves the least for each of its leaves, until there are no more leaves than `size`."""
    while tree.leaves > size:
        weakest = min(tree.branches(), key=lambda node: (node.cost - node.total) / (node.leaves - 1))
        weakest.close()
    return tree


def merge(tree: Node) -> None:
    """Close the branches both of whose sides choose the same."""
    if tree.inside is None or tree.outside is None:
        return
    merge(tree.inside)
    merge(tree.outside)
    both = (tree.inside, tree.outside)
    if all(each.condition is None for each in both) and len({each.choice for each in both}) == 1:
        tree.choice, tree.cost = both[0].choice, tree.total
        tree.close()


def grow(measured: Measured, limits: Limits) -> Node:
    """The tree that divides wherever that saves something, or makes parts more alike, down to the smallest leaves."""
    choice, cost = _choice(measured, limits)
    node = Node(num_workloads=len(measured.values), choice=choice, cost=cost)
    split = _split(measured, limits)
    if split is not None:
        node.condition = split
        holds = np.array([split.holds(values) for values in measured.values])
        node.inside, node.outside = (grow(measured.part(part), limits) for part in (holds, ~holds))
    return node


@dataclass(kw_only=True)
class _Sums:
    """Over the first workloads of an order: what costs follow from."""

    counts: Floats  # (n, 1)
    logs: Floats
    apart: Floats  # of the candidates' ratios, clipped, from their mean: the sum of squares
    variances: Floats
    bars: Floats  # of how many a candidate is barred

    def costs(self, margin: float) -> Floats:
        """The cost of the best choice for each, with the rules for leaves; 0 is sdpa's."""
        mean, noise = self.logs / self.counts, CERTAIN * np.sqrt(self.variances) / self.counts
        is_allowed = (self.bars == 0) & (mean <= -margin) & (mean + noise < 0)
        best: Floats = np.where(is_allowed, self.logs, 0.0).min(axis=1, initial=0.0)
        return best


def _sums(measured: Measured, order: Any, margin: float) -> tuple[_Sums, _Sums]:  # noqa: ANN401 - indices
    """Of the first 1, 2, ... n workloads in that order, and of all the others."""
    logs, errors = measured.logs[order], measured.errors[order]
    barred = np.isnan(logs) | (logs - SURE * errors > margin)
    known = np.clip(np.nan_to_num(logs, nan=LOST), -LOST, LOST)
    true = np.nan_to_num(logs, nan=0.0)
    columns = (true, known**2, np.nan_to_num(errors) ** 2, barred.astype(float), known)
    first = [np.cumsum(each, axis=0) for each in columns]
    rest = [each[-1] - each for each in first]
    counts = np.arange(1, len(logs) + 1, dtype=float)[:, None]
    found = []
    for parts, number in ((first, counts), (rest, np.maximum(len(logs) - counts, 1))):
        true_sum, squares, variances, bars, known_sum = parts
        apart = (squares - known_sum**2 / number).sum(axis=1)
        found.append(_Sums(counts=number, logs=true_sum, apart=apart, variances=variances, bars=bars))
    return found[0], found[1]


def _choice(measured: Measured, limits: Limits) -> tuple[str, float]:
    """The best choice for all of the workloads, and its cost."""
    whole, _ = _sums(measured, slice(None), limits.margin)
    mean, noise = whole.logs[-1] / len(measured.values), CERTAIN * np.sqrt(whole.variances[-1]) / len(measured.values)
    is_allowed = (whole.bars[-1] == 0) & (mean <= -limits.margin) & (mean + noise < 0)
    if not is_allowed.any():
        return OTHERWISE, 0.0
    best = int(np.where(is_allowed, mean, math.inf).argmin())
    return measured.names[best], float(whole.logs[-1][best])


def _split(measured: Measured, limits: Limits) -> Condition | None:
    """The condition that saves most, else the one that makes both parts most alike; None: no part is large enough."""
    count, fewest = len(measured.values), limits.fewest_workloads
    if count < 2 * fewest:
        return None
    whole, _ = _sums(measured, slice(None), limits.margin)
    before, unlike = float(whole.costs(limits.margin)[-1]), float(whole.apart[-1])
    best: tuple[float, float] = (0.0, 0.0)
    found = None
    for condition, order, number in _orders(measured.values, fewest):
        first, rest = _sums(measured, order, limits.margin)
        place = number - 1
        after = first.costs(limits.margin)[place] + rest.costs(limits.margin)[place]
        saved = np.maximum(before - after, 0.0)
        alike = unlike - first.apart[place] - rest.apart[place]
        for each, one, other in zip(condition, saved, alike, strict=True):
            score = (round(float(one), 9), float(other))
            if score > best and (score[0] > 0 or score[1] > limits.margin**2):
                best, found = score, each
    return found


def _orders(values: Sequence[Values], fewest: int) -> Iterator[tuple[list[Condition], Any, Any]]:
    """For each axis an order of the workloads, and the conditions that hold for so many of the first."""
    count = len(values)
    for axis in KINDS:
        column = np.array([each[axis] for each in values])
        for value in sorted(set(column.tolist())):
            holds = column == value
            number = int(holds.sum())
            if fewest <= number <= count - fewest:
                yield [Condition(axis, "is", value)], np.argsort(~holds, kind="stable"), np.array([number])
    for axis in NUMBERS:
        numbers = np.array([each[axis] for each in values], dtype=np.int64)
        order = np.argsort(numbers, kind="stable")
        ranked = numbers[order]
        places = [n for n in range(fewest, count - fewest + 1) if ranked[n - 1] < ranked[n]]
        if places:
            between = [Condition(axis, "<=", threshold(int(ranked[n - 1]), int(ranked[n]))) for n in places]
            yield between, order, np.array(places)


def threshold(low: int, high: int) -> int:
    """A number from `low` up to, not including, `high`, in their middle by ratio, of two digits where possible."""
    middle = min(max(low, math.isqrt(low * high)), high - 1)
    digits = 10 ** max(0, len(str(middle)) - 2)
    rounded = round(middle / digits) * digits
    return rounded if low <= rounded < high else middle


def _leaves(node: Node, before: tuple[Condition, ...]) -> Iterator[tuple[Node, list[Condition]]]:
    if node.condition is None or node.inside is None or node.outside is None:
        yield node, list(before)
        return
    other = {"<=": ">", "is": "is not"}[node.condition.sign]
    yield from _leaves(node.inside, (*before, node.condition))
    yield from _leaves(node.outside, (*before, replace_sign(node.condition, other)))


def replace_sign(condition: Condition, sign: str) -> Condition:
    """The same comparison with another sign."""
    return Condition(condition.axis, sign, condition.value)


def rules_of(tree: Node) -> Iterator[Rule]:
    """A rule for each leaf that does not choose sdpa, those of most workloads first."""
    leaves = sorted(_leaves(tree, ()), key=lambda each: -each[0].num_workloads)
    for leaf, conditions in leaves:
        if leaf.choice != OTHERWISE:
            yield Rule(
                when=tuple(map(str, simplified(conditions))),
                use=leaf.choice,
                num_workloads=leaf.num_workloads,
                ratio=round(math.exp(leaf.cost / leaf.num_workloads), 4),
            )


def simplified(conditions: Sequence[Condition]) -> list[Condition]:
    """The same without what follows from the others."""
    kept: dict[tuple[str, str], list[Condition]] = {}
    for each in conditions:
        kept.setdefault((each.axis, each.sign), []).append(each)
    found = []
    for (axis, sign), members in kept.items():
        if sign == "is not":
            found += [] if (axis, "is") in kept else members
        else:
            pick: Any = min if sign == "<=" else max
            found.append(pick(members, key=lambda each: each.value))
    return found


def covers(values: Sequence[Values]) -> Iterator[dict[str, str | tuple[int, int]]]:
    """For each combination of kinds that was measured, the sizes from the least to the largest."""
    groups: dict[tuple[str, ...], list[Values]] = {}
    for each in values:
        groups.setdefault(tuple(str(each[axis]) for axis in KINDS), []).append(each)
    for kinds, members in groups.items():
        sizes: Mapping[str, list[int]] = {axis: [int(each[axis]) for each in members] for axis in SIZES}
        yield dict(zip(KINDS, kinds, strict=True)) | {axis: (min(all_), max(all_)) for axis, all_ in sizes.items()}


__all__ = ["FEWEST_WORKLOADS", "MOST_LEAVES", "Learned", "Limits", "Measured", "learn", "learn_rules", "table"]
