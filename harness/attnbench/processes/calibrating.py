"""The stage of a calibration: as many cells as fit into its time, each checked, then timed in rounds over all.

An implementation is checked in full at the first workload of each kind; where it is right, briefly at the others, since
checks take most of the time. What is timed has been compared with the right answer at its own sizes, just before; so
what comes with the harness is verified again in one visit of four only, the first ones included.

It works through the workloads in the plan's order, which spreads them whenever it is stopped, and stops adding some
when a share of its time is spent; the rest goes into further visits of all, so that a slow moment of the machine meets
every cell once and none always. Memory is the same in every call, and is counted at the first workloads of each kind.
"""

import math
from collections import Counter
from collections.abc import Hashable
from statistics import median

from attnbench.processes.stages import SPENT, TimingStage, check_cell, measure_ceilings, observe_cells
from attnbench.storage.records import LATENCY, Arm, Status
from attnbench.timing.schedule import load_libraries, rounds
from attnbench.workloads.workload import SIZES

NEW_CELLS_SHARE = 0.85
"""Of the budget, in which cells are checked and visited for the first time."""
COUNTED = 8
"""Workloads of each kind at which metrics with a pass of their own are read; all where the plan has that stage."""


class Calibrating(TimingStage):
    """Checks and visits one workload after the other, then all again in rounds."""

    def run(self) -> str:
        """Spend the budget; return why it ended."""
        load_libraries()
        session, budget_s = self.session, self.plan.budget_s
        metrics = [metric for metric in self.plan.metrics if metric != LATENCY]
        taken_s: list[float] = []
        self.places = {workload.id: number for number, workload in enumerate(self.plan.asked)}
        if not math.isinf(self.num_verified):
            self.num_verified = 0
        passed: set[tuple[Hashable, Arm]] = set()
        seen = Counter[Hashable]()
        for workload in self.plan.asked:
            start_s = session.elapsed_s
            if start_s + (median(taken_s) if taken_s else 0.0) > NEW_CELLS_SHARE * budget_s:
                break
            self._show(workload.id)
            kind = tuple(value for axis, value in workload.axes().items() if axis not in SIZES)
            for arm in self.plan.cells(workload):
                if (workload.id, arm) not in self.state.status:
                    check_cell(session, workload, arm, is_brief=(kind, arm) in passed)
                    if self.state.status[workload.id, arm] is Status.ok:
                        passed.add((kind, arm))
            seen[kind] += 1
            if seen[kind] <= COUNTED or "metrics" in self.plan.stages:
                own = [(workload, arm) for arm in self.state.live(workload.id, session.specs)]
                observe_cells(session, metrics, with_operators=False, cells=own)
            if self.state.live(workload.id, session.specs):
                self.workloads[workload.id] = workload
                if not self.state.num_visits[workload.id]:
                    self.visit(workload, self.state.live(workload.id, session.specs))
            taken_s.append(session.elapsed_s - start_s)
        if "ceilings" in self.plan.stages:  # now that something is live
            measure_ceilings(session)
        longest_s = 0.0
        for order in rounds(list(self.workloads), self.plan.seed, self.plan.num_rounds):
            for name in order:
                start_s = session.elapsed_s
                if start_s + longest_s > budget_s:
                    return SPENT
                self._show(name)
                self.visit(self.workloads[name], self.state.live(name, session.specs))
                longest_s = max(longest_s, session.elapsed_s - start_s)
        return ""

    def _show(self, cell: str) -> None:
        share = min(1.0, self.session.elapsed_s / max(self.plan.budget_s, 1e-9))
        self.session.show_progress("calibrate", cell, share, 1.0)
