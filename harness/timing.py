"""The timing stage of a run: visits in rounds first, then where doubt is, in one fresh process after another."""

import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from harness.crew import WorkerLostError
from harness.events import CellFailed, VisitFinished, twin
from harness.interference import CANARY
from harness.messages import Failed, TakeVisit, Visited
from harness.records import Workload
from harness.schedule import Race, rounds, visit_seed

if TYPE_CHECKING:
    from harness.run import Run

EPOCH_S = 15.0
EPOCH_SHARE = 0.1
"""The race goes on in a fresh process after 15 s, or a tenth of the time so far where that is more: what a memory
layout does to a ratio must not last, and a fresh process costs seconds."""
DECIDED = "every comparison is decided"
SPENT = "the budget is spent"


class Timing:
    """The stage at work."""

    def __init__(self, run: "Run") -> None:
        """All that has passed its check takes part."""
        self.run = run
        self.state, self.plan = run.state, run.plan
        alive = (w for w in self.plan.workloads if self.state.live(w.id, run.specs))
        self.workloads: Mapping[str, Workload] = {workload.id: workload for workload in alive}
        self.race = Race(self.plan.baseline, self.plan.num_blocks, self.plan.seed)

    def time_all(self) -> str:
        """Visit until every comparison is decided or the budget is spent, every workload at least a few times.

        Returns which of the two it was.
        """
        num_rounds, num_epochs = self.plan.num_rounds, self.plan.num_epochs
        for number, order in enumerate(rounds(list(self.workloads), self.plan.seed, num_rounds)):
            todo = [workload for workload in order if self.state.num_visits[workload] <= number]
            if todo and number and number * num_epochs // num_rounds > (number - 1) * num_epochs // num_rounds:
                self.run.fresh_worker()
            for workload in todo:
                self.tell(f"round {number + 1} of {num_rounds}, {workload}")
                self.visit(self.workloads[workload], self.state.live(workload, self.run.specs))
        epoch_end_s = self.epoch_end_s()
        while self.run.elapsed_s < self.plan.budget_s:
            chosen = self.race.next(self.state, self.live())
            if chosen is None:
                return DECIDED
            if self.run.elapsed_s > epoch_end_s:
                self.run.fresh_worker()
                epoch_end_s = self.epoch_end_s()
            workload, names = chosen
            self.tell(f"{workload}, {len(self.race.judged) - len(self.race.closed)} open")
            self.visit(self.workloads[workload], [self.plan.baseline, *names])
        return SPENT if self.workloads else ""

    def epoch_end_s(self) -> float:
        """When the epoch that begins now is to end, in seconds since the run began."""
        return self.run.elapsed_s + max(EPOCH_S, EPOCH_SHARE * self.run.elapsed_s)

    def live(self) -> dict[str, list[str]]:
        """By workload, who can still be compared: nobody where the baseline is lost."""
        found = {workload: self.state.live(workload, self.run.specs) for workload in self.workloads}
        return {workload: names for workload, names in found.items() if self.plan.baseline in names}

    def tell(self, cell: str) -> None:
        """Tell the watcher how far the stage is."""
        visits = sum(min(self.state.num_visits[workload], self.plan.num_rounds) for workload in self.workloads)
        share = min(
            visits / (self.plan.num_rounds * len(self.workloads)), self.run.elapsed_s / max(self.plan.budget_s, 1e-9)
        )
        self.run.tell("time", cell, share, 1.0)

    def visit(self, workload: Workload, names: Iterable[str]) -> None:
        """One visit; an arm that fails is dropped, and the visit taken again without it."""
        while live := self.state.live(workload.id, names):
            if not self.run.crew.is_at_work:
                self.run.fresh_worker()
            request = self.request(workload, live)
            owners = [name for name, _ in request.arms]
            try:
                reply = self.run.crew.ask(request)
            except WorkerLostError as lost:
                if lost.arm >= len(owners) or owners[lost.arm] == CANARY:  # the harness itself was at work
                    self.give_up(workload, lost)
                    return
                reply = Failed(arm=owners[lost.arm], status=lost.status, message=str(lost))
            if isinstance(reply, Visited):
                found = VisitFinished(
                    workload=workload.id,
                    epoch=request.epoch,
                    visit=request.visit,
                    arms=reply.arms,
                    called_s=reply.called_s,
                )
                self.run.note(found)
                return
            assert isinstance(reply, Failed)
            owner = self.plan.baseline if reply.arm == twin(self.plan.baseline) else reply.arm
            failed = CellFailed(workload=workload.id, implementation=owner, status=reply.status, message=reply.message)
            self.run.note(failed)

    def request(self, workload: Workload, names: list[str]) -> TakeVisit:
        """What the worker is asked: the arms, the baseline twice and a canary, built in an order of their own."""
        number = self.state.num_visits[workload.id]
        seed = visit_seed(self.plan.seed, workload.id, number)
        arms = [(name, self.run.specs[name]) for name in names]
        if self.plan.baseline in names:
            arms.append((twin(self.plan.baseline), self.run.specs[self.plan.baseline]))
        arms.append((CANARY, ""))
        random.Random(seed).shuffle(arms)
        return TakeVisit(
            workload=workload,
            arms=tuple(arms),
            epoch=self.state.num_workers - 1,
            visit=number,
            num_blocks=self.plan.num_blocks,
            seed=seed,
            cache=self.plan.cache,
        )

    def give_up(self, workload: Workload, lost: WorkerLostError) -> None:
        """No arm is to blame, and none can be measured: the workload ends here for all."""
        message = f"while the harness prepared or read the workload: {lost}"
        for name in self.state.live(workload.id, self.run.specs):
            self.run.note(CellFailed(workload=workload.id, implementation=name, status=lost.status, message=message))
