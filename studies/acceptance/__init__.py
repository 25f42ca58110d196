"""Acceptance tests of the method: what the engine must show, next to its rivals, losses included."""
