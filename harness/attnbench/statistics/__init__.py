"""From samples to verdicts, in plain numbers: nothing here knows of torch, of files or of what was measured."""
