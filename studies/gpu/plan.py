"""Which steps there are, in which order, and how long each may take; and the small ones of a rehearsal on the CPU."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from studies.gpu.ledger import ROOT, Ledger, Step, found_file

CHECKS = {
    "check": (),
    "check-tf32": ("--set", "float32_matmul_precision=high", "--set", "direction=forward_backward"),
    "check-compiled": ("-i", "fused+compile"),
    "check-flex": ("-i", "flex"),
}
BACKENDS = ("sdpa", "sdpa_cudnn", "sdpa_flash", "flex")
GAUGES = ("kernel_sum", "cold_caches", "heat_up", "flush", "graph_mode")
AGAIN = ("kernel_sum", "cold_caches", "graph_mode")
"""G1 to G5, and then G1, G2 and G5 once more."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is tried."""

    device: str
    implementations: tuple[str, ...]
    layouts: tuple[str, ...]
    dtypes: tuple[str, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    backends: tuple[str, ...]
    heads: str  # B, H, G
    masks: tuple[str, ...] = ("none", "causal")
    check_sets: tuple[str, ...]
    checks: tuple[str, ...]
    run_options: tuple[str, ...]
    num_tests: int  # of the marker cuda, at most
    at_once: int
    repeats: bool = True  # some of G1 to G5 are made twice
    planted: tuple[str, ...] = ()


def implementations(folder: Path = ROOT / "implementations") -> tuple[str, ...]:
    """The names of all, by their files: nothing is imported."""
    files = sorted(folder.glob("[a-z]*.py"))
    return tuple(file.stem for file in files if re.search(r"^IMPLEMENTATION\b", file.read_text("utf-8"), re.MULTILINE))


def full() -> Size:
    """On a GPU: some forty minutes."""
    return Size(
        device="cuda",
        implementations=implementations(),
        layouts=("contiguous", "transposed", "expanded", "broadcast", "value_in_key"),
        dtypes=("bfloat16", "float32"),
        widths=(128, 64),
        lengths=(2048, 4096, 8192, 16384),
        backends=BACKENDS,
        heads="2,64,8",
        check_sets=("--set", "device=cuda"),
        checks=tuple(CHECKS),
        run_options=("--sweep", "gpu", "--budget", "150", *(word for name in BACKENDS for word in ("-i", name))),
        num_tests=1000,
        at_once=8,
    )


def rehearsal() -> Size:
    """On the CPU, from start to end: every kind of step, G1 to G5 on a simulated device, and three planted failures."""
    small = ("--set", "seq_len=16", "--set", "num_heads=2", "--set", "head_dim=8", "--set", "batch_size=1")
    return Size(
        device="cpu",
        implementations=("sdpa", "sdpa_cudnn"),
        layouts=("transposed",),
        dtypes=("float32",),
        widths=(8,),
        lengths=(16, 32),
        backends=("sdpa",),
        heads="1,2,1",
        masks=("causal",),
        check_sets=("-i", "sdpa", "--set", "device=cpu", *small),
        checks=("check-tf32",),
        run_options=("-i", "sdpa", "-i", "fused", "--budget", "0.5", "--set", "device=cpu", *small),
        num_tests=1,
        at_once=2,
        repeats=False,
        planted=("hang", "die", "poison"),
    )


def groups(size: Size, ledger: Ledger) -> Sequence[tuple[int, Callable[[], Sequence[Step]]]]:
    """How many steps of each group are run at once, and the group; what is timed has the machine for itself."""
    where = size.device

    def step(name: str, work: str, *given: str, limit_s: float, group: str) -> Step:
        return Step(name=name, work=work, given=given, limit_s=limit_s, group=group)

    def machine() -> list[Step]:
        return [
            step("versions", "versions", limit_s=60, group="machine"),
            step("functions", "functions", where, limit_s=120, group="machine"),
        ]

    def planted() -> list[Step]:
        limits = {"hang": 1.5, "die": 60.0, "poison": 60.0}
        return [step(f"planted-{each}", each, limit_s=limits[each], group="planted") for each in size.planted]

    def calls() -> list[Step]:
        return [
            step(f"call-{name}-{layout}-{dtype}", "call", where, name, layout, dtype, limit_s=90, group="calls")
            for name in size.implementations
            for layout in size.layouts
            for dtype in size.dtypes
        ]

    def kernels() -> list[Step]:
        return [
            step(f"kernels-{name}", "kernels", where, name, size.heads, limit_s=90, group="kernels")
            for name in size.implementations
        ]

    def listing() -> list[Step]:
        return [step("tests", "list_tests", limit_s=120, group="tests")]

    def tests() -> list[Step]:
        import json

        file = found_file(ledger.out, "tests")
        names = json.loads(file.read_bytes())["rows"] if file.exists() else []
        return [
            step(f"test-{number:03d}", "run_test", row["test"], limit_s=120, group="tests")
            for number, row in enumerate(names[: size.num_tests])
        ]

    def gauges() -> list[Step]:
        first = [step(f"gauge-{name}", "gauge", where, name, limit_s=180, group="gauges") for name in GAUGES]
        again = [step(f"gauge-{name}-again", "gauge", where, name, limit_s=120, group="gauges") for name in AGAIN]
        return [*first, *again] if size.repeats else first

    def checks() -> list[Step]:
        made = [
            step(name, "check", *size.check_sets, *CHECKS[name], limit_s=240, group="checks") for name in size.checks
        ]
        return [*made, step("run", "run", *size.run_options, limit_s=300, group="run")]

    def timed() -> list[Step]:
        lengths, backends = ",".join(map(str, size.lengths)), ",".join(size.backends)
        return [
            step(
                f"{direction}-{width}-{mask}",
                "times",
                *(where, direction, mask, str(width), lengths, size.heads, backends),
                limit_s=240,
                group="times",
            )
            for direction in ("inference", "backward")
            for width in size.widths
            for mask in size.masks
        ]

    def memory() -> list[Step]:
        lengths = ",".join(map(str, size.lengths))
        return [
            step("growth", "growth", where, lengths, size.heads, ",".join(size.backends), limit_s=180, group="memory"),
            step("exhaust", "exhaust", where, limit_s=60, group="memory"),
            *(
                step(f"trace-{name}", "trace", where, name, size.heads, limit_s=120, group="traces")
                for name in size.backends
            ),
        ]

    return [
        (1, machine),
        (1, planted),
        (size.at_once, calls),
        (size.at_once, kernels),
        (1, listing),
        (size.at_once // 2, tests),
        (1, gauges),
        (1, checks),
        (1, timed),
        (1, memory),
    ]
