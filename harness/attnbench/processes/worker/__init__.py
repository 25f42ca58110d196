"""The worker: a process that loads torch and the implementations, and handles one request at a time (docs/adr/0001)."""
