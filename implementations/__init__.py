"""One attention implementation per file: the stem is its name, `IMPLEMENTATION` the plug; none imports another."""
