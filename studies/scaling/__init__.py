"""How attention over several ranks scales on one machine: times, efficiency, bytes and stragglers."""
