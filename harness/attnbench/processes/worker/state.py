# ruff: noqa: SLF001 - torch tells most of its state by private names only
"""What a process is like besides its tensors, and what somebody's implementation has changed of it.

Two kinds of things are watched. *Settings* decide what everybody in the process computes, and how fast. A call may
change none of them; what an import changes is put back where that is possible, since honest libraries do so. Everything
else is a *note*: it is named, and put back where that is simple.
"""

import builtins
import gc
import locale
import os
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import psutil
import torch
from torch.nn.modules import module as modules

from attnbench.devices import names
from attnbench.devices.waiting import settle

Read = Callable[[], Any]
Write = Callable[[Any], object]
TINY = sys.float_info.min
LONGEST = 120
NUM_LOOKS = 3
THREADS_S, CHILDREN_S = 0.01, 0.05
"""For so long a process is watched: the system counts the time of others in hundredths of a second."""
BUSY_SHARE = 0.5
OTHER_FILES = ("/proc", "/dev", "/memfd:")
"""Files that lie on no disk."""
DEVICE_TYPES = tuple(name for name in names() if hasattr(torch, name))
FP32 = (
    ("generic", "all"),
    ("mkldnn", "all"),
    ("mkldnn", "matmul"),
    ("mkldnn", "conv"),
    ("mkldnn", "rnn"),
    ("cuda", "all"),
    ("cuda", "matmul"),
    ("cuda", "conv"),
    ("cuda", "rnn"),
)
WRAPPED_BY_DYNAMO = {
    ("torch", "manual_seed"),
    ("torch.nn.Module", "__init__"),
    ("torch.nn.Module", "__setstate__"),
}
"""What torch itself replaces when torch._dynamo is imported."""
WRAPPED_BY_LIBRARIES = ("compile", "load", "save")
"""Functions of torch that honest libraries wrap as they are imported, as lightning does with torch.compile. They
neither compute nor measure: putting back the originals changes no answer and no time."""


@dataclass(frozen=True)
class Watched:
    """How one thing is read, and how it is put back: None where it cannot be."""

    read: Read
    write: Write | None = None


@dataclass
class Changes:
    """What was changed, in words."""

    settings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # those of both that could not be put back


class SharedStateError(Exception):
    """An implementation changed settings of the whole process."""


def _set_fp32(backend: str, operator: str, value: str) -> None:
    torch._C._set_fp32_precision_setter(backend, operator, value)


def _autocast() -> dict[str, Watched]:
    made = {}
    for name in DEVICE_TYPES:
        made[f"autocast on {name}"] = Watched(
            partial(torch.is_autocast_enabled, name), partial(torch.set_autocast_enabled, name)
        )
        made[f"the dtype of autocast on {name}"] = Watched(
            partial(torch.get_autocast_dtype, name), partial(torch.set_autocast_dtype, name)
        )
    made["the cache of autocast"] = Watched(torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled)
    return made


def _default_device() -> object:
    context = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if context is None else context.device


FLAGS = {
    "SDPA's flash kernel": "sdp_use_flash flash_sdp_enabled",
    "SDPA's memory-efficient kernel": "sdp_use_mem_efficient mem_efficient_sdp_enabled",
    "SDPA's math kernel": "sdp_use_math math_sdp_enabled",
    "SDPA's cuDNN kernel": "sdp_use_cudnn cudnn_sdp_enabled",
    "SDPA's order of kernels": "sdp_priority_order",
    "reduced precision in SDPA's math kernel": "math_sdp_allow_fp16_bf16_reduction",
    "whether oneDNN is used": "mkldnn_enabled",
    "whether oneDNN is deterministic": "mkldnn_deterministic",
    "whether NNPACK is used": "nnpack_enabled",
    "reduced precision on the processor": "cpu_allow_fp16_reduced_precision_reduction",
    "whether cuDNN is used": "cudnn_enabled",
    "cuDNN's benchmark": "cudnn_benchmark",
    "whether cuDNN is deterministic": "cudnn_deterministic",
    "bfloat16 reductions of cuBLAS": "cublas_allow_bf16_reduced_precision_reduction",
    "float16 reductions of cuBLAS": "cublas_allow_fp16_reduced_precision_reduction",
    "float16 sums of cuBLAS": "cublas_allow_fp16_accumulation",
}


def _flags() -> dict[str, Watched]:
    made = {}
    for what, accessors in FLAGS.items():
        written, read = (accessors.split() * 2)[:2]
        setter = getattr(torch._C, f"_set_{written}", None)
        if getter := getattr(torch._C, f"_get_{read}", None):
            made[what] = Watched(getter, setter)
    return made


THREADS = "the number of threads"
QUICK: dict[str, Watched] = {
    THREADS: Watched(torch.get_num_threads, torch.set_num_threads),
    "the default dtype": Watched(torch.get_default_dtype, torch.set_default_dtype),
    "the precision of float32 matmuls": Watched(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": Watched(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    "the default device": Watched(_default_device, torch.set_default_device),
    "anomaly detection": Watched(torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    "whether denormals are flushed to zero": Watched(lambda: TINY / 2 == 0, torch.set_flush_denormal),
    "the number of function modes": Watched(torch._C._len_torch_function_stack),
    "the number of dispatch modes": Watched(torch._C._len_torch_dispatch_stack),
    "inference mode": Watched(torch.is_inference_mode_enabled),
    **_autocast(),
    **_flags(),
}
"""Settings that are read at every turn of a visit: together in some microseconds."""


def _saved_hooks() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # noqa: FBT003 - it takes no keyword


HOOKS = [name for name in vars(modules) if name.startswith("_global_") and isinstance(vars(modules)[name], dict)]


def _put_hooks(kept: dict[str, dict[int, Any]]) -> None:
    for name, hooks in kept.items():
        held = vars(modules)[name]
        held.clear()
        held.update(hooks)


SETTINGS: dict[str, Watched] = {
    **QUICK,  # put back before what goes with the precision of float32 matmuls
    **{
        f"the float32 precision of {backend} {operator}": Watched(
            partial(torch._C._get_fp32_precision_getter, backend, operator), partial(_set_fp32, backend, operator)
        )
        for backend, operator in FP32
    },
    "whether gradients are kept": Watched(torch.is_grad_enabled, torch.set_grad_enabled),
    "the number of threads between operators": Watched(torch.get_num_interop_threads),
    "the hooks of all modules": Watched(lambda: {name: dict(vars(modules)[name]) for name in HOOKS}, _put_hooks),
    "the hooks of saved tensors": Watched(_saved_hooks),
    "whether garbage is collected": Watched(gc.isenabled, lambda kept: gc.enable() if kept else gc.disable()),
    "the thresholds of garbage collection": Watched(gc.get_threshold, lambda kept: gc.set_threshold(*kept)),
    "the trace function": Watched(sys.gettrace, sys.settrace),
    "the profile function": Watched(sys.getprofile, sys.setprofile),
    "how often threads switch": Watched(sys.getswitchinterval, sys.setswitchinterval),
    "the processors it may run on": Watched(
        lambda: sorted(os.sched_getaffinity(0)), lambda kept: os.sched_setaffinity(0, kept)
    ),
    "its nice value": Watched(
        lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda kept: os.setpriority(os.PRIO_PROCESS, 0, kept)
    ),
}


def _environment() -> dict[str, str]:
    """All but what Inductor tells itself."""
    return {name: value for name, value in os.environ.items() if not name.lstrip("_").startswith("TORCHINDUCTOR_")}


def _put_environment(kept: dict[str, str]) -> None:
    for name in _environment().keys() - kept.keys():
        del os.environ[name]
    os.environ.update(kept)


def _filters(*, is_pythons: bool = True) -> list[Any]:
    """The filters of Python's own warnings, or those that libraries have for theirs and set as they are imported."""
    return [each for each in warnings.filters if (each[2].__module__ == "builtins") is is_pythons]


def _put_filters(kept: list[Any]) -> None:
    warnings.filters[:] = [*_filters(is_pythons=False), *kept]  # type: ignore[index]
    warnings._filters_mutated_lock_held() if hasattr(warnings, "_filters_mutated_lock_held") else None


def _handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in signal.valid_signals()}


def _put_handlers(kept: dict[int, Any]) -> None:
    for number, handler in kept.items():
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def _limits() -> dict[str, tuple[int, int]]:
    return {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}


def _put_limits(kept: dict[str, tuple[int, int]]) -> None:
    for name, limits in kept.items():
        if resource.getrlimit(getattr(resource, name)) != limits:
            resource.setrlimit(getattr(resource, name), limits)


NOTES: dict[str, Watched] = {
    "the working directory": Watched(os.getcwd, os.chdir),
    "the environment": Watched(_environment, _put_environment),
    "the filters of warnings": Watched(_filters, _put_filters),
    "the locale": Watched(lambda: locale.setlocale(locale.LC_ALL), lambda kept: locale.setlocale(locale.LC_ALL, kept)),
    "the handlers of signals": Watched(_handlers, _put_handlers),
    "the limits of the process": Watched(_limits, _put_limits),
    "the limit of recursion": Watched(sys.getrecursionlimit, sys.setrecursionlimit),
}


def _files() -> dict[str, str]:
    found = {}
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names are enough
        with suppress(OSError):
            found[number] = str(Path("/proc/self/fd", number).readlink())
    return found


def _children() -> set[str]:
    """The process ids of all children, in tens of microseconds."""
    found: set[str] = set()
    for thread in os.listdir("/proc/self/task"):  # noqa: PTH208 - likewise
        with suppress(OSError):
            found |= set(Path("/proc/self/task", thread, "children").read_text().split())
    return found


def _look(read: Read) -> object:
    try:
        return read()
    except Exception as error:  # noqa: BLE001 - torch refuses to tell where its older and newer settings were mixed
        return f"unreadable ({type(error).__name__})"


def _of_tensors() -> Mapping[str, Any]:
    return {**vars(torch._C.TensorBase), **vars(torch.Tensor)}


def _owners() -> Iterator[tuple[str, Callable[[], Mapping[str, Any]]]]:
    """What holds functions that nobody may replace, by name."""
    for place in (torch, torch.nn.functional, torch.autograd, torch._C._nn, torch.linalg, builtins, time):
        yield place.__name__, partial(vars, place)
    for name in DEVICE_TYPES:
        yield f"torch.{name}", partial(vars, getattr(torch, name))
    yield "torch.Tensor", _of_tensors
    yield "torch.nn.Module", partial(vars, torch.nn.Module)
    for name, place in list(sys.modules.items()):
        if name.startswith("attnbench.") and isinstance(place, ModuleType):
            yield name, partial(vars, place)
            for made in list(vars(place).values()):
                if isinstance(made, type) and made.__module__ == name:
                    yield f"{name}.{made.__qualname__}", partial(vars, made)


class Functions:
    """All functions of torch and of the harness that matter, with the code of each; and the harness's constants."""

    def __init__(self) -> None:
        """Copy what holds them, which is faster than looking at each."""
        self._num_modules = len(sys.modules)
        self._ours = {name: place for name, place in sys.modules.items() if name.startswith("attnbench.")}
        self._held = [(owner, read, dict(read())) for owner, read in _owners()]
        self._wrapped = {name: getattr(torch, name) for name in WRAPPED_BY_LIBRARIES}
        self._codes = [
            (f"{owner}.{name}", value, value.__code__)
            for owner, _, before in self._held
            for name, value in before.items()
            if type(value) is FunctionType
        ]

    @property
    def are_all(self) -> bool:
        """Whether no module was imported since, which may have functions that matter."""
        return self._num_modules == len(sys.modules)

    def unwrap(self) -> list[str]:
        """Put back what libraries wrap; the names of what was wrapped."""
        names = [name for name, value in self._wrapped.items() if getattr(torch, name, None) is not value]
        for name in names:
            setattr(torch, name, self._wrapped[name])
        return [f"torch.{name}" for name in names]

    def replaced(self) -> list[str]:
        """The names of those that are others now. Functions that were added are none: torch imports much late."""
        found = [name for name, value, code in self._codes if value.__code__ is not code]
        found += [name for name, place in self._ours.items() if sys.modules.get(name) is not place]
        for owner, read, before in self._held:
            held = read()
            has_same_names = len(before) == len(held) and all(map(is_, before, held))
            if has_same_names and all(map(is_, before.values(), held.values())):
                continue
            for name, value in before.items():
                if held.get(name) is not value and _matters(owner, name, value, held.get(name)):
                    found.append(f"{owner}.{name}")
            if owner.startswith("attnbench."):  # a module's global goes before what Python has by the same name
                hidden = (name for name in held.keys() - before.keys() if hasattr(builtins, name))
                found += [f"{owner}.{name}" for name in hidden if not name.startswith("__")]
        return found


def _matters(owner: str, name: str, before: object, now: object) -> bool:
    if (owner, name) in WRAPPED_BY_DYNAMO and isinstance(now, FunctionType):
        return not str(now.__globals__.get("__name__")).startswith(("torch._compile", "torch._dynamo."))
    is_ours = owner.startswith("attnbench.")
    return callable(before) or (is_ours and (name.isupper() or isinstance(before, property | classmethod)))


def _in_words(kept: object, now: object) -> str:
    """From what to what, in short: of mappings what differs."""
    if isinstance(kept, dict) and isinstance(now, dict):
        keys = sorted((key for key in kept.keys() | now.keys() if kept.get(key) != now.get(key)), key=str)
        kept, now = ({key: held.get(key) for key in keys} for held in (kept, now))
    return f"from {_short(kept)} to {_short(now)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


class Guard:
    """Watches the state of the process: what it was like when the guard was made."""

    def __init__(self, earlier: "Guard | None" = None) -> None:
        """Remember everything; functions as an earlier guard does, which has found none replaced."""
        self._settings = {name: _look(each.read) for name, each in SETTINGS.items()}
        self._notes = {name: _look(each.read) for name, each in NOTES.items()}
        self._functions: Functions = (
            earlier._functions if earlier is not None and earlier._functions.are_all else Functions()
        )
        self._files = _files()
        self._threads = set(threading.enumerate())
        self._children = _children()

    def expect(self, name: str) -> None:
        """Accept the present value of a setting, which the harness itself has changed."""
        self._settings[name] = _look(SETTINGS[name].read)

    def require_unchanged(self) -> None:
        """Look at what is read quickly, and put it back.

        Raises:
            SharedStateError: any was changed; the message says which.
        """
        quick = {name: self._settings[name] for name in QUICK}
        if {name: _look(each.read) for name, each in QUICK.items()} != quick:
            changes = Changes()
            self._compare(QUICK, quick, changes.settings, changes.kept)
            raise SharedStateError(blame(changes.settings))

    def restore(self) -> Changes:
        """Look at everything, put back what can be, and say what was changed."""
        changes = Changes()
        self._compare(SETTINGS, self._settings, changes.settings, changes.kept)
        self._compare(NOTES, self._notes, changes.notes, changes.kept)
        if wrapped := self._functions.unwrap():
            changes.settings.append(f"{', '.join(wrapped)} from what it was to another")
        if replaced := self._functions.replaced():
            changes.settings.append(f"{_short(', '.join(replaced))} from what it was to another")
            changes.kept.append(changes.settings[-1])
        files = _files()
        for number, target in self._files.items():
            if int(number) <= 2 and files.get(number) != target:  # noqa: PLR2004 - the standard ones
                changes.notes.append(f"the open file {number} from {target} to {files.get(number)}")
                changes.kept.append(changes.notes[-1])
        if new := sorted(files[number] for number in files.keys() - self._files.keys() if files[number][:1] == "/"):
            left = [path for path in new if not path.startswith(OTHER_FILES)]
            changes.notes += [f"the open files: it left {_short(', '.join(left))} open"] if left else []
        if threads := sorted(each.name for each in set(threading.enumerate()) - self._threads):
            changes.notes.append(f"the threads: it left {_short(', '.join(threads))} running")
        if children := _children() - self._children:
            changes.notes.append(f"the processes: it left {len(children)} running")
        return changes

    @staticmethod
    def _compare(watched: dict[str, Watched], kept: dict[str, Any], changed: list[str], stuck: list[str]) -> None:
        seen = {name: _look(each.read) for name, each in watched.items()}
        others = {name: now for name, now in seen.items() if now != kept[name]}
        for _ in range(2 if others else 0):  # what puts one back may move another
            for name, each in watched.items():
                if each.write is not None and _look(each.read) != kept[name]:
                    with suppress(Exception):
                        each.write(kept[name])
        for name, now in others.items():
            changed.append(f"{name} {_in_words(kept[name], now)}")
            if _look(watched[name].read) != kept[name]:
                stuck.append(changed[-1])


def require_idle() -> None:
    """See that neither a thread nor a child goes on using the processors when nothing is asked of this process.

    Raises:
        SharedStateError: one does, also when it is looked at again.
    """
    share = 0.0
    for _ in range(NUM_LOOKS):
        settle()
        children = psutil.Process().children(recursive=True)
        window_s = CHILDREN_S if children else THREADS_S
        before_s = _processor_s(children)
        time.sleep(window_s)
        share = (_processor_s(children) - before_s) / window_s
        if share < BUSY_SHARE:
            return
    raise SharedStateError(f"between its calls it goes on using {share:.0%} of a processor, in threads or processes")


def _processor_s(children: list[psutil.Process]) -> float:
    total_s = time.process_time()
    for child in children:
        with suppress(psutil.Error):
            total_s += sum(child.cpu_times()[:2])
    return total_s


def blame(changed: list[str]) -> str:
    """What is said of whoever changed settings."""
    return f"it changed {', '.join(changed)} for everybody in the process"
