"""The device `second` for PyTorch; the entry point `torch.backends` loads it with torch."""

import sys
from types import SimpleNamespace

import torch

from . import _second

NUM_DEVICES = 2
default_generators: list[torch.Generator] = []
spin, memory, set_limit = _second.spin, _second.memory, _second.set_limit


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return NUM_DEVICES


def current_device() -> int:
    return torch.accelerator.current_device_index()


def set_device(index) -> None:
    torch.accelerator.set_device_index(index)


def index_of(place) -> int:
    index = torch.device(place).index
    return current_device() if index is None else index


def device(place):
    return torch.accelerator.device_index(index_of(place))


def Event(**options) -> torch.Event:  # noqa: N802 - as in torch.cuda
    return torch.Event("second", **options)


def synchronize(device=None) -> None:
    torch.accelerator.synchronize(device)


def empty_cache() -> None:
    """Do nothing: freed memory is not kept."""


def mem_get_info(place) -> tuple[int, int]:
    held, _, _, _, limit = memory(index_of(place))
    return limit - held, limit


def memory_allocated(place) -> int:
    return memory(index_of(place))[0]


def memory_stats(place) -> dict[str, int]:
    held, peak, number, total, _ = memory(index_of(place))
    stats = {"current": held, "peak": peak, "allocated": total}
    stats = {f"allocated_bytes.all.{name}": value for name, value in stats.items()}
    return stats | {"allocation.all.allocated": number}


def reset_peak_memory_stats(place) -> None:
    _second.reset_peak(index_of(place))


def get_device_properties(place) -> SimpleNamespace:
    return SimpleNamespace(total_memory=memory(index_of(place))[4])


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def manual_seed_all(seed: int) -> None:
    for each in default_generators:
        each.manual_seed(seed)


def get_rng_state(device="second") -> torch.Tensor:
    return default_generators[torch.device(device).index or 0].get_state()


def set_rng_state(state: torch.Tensor, device="second") -> None:
    default_generators[torch.device(device).index or 0].set_state(state)


def load() -> None:
    """Register everything under the name `second`."""
    torch.utils.rename_privateuse1_backend("second")
    torch._register_device_module("second", sys.modules[__name__])
    torch.utils.generate_methods_for_privateuse1_backend()
    default_generators.extend(_second.default_generator(index) for index in range(NUM_DEVICES))
