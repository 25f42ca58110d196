"""The process that holds torch and the implementations, and answers one request at a time (docs/adr/0001)."""
