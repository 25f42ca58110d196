"""The commands, one in each file. Heavy modules are imported inside them, so that --help answers at once."""
