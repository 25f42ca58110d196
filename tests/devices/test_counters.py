"""The system's counters: the usage of a process and all its descendants."""

import subprocess
import sys

from attnbench.devices import read_counters

WORK = "import time\nwhile time.process_time() < 0.2: pass"


def test_own_time_includes_processes_that_ended_and_those_at_work():
    before = read_counters()
    subprocess.run([sys.executable, "-c", WORK], check=True)
    between = read_counters()
    waits = f"{WORK}\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        after = read_counters()
        child.communicate(b"\n")
    assert between.own_s - before.own_s >= 0.15
    assert after.own_s - between.own_s >= 0.15
    assert after.total_s > before.total_s
    assert min(before.own_s, before.free_bytes) > 0
    assert before.began_s == after.began_s
