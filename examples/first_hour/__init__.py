"""Files of docs/guide.md."""
