"""Check whether an implementation is right, and diagnose errors; start at `agreement`."""
