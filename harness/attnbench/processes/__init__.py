"""The process that plans a run, sends requests to workers and keeps the journal; without torch (docs/adr/0001)."""
