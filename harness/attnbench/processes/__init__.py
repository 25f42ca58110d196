"""The coordinator, which plans a run, sends requests to workers and keeps the journal (docs/adr/0001). Without torch."""
