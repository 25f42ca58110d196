"""The timing stage of a run: visits in rounds first, then where doubt is, in one fresh process after another."""

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from attnbench.processes.messages import Failed, TakeVisit, Visited
from attnbench.processes.worker_client import WorkerLostError
from attnbench.storage.events import CellFailed, VisitFinished
from attnbench.storage.records import PROBE, Arm, Status
from attnbench.timing.functions import prepare
from attnbench.timing.schedule import Race, rounds, visit_seed
from attnbench.workloads.workload import Workload

if TYPE_CHECKING:
    from attnbench.processes.session import Run

EPOCH_S = 15.0
EPOCH_SHARE = 0.1
"""The race goes on in a fresh process after 15 s, or a tenth of the time so far where that is more: what a memory
layout does to a ratio must not last, and a fresh process costs seconds."""
VERIFIED_OF_SIDES = 4
"""Of two sides each epoch is a fresh process, in which the right answers cost as much as the times: they are asked for
in the first rounds, and then in one visit of so many."""
DECIDED = "every comparison is decided"
NOTHING = "there is nothing to compare"
SPENT = "the budget is spent"


class Timing:
    """The stage at work."""

    def __init__(self, run: "Run") -> None:
        """All that has passed its check takes part."""
        self.run = run
        self.state, self.plan = run.state, run.plan
        alive = (w for w in self.plan.workloads if self.state.live(w.id, run.specs))
        self.workloads: Mapping[str, Workload] = {workload.id: workload for workload in alive}
        self.places = {workload: number for number, workload in enumerate(self.workloads)}
        self.race = Race(self.plan)

    def time_all(self) -> str:
        """Visit until every comparison is decided or the budget is spent, every workload at least a few times.

        Returns which of the two it was, or that there was nothing to compare.
        """
        prepare()
        num_rounds, num_epochs = self.plan.num_rounds, self.plan.num_epochs
        for number, order in enumerate(rounds(list(self.workloads), self.plan.seed, num_rounds)):
            todo = [workload for workload in order if self.state.num_visits[workload] <= number]
            begins = number * num_epochs // num_rounds > (number - 1) * num_epochs // num_rounds
            if todo and number and (begins or self.race.has_sides):
                self.run.fresh_worker()
            for workload in todo:
                self.tell(f"round {number + 1} of {num_rounds}, {workload}")
                self.visit(self.workloads[workload], self.state.live(workload, self.run.specs))
        return self.epoch_by_epoch() if self.race.has_sides else self.visit_by_visit()

    def visit_by_visit(self) -> str:
        """The race: each visit goes where it promises most."""
        epoch_end_s = self.epoch_end_s()
        while self.run.elapsed_s < self.plan.budget_s:
            chosen = self.race.next(self.state, self.live())
            if chosen is None:
                return self.decided
            if self.run.elapsed_s > epoch_end_s:
                self.run.fresh_worker()
                epoch_end_s = self.epoch_end_s()
            workload, arms = chosen
            self.tell(f"{workload}, {len(self.race.judged) - len(self.race.closed)} open")
            self.visit_with_references(workload, arms)
        return SPENT if self.workloads else ""

    def epoch_by_epoch(self) -> str:
        """Where there are two sides, a fresh process is the unit of evidence: one visit for all that is open."""
        draws = random.Random(f"{self.plan.seed}/{self.state.num_workers}")
        epoch_s = 0.0
        while self.run.elapsed_s + epoch_s < self.plan.budget_s:
            start_s, live = self.run.elapsed_s, self.live()
            self.race.refresh(self.state, live)
            todo = self.race.still_open(live)
            if not todo:
                return self.decided
            self.run.fresh_worker()
            for workload in draws.sample(list(todo), len(todo)):
                self.tell(f"{workload}, {sum(map(len, todo.values()))} open")
                self.visit_with_references(workload, todo[workload])
            epoch_s = max(epoch_s, self.run.elapsed_s - start_s)  # the longest so far
        return SPENT if self.workloads else ""

    @property
    def decided(self) -> str:
        """Why timing ends where no comparison is open."""
        return DECIDED if self.race.judged else NOTHING

    def visit_with_references(self, workload: str, arms: Sequence[Arm]) -> None:
        """One visit of these and of what they are compared with."""
        self.visit(self.workloads[workload], dict.fromkeys([*map(self.plan.reference, arms), *arms]))

    def epoch_end_s(self) -> float:
        """When the epoch that begins now is to end, in seconds since the run began."""
        return self.run.elapsed_s + max(EPOCH_S, EPOCH_SHARE * self.run.elapsed_s)

    def live(self) -> dict[str, list[Arm]]:
        """By workload, the arms that can still be compared: none whose reference is lost."""
        found = {workload: self.state.live(workload, self.run.specs) for workload in self.workloads}
        return {workload: [arm for arm in arms if self.plan.reference(arm) in arms] for workload, arms in found.items()}

    def worth_timing(self, workload: str, arms: Iterable[Arm]) -> list[Arm]:
        """Those of the arms that are live; where there are two sides, on both of them."""
        live = self.state.live(workload, arms)
        if self.plan.sides is None:
            return live
        pairs = Counter(map(self.plan.reference, live))
        return [arm for arm in live if pairs[self.plan.reference(arm)] > 1]

    def tell(self, cell: str) -> None:
        """Tell the watcher how far the stage is."""
        visits = sum(min(self.state.num_visits[workload], self.plan.num_rounds) for workload in self.workloads)
        share = min(
            visits / (self.plan.num_rounds * len(self.workloads)), self.run.elapsed_s / max(self.plan.budget_s, 1e-9)
        )
        self.run.tell("time", cell, share, 1.0)

    def visit(self, workload: Workload, arms: Iterable[Arm]) -> None:
        """One visit; an arm that fails is dropped, and the visit taken again without it."""
        arms = list(arms)
        while live := self.worth_timing(workload.id, arms):
            if not self.run.crew.is_at_work:
                self.run.fresh_worker()
            request = self.request(workload, live)
            try:
                reply = self.run.crew.ask(request)
            except WorkerLostError as lost:
                arm = request.arms[lost.arm][0] if lost.arm < len(request.arms) else PROBE
                reply = Failed(arm=arm, status=lost.status, message=str(lost))
            if isinstance(reply, Visited):
                visited = VisitFinished(
                    workload=workload.id,
                    epoch=request.epoch,
                    visit=request.visit,
                    arms=reply.arms,
                    called_s=reply.called_s,
                    elapsed_s=round(self.run.elapsed_s, 3),
                )
                self.run.note(visited)
                return
            assert isinstance(reply, Failed)
            if reply.arm == PROBE:  # the harness itself was at work
                self.give_up(workload, reply)
                return
            self.run.note(_failed(workload, reply.arm, reply.status, reply.message))

    def request(self, workload: Workload, arms: list[Arm]) -> TakeVisit:
        """What the worker is asked: the arms, A/A controls and the interference probe, in an order of their own."""
        number = self.state.num_visits[workload.id]
        is_due = (number + self.places[workload.id]) % VERIFIED_OF_SIDES == 0  # not all in one process
        seed = visit_seed(self.plan.seed, workload.id, number)
        taken = [(arm, self.run.specs[arm]) for arm in arms]
        taken += [(arm.as_control(), self.run.specs[arm]) for arm in arms if self.plan.is_reference(arm)]
        taken.append((PROBE, ""))
        random.Random(seed).shuffle(taken)
        return TakeVisit(
            workload=workload,
            arms=tuple(taken),
            epoch=self.state.num_workers - 1,
            visit=number,
            num_blocks=self.plan.num_blocks,
            seed=seed,
            cache=self.plan.cache,
            verifies=self.plan.sides is None or number < self.plan.num_rounds or is_due,
        )

    def give_up(self, workload: Workload, failed: Failed) -> None:
        """No arm is to blame, and none can be measured: the workload ends here for all."""
        message = f"while the harness prepared or read the workload: {failed.message}"
        for arm in self.state.live(workload.id, self.run.specs):
            self.run.note(_failed(workload, arm, failed.status, message))


def _failed(workload: Workload, arm: Arm, status: Status, message: str) -> CellFailed:
    return CellFailed(
        workload=workload.id, implementation=arm.implementation, side=arm.side, status=status, message=message
    )
