"""Whole runs on a simulated machine with the race as it is, watched, or replaced by rounds over everything."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest.mock import patch

from harness import timing
from harness.events import Plan
from harness.schedule import Key, Race, visit_seed
from harness.simulated import virtual
from harness.simulated.virtual import VirtualCrew
from harness.state import State
from harness.store import Results


class Witness(Race):
    """A race that remembers every comparison that it ever called faster or slower."""

    called: set[Key]

    def refresh(self, state: State, live: Mapping[str, Sequence[str]]) -> None:
        """As a race does."""
        super().refresh(state, live)
        type(self).called |= {key for key in self.closed if self.judged[key].is_beyond}


class Uniform(Race):
    """No race: all arms of all workloads in rounds, until every verdict is found."""

    def next(self, state: State, live: Mapping[str, Sequence[str]]) -> tuple[str, list[str]] | None:
        """The workload with the fewest visits, and all its arms."""
        self.refresh(state, live)
        if self.judged and self.closed >= set(self.judged):
            return None
        workload = min(
            live, key=lambda each: (state.num_visits[each], visit_seed(self.seed, each, state.num_visits[each]))
        )
        return workload, [name for name in live[workload] if name != self.baseline]


def whole_run(asked: Plan, crew: VirtualCrew, race: type[Race] = Race) -> Results:
    """The run, in a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder, patch.object(timing, "Race", race):
        return virtual.execute(asked, Path(folder) / "run", crew)
