"""Acceptance tests of the method: each promise has a limit that was fixed before. Some compare with other tools."""
