"""Trace one case (a module, its inputs and its mask): run a few steps under torch.profiler, after the check.

These steps are never timed.

Each phase of a step runs in a module, `Forward` or `Backward`, so that the viewer (a plug-in of TensorBoard) can show
modules even for a bare `attend`, and its DIFF tab finds the same phases in every run.

Trace files are tidied. The host's name, absolute paths, addresses, and the harness's stack frames around the steps are
removed. Each operator gets a call stack, and calls of the CUDA runtime get the category that the plug-in expects.

Source: Trace Event Format, https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; the
plug-in's reader, https://github.com/pytorch/kineto/blob/main/tb_plugin/torch_tb_profiler/profiler/trace.py.
"""

import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from attnbench.case import Case
from attnbench.tracing import folders

NUM_WARM_STEPS = 2  # unrecorded steps under the profiler, which is slow at first; one step without it precedes them
NUM_STEPS = 3  # recorded steps
KEPT = (
    *("schemaVersion", "deviceProperties", "cuda_runtime_version", "cuda_driver_version", "displayTimeUnit"),
    *("with_stack", "with_modules", "profile_memory", "record_shapes", "baseTimeNanoseconds"),
)
"""Metadata that a trace keeps; everything else is removed, `host_name` above all."""
RENAMED = {"cuda_runtime": "Runtime", "cuda_driver": "Runtime"}  # otherwise the plug-in shows no time on the device
STEP = "ProfilerStep#"  # start of the names of steps
COPIED = "gpu_user_annotation"  # category of the copies of the steps on the device's time line
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
FRAME = re.compile(r".+\.py\(\d+\): ")  # start of the name of a frame with a file: "PATH.py(LINE): "
FRAME_PATH = re.compile(r"(?:^|(?<=;))/[^;]*/([^/;]+\.py)(?=\(\d+\): )")
"""Pattern of the absolute path of a frame, which may contain spaces, in a call stack of frames joined by semicolons."""
ABSOLUTE = re.compile(r"(?<![\w./:>-])(?:/[^\s/:;,'\"()<>]+)+/([^\s/:;,'\"()<>]+)")  # any other absolute path


class Forward(nn.Module):
    """One forward call of a case, as a module without submodules."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self, *operands: Tensor) -> Any:  # noqa: ANN401 - a tensor, or a gradient for each leaf
        """Call the function with the operands, and return its result."""
        return self.call(*operands)


class Backward(Forward):
    """One backward pass of a case, as a module: the gradients of the leaves, given the output and its gradient."""


def stepper(case: Case) -> Callable[[], object]:
    """Return a function that runs one step: forward pass, backward pass or both, as the workload's direction says."""
    leaves, keeps_graph = list(case.leaves.values()), case.workload.direction == "backward"

    def gradients(output: Tensor, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        return torch.autograd.grad(output, leaves, grad_output, retain_graph=keeps_graph, allow_unused=True)

    forward, backward = Forward(case.output), Backward(gradients)
    if case.workload.direction in {"inference", "forward"}:
        return forward
    output = forward()
    grad_output = torch.ones_like(output) / output.numel() ** 0.5
    if case.workload.direction == "backward":
        return partial(backward, output, grad_output)
    return lambda: backward(forward(), grad_output)


def trace(case: Case, file: Path, on_step: Callable[[], None]) -> None:
    """Write a trace of the case to `file`; `on_step` is called before each profiled step, and after the last one.

    Raises:
        OSError: the file cannot be written.
        Exception: any exception of the implementation.
    """
    with case.grad_mode():
        step = stepper(case)
        step()
        with profile(
            activities=[getattr(ProfilerActivity, name) for name in case.device.activities],
            schedule=schedule(wait=0, warmup=NUM_WARM_STEPS, active=NUM_STEPS, repeat=1),
            record_shapes=True,  # Operator view, by shape
            profile_memory=True,  # Memory view
            with_stack=True,  # call stacks; also needed for the Module view
            with_modules=True,
            acc_events=True,
        ) as seen:
            for _ in range(NUM_WARM_STEPS + NUM_STEPS):
                on_step()
                step()
                case.device.synchronize()  # so that a step includes all its kernels
                seen.step()
    on_step()
    with tempfile.TemporaryDirectory(prefix="attnbench-trace-") as folder:
        raw = Path(folder) / "raw.json"
        seen.export_chrome_trace(str(raw))
        folders.write(file, tidied(msgspec.json.decode(raw.read_bytes())))


def tidied(trace: dict[str, Any]) -> dict[str, Any]:
    """Tidy a trace as the module's docstring describes; make paths relative to the folders of sys.path.

    The device's copies of the steps are removed, too, because with them the plug-in would count each step twice.
    """
    steps = [event for event in trace["traceEvents"] if event["name"].startswith(STEP) and event.get("cat") != COPIED]
    start = min((event["ts"] for event in steps), default=0.0)
    end = max((event["ts"] + event["dur"] for event in steps), default=float("inf"))
    inside = []
    for event in trace["traceEvents"]:
        category = event.get("cat", "")
        is_around = category == "python_function" and not start <= event["ts"] <= event["ts"] + event["dur"] <= end
        if not is_around and not (category == COPIED and event["name"].startswith(STEP)):
            inside.append(event | {"cat": RENAMED.get(category, category)})
    add_call_stacks(inside)
    places = sorted({str(Path(folder).resolve()) for folder in sys.path if folder}, key=len, reverse=True)
    kept = {name: trace[name] for name in KEPT if name in trace}
    cleaned: dict[str, Any] = _without_paths({**kept, "traceEvents": inside}, places)
    return cleaned


def add_call_stacks(events: Iterable[dict[str, Any]]) -> None:
    """Give each operator its Python frames, innermost first, in the plug-in's format."""
    threads: dict[tuple[Any, Any], list[dict[str, Any]]] = defaultdict(list)  # open frames
    spans = [each for each in events if each.get("ph") == "X" and each.get("cat") in {"cpu_op", "python_function"}]
    for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
        open_frames = threads[event["pid"], event["tid"]]
        while open_frames and open_frames[-1]["ts"] + open_frames[-1]["dur"] <= event["ts"]:
            open_frames.pop()
        if event["cat"] == "python_function":
            open_frames.append(event)
        elif frames := [frame["name"] for frame in reversed(open_frames) if FRAME.match(frame["name"])]:
            event.setdefault("args", {})["Call stack"] = ";".join(frames)


def _without_paths(value: Any, places: list[str]) -> Any:  # noqa: ANN401 - JSON
    if isinstance(value, str):
        return shortened(value, places) if "/" in value or " at 0x" in value else value
    if isinstance(value, list):
        return [_without_paths(each, places) for each in value]
    if isinstance(value, dict):
        return {shortened(key, places): _without_paths(each, places) for key, each in value.items()}
    return value


def shortened(text: str, places: list[str]) -> str:
    """Make absolute paths relative to the first folder in `places` that contains them, and remove addresses.

    Any other absolute path is cut to its last part.
    """
    text = ADDRESS.sub("", text)
    for place in places:
        text = text.replace(f"{place}/", "")
    return ABSOLUTE.sub(r"\1", FRAME_PATH.sub(r"\1", text))
