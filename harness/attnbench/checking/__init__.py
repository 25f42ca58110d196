"""Is an implementation right? From probes and the oracle to a diagnosis in words; `agreement` is the way in."""
