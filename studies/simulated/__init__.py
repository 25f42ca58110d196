"""A simulated machine with noise of known size: the whole engine runs on it in seconds."""
