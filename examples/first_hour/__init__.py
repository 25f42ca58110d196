"""Files that the commands in docs/guide.md check and time."""
