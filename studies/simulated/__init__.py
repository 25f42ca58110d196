"""A machine that is simulated, with noise of known size: the whole engine runs on it in seconds."""
