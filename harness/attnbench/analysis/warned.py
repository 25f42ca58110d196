"""The names of all warnings. `attnbench explain NAME` explains them, and `--json` includes them."""

import enum


class Warn(enum.StrEnum):
    """The name of a warning about a session, about the time of a cell, or about a run as a whole."""

    contention = "contention"
    waiting_threads = "waiting_threads"
    discarded_blocks = "discarded_blocks"
    machine_changed = "machine_changed"
    throttled = "throttled"
    too_noisy = "too_noisy"
    unfinished = "unfinished"
    left_out = "left_out"
    salvaged = "salvaged"
    journal_changed = "journal_changed"
    environments_differ = "environments_differ"
    untried = "untried"
    above_ceiling = "above_ceiling"
    checked_with_note = "checked_with_note"
    not_timed = "not_timed"
    host_bound = "host_bound"
    host_near = "host_near"
    device_waited = "device_waited"
    host_waits = "host_waits"
    other_stream = "other_stream"
    kernels_longer = "kernels_longer"
    page_faults = "page_faults"
    device_precision = "device_precision"
    copies = "copies"
    measured_with_note = "measured_with_note"
    clock_fell = "clock_fell"

    def says(self, text: str) -> "Warned":
        """Create a warning with this name and this text."""
        warned = Warned(text)
        warned.name = self
        return warned


class Warned(str):
    """The text of a warning; `name` is its member of `Warn`."""

    __slots__ = ("name",)
    name: Warn
