"""What a trace may say and what viewers want of it: pure functions over the JSON that torch.profiler exports.

Out go the host's name, absolute paths, addresses and the frames of the harness around the steps. In come a call stack
for each operator and the category under which the TensorBoard plug-in knows the calls of the CUDA runtime.

Source: Trace Event Format,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU; the plug-in's reader,
https://github.com/pytorch/kineto/blob/main/tb_plugin/torch_tb_profiler/profiler/trace.py.
"""

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]

KEPT = (
    "schemaVersion",
    "deviceProperties",
    "cuda_runtime_version",
    "cuda_driver_version",
    "with_stack",
    "with_modules",
    "profile_memory",
    "record_shapes",
    "displayTimeUnit",
    "baseTimeNanoseconds",
)
"""What a trace says of itself; everything else, `host_name` above all, is left out."""
RENAMED = {"cuda_runtime": "Runtime", "cuda_driver": "Runtime"}
"""Categories that the plug-in does not know, as it knows them: without, no operator has any time on the device."""
STEP = "ProfilerStep#"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
FRAME = re.compile(r"(?P<path>.+\.py)\((?P<line>\d+)\): ")
ABSOLUTE = re.compile(r"(?<![\w./:>-])(?:/[^\s/:;,'\"()<>]+)+/([^\s/:;,'\"()<>]+)")


def tidied(trace: dict[str, Any], roots: Iterable[str] = ()) -> dict[str, Any]:
    """The trace as it is kept. `roots` are folders that its paths become relative to, beside those of sys.path."""
    places = sorted({str(Path(root).resolve()) for root in [*roots, *filter(None, sys.path)]}, key=len, reverse=True)
    events = list(_within_steps(trace["traceEvents"]))
    for event in events:
        event["cat"] = RENAMED.get(event.get("cat", ""), event.get("cat", ""))
    add_call_stacks(events)
    kept = {name: trace[name] for name in KEPT if name in trace}
    cleaned: dict[str, Any] = _without_paths({**kept, "traceEvents": events}, places)
    return cleaned


def _within_steps(events: Iterable[Event]) -> Iterator[Event]:
    """The events but for the Python frames that are not inside the steps, and for steps as the device repeats them."""
    found = list(events)
    steps = [event for event in found if event["name"].startswith(STEP) and event.get("cat") != "gpu_user_annotation"]
    start = min((event["ts"] for event in steps), default=0.0)
    end = max((event["ts"] + event["dur"] for event in steps), default=float("inf"))
    for event in found:
        if event.get("cat") == "python_function" and not start <= event["ts"] <= event["ts"] + event["dur"] <= end:
            continue
        if event.get("cat") == "gpu_user_annotation" and event["name"].startswith(STEP):
            continue  # the plug-in would count each step twice
        yield event


def add_call_stacks(events: Iterable[Event]) -> None:
    """Give each operator the Python frames that it was called in, innermost first, as the plug-in reads them."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in {"cpu_op", "python_function"}:
            threads[event["pid"], event["tid"]].append(event)
    for inside in threads.values():
        open_frames: list[Event] = []
        for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
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
    """The text with absolute paths relative to the first of `places` that holds them, or else their last part.

    A call stack, frames joined by semicolons, is shortened frame by frame.
    """
    return ";".join(_shortened_frame(part, places) for part in text.split(";"))


def _shortened_frame(text: str, places: list[str]) -> str:
    text = ADDRESS.sub("", text)
    for place in places:
        text = text.replace(f"{place}/", "")
    if text.startswith("/") and (frame := FRAME.match(text)):  # a path may hold blanks
        return text.replace(frame["path"], Path(frame["path"]).name, 1)
    return ABSOLUTE.sub(r"\1", text)
