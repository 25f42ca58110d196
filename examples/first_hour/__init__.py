"""Files of docs/first-hour.md."""
