"""A sweep over several machines: hosts measure shares of a plan into journals of their own, which are merged.

shares.py splits the plan, host.py runs on a host, merge.py merges the journals, and driver.py hands out shares through
Ray; it is the only module that imports Ray. Why: docs/adr/0038.
"""
