"""Stored data: records, the events of a run, its journal and where runs lie. Nothing here judges, or knows torch."""
