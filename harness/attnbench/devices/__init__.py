"""What is known of the machine and asked of it: its facts, clocks, caches, memory and ceilings."""
