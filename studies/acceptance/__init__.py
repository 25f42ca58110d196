"""The acceptance tests of the method, T1 to T16: what the engine must show, next to its rivals, losses printed too."""
