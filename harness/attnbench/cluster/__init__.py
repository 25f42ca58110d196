"""A sweep over several machines: hosts measure shares of a plan into journals of their own, which are merged.

shares.py splits the plan, keeps the journals and merges them, host.py runs on a host, and driver.py hands out shares
through Ray, which no other module imports. Why: docs/adr/0038.
"""
