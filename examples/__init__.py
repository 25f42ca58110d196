"""What can be built from the project's own building blocks."""
