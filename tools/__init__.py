"""Programs for work on this repository, such as checks of texts and sizes; they are not part of the package."""
