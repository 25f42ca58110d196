"""The process that plans a run, asks workers and keeps the journal; it knows no torch (docs/adr/0001)."""
