"""The process that holds torch and the implementations, and handles one request at a time (docs/adr/0001)."""
