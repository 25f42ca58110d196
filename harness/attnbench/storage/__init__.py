"""Stored data: records, events, journals and run folders. This package judges nothing, and needs no torch."""
