"""A sweep over several machines: hosts measure shares of a plan into journals of their own, which are merged.

shares.py splits the plan, host.py is what runs on a host, merge.py makes one journal of theirs, driver.py hands out
shares through Ray, and is the only module that imports it. Why it is so: docs/adr/0038.
"""
