"""The work of each step: `python -m studies.gpu.work NAME FILE ...` runs one, and writes its results to FILE.

The function of a step returns (answer as text, rows). A step is left out if a package or the device is missing.
"""

import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from studies.frame import Row
from studies.gpu.steps import FAILED, LEFT_OUT, OK, ROOT

NUM_REPEATS = 9
TARGET_S = 0.02
"""Approximate duration of a sample."""
TESTS = ROOT / "tests" / "devices" / "test_cuda.py"


class Left(Exception):  # noqa: N818 - it is no error
    """The step cannot run here; the message gives the reason."""


def versions() -> tuple[str, list[Row]]:
    """List the system and all packages, and write the output of nvidia-smi to a file."""
    rows: list[Row] = [{"name": each.name, "version": each.version} for each in metadata.distributions()]
    rows.append({"name": "system", "version": platform.platform(terse=True)})
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        printed = subprocess.run([tool, "-q"], capture_output=True, check=False).stdout  # noqa: S603 - of the driver
        Path("nvidia-smi-q.txt").write_bytes(printed)
    return f"python {platform.python_version()}{'' if tool else ', no nvidia-smi'}", rows


class Wrong(Exception):  # noqa: N818 - it is a finding
    """The step ran, and found a failure; the message describes it."""

    def __init__(self, reason: str, rows: list[Row]) -> None:
        """Keep the reason as the message, and the rows that the step collected."""
        super().__init__(reason)
        self.rows = rows


def tests() -> tuple[str, list[Row]]:
    """Run each GPU test in its own process, because a test may break the CUDA context; write JUnit XML reports.

    Raises:
        Left: there is no CUDA device.
        Wrong: a test fails.
    """
    _here("cuda")
    rows: list[Row] = []
    for name in re.findall(r"^def (test_\w+)", TESTS.read_text(encoding="utf-8"), re.MULTILINE):
        report = Path(f"{name}.xml").resolve()
        done = _python("-m", "pytest", "-q", "-m", "cuda", f"--junitxml={report}", f"{TESTS}::{name}", cwd=ROOT)
        rows.append({"test": name, "exit_code": done.returncode, "report": report.name})
    if failed := [row["test"] for row in rows if row["exit_code"]]:
        raise Wrong(f"{len(failed)} of {len(rows)} fail: {', '.join(failed)}", rows)
    return f"{len(rows)} pass", rows


def gauge(where: str, name: str) -> tuple[str, list[Row]]:
    """Run the test `name` of acceptance/on_cuda.py (G1 to G5); if `where` is the CPU, run it on a simulated GPU."""
    here = _here(where)
    from studies.acceptance import on_cuda
    from studies.simulated.gpu import SimulatedGpu

    found = getattr(on_cuda, name)(SimulatedGpu() if here.is_host else None)
    rows: list[Row] = [dict(row) for row in found.rows]
    if not found.passes:
        raise Wrong(f"{found.id}: {found.found} ({found.limit})", rows)
    return f"{found.id}: {found.found}", rows


def check(*options: str) -> tuple[str, list[Row]]:
    """Run `attnbench check` with these options; return the verdicts, and a row for each implementation and workload."""
    done = _python("-m", "attnbench", "check", "--json", *options)
    try:
        said = json.loads(done.stdout)
    except json.JSONDecodeError:
        raise Wrong(f"exit code {done.returncode}", []) from None
    verdicts = {name: str(each["verdict"]) for name, each in said["implementations"].items()}
    answer = ", ".join(f"{name} {verdict}" for name, verdict in verdicts.items())
    if done.returncode == 1:
        raise Wrong(answer, said["cells"])
    return answer, said["cells"]


def run(command: str, *options: str) -> tuple[str, list[Row]]:
    """Run an attnbench command that stores results; return a row for each folder with a journal or traces."""
    done = _python("-m", "attnbench", command, *options, "--results", "results", "--quiet")
    kept = sorted(Path("results").glob("*/*"))
    rows: list[Row] = [{"folder": str(folder), "files": len(list(folder.rglob("*")))} for folder in kept]
    if done.returncode not in {0, 3} or not kept:
        raise Wrong(f"exit code {done.returncode}", rows)
    return f"{command}, exit code {done.returncode}", rows


def times(  # noqa: PLR0913, PLR0917 - each a word of the command line
    where: str, direction: str, mask: str, width: str, lengths: str, heads: str, names: str
) -> tuple[str, list[Row]]:
    """Time each call with attnbench's clock and with triton.testing.do_bench, and add up the times of its kernels."""
    here = _here(where)
    rows: list[Row] = []
    for length in map(int, lengths.split(",")):
        for name in names.split(","):
            row: Row = {"implementation": name, "seq_len": length, "mask": mask, "head_dim": int(width)}
            rows.append(row)
            try:
                case = _case(where, name, direction, mask, int(width), length, heads)
                with case.grad_mode():
                    made = case.call()
                    made()
                    one_s = here.clock.elapsed(made, 1)
                    number = max(1, min(200, math.ceil(TARGET_S / max(one_s, 1e-7))))
                    taken = [here.clock.elapsed(made, number) / number for _ in range(NUM_REPEATS)]
                    row |= {"num_calls": number, "samples_s": taken, "time_s": median(taken)}
                    row["do_bench_s"] = _do_bench(made, here)
                    row["kernels"] = _kernels(made, here)
                    row["kernels_s"] = sum(each["time_s"] for each in row["kernels"]) or None
                    row["flops"] = _flops(case)
                del case, made
            except Left as left:
                row["reason"] = str(left)
            except Exception as error:  # noqa: BLE001 - a failed cell does not end the others
                traceback.print_exc()
                row["error"] = f"{type(error).__name__}: {error}"
    timed = [row for row in rows if "time_s" in row]
    if errors := [row for row in rows if "error" in row]:
        raise Wrong(f"{len(errors)} of {len(rows)} fail: {errors[0]['implementation']}: {errors[0]['error']}", rows)
    if not timed:
        raise Left(rows[0].get("reason", "nothing was timed"))
    last = max(row["seq_len"] for row in timed)
    shown = [f"{row['implementation']} {_beside(row)}" for row in timed if row["seq_len"] == last]
    return f"at {last}: {', '.join(shown)}", rows


def hang() -> tuple[str, list[Row]]:
    """Hang, with a child process that hangs, too; planted in a rehearsal."""
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    print(started.pid, flush=True)  # noqa: T201 - for a test that checks whether it has ended
    time.sleep(3600)
    return "", []


def die() -> tuple[str, list[Row]]:
    """Abort this process, as a broken CUDA context may do; planted in a rehearsal."""
    os.kill(os.getpid(), signal.SIGABRT)
    return "", []


def _python(*arguments: str, cwd: Path | None = None) -> "subprocess.CompletedProcess[bytes]":
    """Run Python; copy its standard output to the step's log, and return it with the exit code."""
    done = subprocess.run([sys.executable, *arguments], stdout=subprocess.PIPE, cwd=cwd, check=False)  # noqa: S603
    sys.stdout.write(done.stdout.decode(errors="replace"))
    return done


def _here(where: str) -> Any:  # noqa: ANN401 - a Device, whose module may not be there
    from attnbench.devices import device

    here = device(where)
    if reason := here.missing():
        raise Left(reason)
    return here


def _case(where: str, name: str, direction: str, mask: str, width: int, length: int, heads: str) -> Any:  # noqa: ANN401, PLR0913, PLR0917
    """Build a case with random inputs, in bfloat16 on a GPU and in float32 on the CPU.

    Raises:
        Left: the device is missing, or the implementation does not support the workload.
    """
    from attnbench.case import build, draw_normal, place, reason_against
    from attnbench.contract.loading import implementation
    from attnbench.workloads.sweep import make

    here = _here(where)
    batch, num_heads, groups = map(int, heads.split(","))
    axes = {"device": where, "direction": direction, "mask": mask, "head_dim": width, "seq_len": length}
    sizes = {"batch_size": batch, "num_heads": num_heads, "num_kv_heads": groups, "scope": "attention"}
    workload = make(axes | sizes | {"dtype": "float32" if here.is_host else "bfloat16"})
    made = implementation(name)
    if reason := reason_against(made, workload):
        raise Left(reason)
    return build(workload, made, place(draw_normal(workload, 0), workload))


def _kernels(call: Callable[[], object], here: Any) -> list[Row]:  # noqa: ANN401 - a Device
    """Profile one call; return a row with the seconds of each kernel (on the CPU, each operator), longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    watched = [getattr(ProfilerActivity, name) for name in here.activities]
    with profile(activities=watched) as seen:
        call()
        here.synchronize()
    rows = []
    for event in seen.key_averages():
        is_kernel = here.is_host or str(event.device_type).endswith("CUDA")
        spent_us = event.self_cpu_time_total if here.is_host else event.self_device_time_total
        if is_kernel and spent_us:
            rows.append({"kernel": event.key, "count": event.count, "time_s": spent_us * 1e-6})
    return sorted(rows, key=lambda row: -row["time_s"])


def _do_bench(call: Callable[[], object], here: Any) -> float | None:  # noqa: ANN401 - a Device
    """Return the median seconds that triton.testing.do_bench measures; None on the host, or if triton is missing."""
    from importlib.util import find_spec

    if here.is_host or find_spec("triton") is None:
        return None
    from triton.testing import do_bench  # type: ignore[import-not-found,import-untyped,unused-ignore]

    return float(do_bench(call, return_mode="median")) * 1e-3


def _flops(case: Any) -> float:  # noqa: ANN401 - a Case
    from attnbench.workloads.counts import useful_flops

    return float(useful_flops(case.workload))


def _beside(row: Row) -> str:
    """Format the FLOP/s by attnbench's clock, and the relative differences of the times by do_bench and by kernels."""
    others = {"do_bench": row.get("do_bench_s"), "kernels": row.get("kernels_s")}
    shares = [f"{name} {other / row['time_s'] - 1:+.1%}" for name, other in others.items() if other]
    return f"{row['flops'] / row['time_s'] / 1e12:.3g} TFLOP/s" + f" ({', '.join(shares)})" * bool(shares)


WORK: dict[str, Callable[..., tuple[str, list[Row]]]] = {
    each.__name__: each for each in (versions, tests, gauge, check, run, times, hang, die)
}


def main(name: str, file: Path, *given: str) -> None:
    """Run a step, and write its outcome, reason, answer and rows as JSON; the file appears only when it is complete."""
    outcome, reason, answer = OK, "", ""
    rows: list[Row] = []
    try:
        answer, rows = WORK[name](*given)
    except Left as left:
        outcome, reason = LEFT_OUT, str(left)
    except ModuleNotFoundError as error:
        outcome, reason = LEFT_OUT, f"{error.name} is not installed"
    except Wrong as wrong:
        outcome, reason, rows = FAILED, str(wrong), wrong.rows
    except Exception as error:  # noqa: BLE001 - a step that fails says so, and ends
        traceback.print_exc()
        outcome, reason = FAILED, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps({"outcome": outcome, "reason": reason, "answer": answer, "rows": rows}, default=str))
    draft.rename(file)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
