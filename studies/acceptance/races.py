"""Whole runs on a simulated machine with the race as it is, watched, or replaced by rounds over everything."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np

from attnbench.analysis.results import Results
from attnbench.processes import stages
from attnbench.statistics import evidence
from attnbench.storage.events import Plan
from attnbench.storage.records import FALSE_SHARE, Arm, Key, Verdict
from attnbench.timing.schedule import Race, State, visit_seed
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient


class Witness(Race):
    """A race that remembers every comparison that it ever called faster or slower, or whose e-value was ever enough."""

    called: set[Key]
    rejected: set[Key]  # by e-BH among all others, however small the difference

    def refresh(self, state: State, live: Mapping[str, Sequence[Arm]]) -> None:
        """As a race does."""
        super().refresh(state, live)
        values = np.array([judged.e_same for judged in self.judged.values()])
        found = evidence.discoveries(values, FALSE_SHARE)
        type(self).rejected |= {key for key, is_found in zip(self.judged, found, strict=True) if is_found}
        type(self).called |= {key for key, verdict in self.closed.items() if verdict is not Verdict.equivalent}


class Uniform(Race):
    """No race: all arms of all workloads in rounds, until every verdict is found."""

    def next(self, state: State, live: Mapping[str, Sequence[Arm]]) -> tuple[str, list[Arm]] | None:
        """The workload with the fewest visits, and all its arms."""
        self.refresh(state, live)
        if self.judged and self.closed.keys() >= self.judged.keys():
            return None
        workload = min(
            live, key=lambda each: (state.num_visits[each], visit_seed(self.plan.seed, each, state.num_visits[each]))
        )
        return workload, [arm for arm in live[workload] if not self.plan.is_reference(arm)]


def whole_run(asked: Plan, client: SimulatedClient, race: type[Race] = Race) -> Results:
    """The run, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, patch.object(stages, "Race", race):
        return virtual.execute(asked, Path(folder) / "run", client)
