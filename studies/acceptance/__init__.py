"""The acceptance tests of the method, T1 to T16: what the engine must show, beside its rivals, losses printed too."""
