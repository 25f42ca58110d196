"""The timing stage of a session: visits in rounds first, then where a verdict is open, in several fresh processes.

Which workload comes next is decided by timing/schedule.py.
"""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from attnbench.processes.messages import Failed, SampleBlocks
from attnbench.processes.session import Session
from attnbench.processes.stages import failed_cell
from attnbench.storage.events import VisitFinished
from attnbench.storage.records import PROBE, Arm
from attnbench.timing.schedule import Race, load_libraries, rounds, visit_seed
from attnbench.workloads.workload import Workload

EPOCH_S = 15.0
EPOCH_SHARE = 0.1
"""The race goes on in a fresh process after 15 s, or a tenth of the time so far where that is more: what a memory
layout does to a ratio must not last, and a fresh process costs seconds."""
VERIFY_EVERY = 4
"""Of two sides each epoch is a fresh process, in which the right answers cost as much as the times: they are verified
in the first rounds, and then in one visit of so many."""
DECIDED = "every comparison is decided"
NOTHING = "there is nothing to compare"
SPENT = "the budget is spent"


class TimingStage:
    """Visits workloads until every comparison is decided, or the budget is spent."""

    def __init__(self, session: Session) -> None:
        """Every cell that has passed so far takes part."""
        self.session = session
        self.state, self.plan = session.state, session.plan
        alive = (w for w in self.plan.workloads if self.state.live(w.id, session.specs))
        self.workloads: Mapping[str, Workload] = {workload.id: workload for workload in alive}
        self.places = {workload: number for number, workload in enumerate(self.workloads)}
        self.race = Race(self.plan)

    def run(self) -> str:
        """Visit every workload in the first rounds, and then where it helps; return why timing ended."""
        load_libraries()
        num_rounds, num_epochs = self.plan.num_rounds, self.plan.num_epochs
        for number, order in enumerate(rounds(list(self.workloads), self.plan.seed, num_rounds)):
            todo = [workload for workload in order if self.state.num_visits[workload] <= number]
            begins = number * num_epochs // num_rounds > (number - 1) * num_epochs // num_rounds
            if todo and number and (begins or self.race.has_sides):
                self.session.start_worker()
            for workload in todo:
                self._show_progress(f"round {number + 1} of {num_rounds}, {workload}")
                self.visit(self.workloads[workload], self.state.live(workload, self.session.specs))
        is_decided = self._epoch_by_epoch() if self.race.has_sides else self._visit_by_visit()
        if is_decided:
            return DECIDED if self.race.judged else NOTHING
        return SPENT if self.workloads else ""

    def _visit_by_visit(self) -> bool:
        """Each visit goes where it promises most. Returns whether nothing is open any more."""
        began_s = self.session.elapsed_s  # the epoch
        while self.session.elapsed_s < self.plan.budget_s:
            chosen = self.race.next(self.state, self._comparable())
            if chosen is None:
                return True
            if self.session.elapsed_s > began_s + max(EPOCH_S, EPOCH_SHARE * began_s):
                self.session.start_worker()
                began_s = self.session.elapsed_s
            workload, arms = chosen
            self._show_progress(f"{workload}, {len(self.race.judged) - len(self.race.closed)} open")
            self._visit_with_references(workload, arms)
        return False

    def _epoch_by_epoch(self) -> bool:
        """Of two sides, a fresh process is the unit of evidence: one visit in each for all that is open.

        Returns whether nothing is open any more.
        """
        draws = random.Random(f"{self.plan.seed}/{self.state.num_workers}")
        longest_s = 0.0
        while self.session.elapsed_s + longest_s < self.plan.budget_s:
            start_s, comparable = self.session.elapsed_s, self._comparable()
            self.race.refresh(self.state, comparable)
            todo = self.race.still_open(comparable)
            if not todo:
                return True
            self.session.start_worker()
            for workload in draws.sample(list(todo), len(todo)):
                self._show_progress(f"{workload}, {sum(map(len, todo.values()))} open")
                self._visit_with_references(workload, todo[workload])
            longest_s = max(longest_s, self.session.elapsed_s - start_s)
        return False

    def _visit_with_references(self, workload: str, arms: Sequence[Arm]) -> None:
        """One visit of these arms and of what they are compared with."""
        self.visit(self.workloads[workload], dict.fromkeys([*map(self.plan.reference, arms), *arms]))

    def _comparable(self) -> dict[str, list[Arm]]:
        """By workload, the live arms whose reference is live."""
        live = {workload: self.state.live(workload, self.session.specs) for workload in self.workloads}
        return {workload: [arm for arm in arms if self.plan.reference(arm) in arms] for workload, arms in live.items()}

    def _show_progress(self, cell: str) -> None:
        visits = sum(min(self.state.num_visits[workload], self.plan.num_rounds) for workload in self.workloads)
        share = min(
            visits / (self.plan.num_rounds * len(self.workloads)),
            self.session.elapsed_s / max(self.plan.budget_s, 1e-9),
        )
        self.session.show_progress("time", cell, share, 1.0)

    def visit(self, workload: Workload, arms: Iterable[Arm]) -> None:
        """One visit; an arm that fails is dropped, and the visit taken again without it.

        It has the arms, A/A controls and the interference probe, in a random order.
        """
        arms = list(arms)
        while live := self.state.live(workload.id, arms):
            if self.plan.sides is not None:  # those that are live on both
                sides = Counter(map(self.plan.reference, live))
                live = [arm for arm in live if sides[self.plan.reference(arm)] > 1]
                if not live:
                    return
            self.session.require_worker()  # first, since the request names the epoch
            number = self.state.num_visits[workload.id]
            is_due = (number + self.places[workload.id]) % VERIFY_EVERY == 0  # not all in one process
            seed = visit_seed(self.plan.seed, workload.id, number)
            taken = [(arm, self.session.specs[arm]) for arm in live]
            taken += [(arm.as_control(), self.session.specs[arm]) for arm in live if self.plan.is_reference(arm)]
            taken.append((PROBE, ""))
            random.Random(seed).shuffle(taken)
            request = SampleBlocks(
                workload=workload,
                arms=tuple(taken),
                epoch=self.state.num_workers - 1,
                visit=number,
                num_blocks=self.plan.num_blocks,
                seed=seed,
                cache=self.plan.cache,
                verifies=self.plan.sides is None or number < self.plan.num_rounds or is_due,
            )
            reply = self.session.ask(request)
            if isinstance(reply, VisitFinished):
                elapsed_s = round(self.session.elapsed_s, 3)
                self.session.record(msgspec.structs.replace(reply, elapsed_s=elapsed_s))
                return
            assert isinstance(reply, Failed)
            if reply.arm != PROBE:
                self.session.record(failed_cell(workload, reply.arm, reply))
                continue
            # The harness itself failed: no arm is to blame, none can be measured, and the workload ends for all.
            message = f"while the harness prepared or read the workload: {reply.message}"
            failed = msgspec.structs.replace(reply, message=message)
            for arm in self.state.live(workload.id, self.session.specs):
                self.session.record(failed_cell(workload, arm, failed))
            return
