"""One attention implementation per file, with the file's stem as its name; files do not import each other."""
