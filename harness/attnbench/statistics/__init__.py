"""Statistics that turn samples into verdicts: they work on plain numbers, without torch, files or metrics."""
