"""The coordinator, which plans a run, calls workers and writes the journal without importing torch (docs/adr/0001)."""
