"""A sweep on several machines: each host measures shares of a plan into its own journals, which are then merged.

shares.py splits the plan, stores the journals and merges them. host.py runs on a host. driver.py hands out shares
through Ray, which no other module imports. Why: docs/adr/0038.
"""
