"""The coordinator, which plans a run, calls workers and keeps the journal, all without torch (docs/adr/0001)."""
