"""One attention implementation per file. The file's stem is its name; files do not import each other."""
