"""The gate: compare two states of the code cell by cell, and pass or fail."""
