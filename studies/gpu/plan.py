"""The steps, their order and time limits; and the small steps of a rehearsal on the CPU."""

from dataclasses import dataclass
from pathlib import Path

from studies.gpu.steps import ROOT, Groups, Step

CHECKS = {
    "check": (),
    "check-tf32": ("--set", "float32_matmul_precision=high", "--set", "direction=forward_backward"),
    "check-compiled": ("-i", "fused+compile"),
    "check-flex": ("-i", "flex"),
}
BACKENDS = ("sdpa", "sdpa_cudnn", "sdpa_flash", "flex")
GAUGES = ("kernel_sum", "cold_caches", "heat_up", "flush", "graph_mode")
AGAIN = ("kernel_sum", "cold_caches", "graph_mode")
"""G1 to G5, and then three of them once more."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of a run."""

    device: str
    implementations: tuple[str, ...]
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    backends: tuple[str, ...]
    heads: str  # B, H, G
    masks: tuple[str, ...] = ("none", "causal")
    check_sets: tuple[str, ...]
    checks: tuple[str, ...]
    run_options: tuple[str, ...]
    at_once: int
    repeats: bool = True  # some of G1 to G5 run twice
    planted: tuple[str, ...] = ()


def implementations(folder: Path = ROOT / "implementations") -> tuple[str, ...]:
    """List all implementations by their files, without importing them."""
    return tuple(sorted(file.stem for file in folder.glob("[a-z]*.py")))


def full() -> Size:
    """Plan a run on a GPU: some forty minutes."""
    return Size(
        device="cuda",
        implementations=implementations(),
        widths=(128, 64),
        lengths=(2048, 4096, 8192, 16384),
        backends=BACKENDS,
        heads="2,64,8",
        check_sets=("--set", "device=cuda"),
        checks=tuple(CHECKS),
        run_options=("--sweep", "gpu", "--budget", "150", *(word for name in BACKENDS for word in ("-i", name))),
        at_once=8,
    )


def rehearsal() -> Size:
    """Plan a rehearsal on the CPU: every kind of step, G1 to G5 on a simulated device, and three planted failures."""
    small = ("--set", "seq_len=16", "--set", "num_heads=2", "--set", "head_dim=8", "--set", "batch_size=1")
    return Size(
        device="cpu",
        implementations=("sdpa", "sdpa_cudnn"),
        widths=(8,),
        lengths=(16, 32),
        backends=("sdpa",),
        heads="1,2,1",
        masks=("causal",),
        check_sets=("-i", "sdpa", "--set", "device=cpu", *small),
        checks=("check-tf32",),
        run_options=("-i", "sdpa", "-i", "fused", "--budget", "0.5", "--set", "device=cpu", *small),
        at_once=2,
        repeats=False,
        planted=("hang", "die", "poison"),
    )


def groups(size: Size) -> Groups:
    """Group the steps; timed steps have the machine to themselves."""
    where, heads = size.device, size.heads
    lengths, backends = ",".join(map(str, size.lengths)), ",".join(size.backends)

    def step(name: str, work: str, *given: str, limit_s: float, group: str) -> Step:
        return Step(name=name, work=work, given=given, limit_s=limit_s, group=group)

    planted_limits_s = {"hang": 1.5, "die": 60.0, "poison": 60.0}
    planted = [step(f"planted-{each}", each, limit_s=planted_limits_s[each], group="planted") for each in size.planted]
    kernels = [
        step(f"kernels-{name}", "kernels", where, name, heads, limit_s=90, group="kernels")
        for name in size.implementations
    ]
    gauges = [step(f"gauge-{name}", "gauge", where, name, limit_s=180, group="gauges") for name in GAUGES]
    if size.repeats:
        gauges += [step(f"gauge-{name}-again", "gauge", where, name, limit_s=120, group="gauges") for name in AGAIN]
    checks = [step(name, "check", *size.check_sets, *CHECKS[name], limit_s=240, group="checks") for name in size.checks]
    checks.append(step("run", "run", "run", *size.run_options, limit_s=300, group="run"))
    times = [
        step(
            f"{direction}-{width}-{mask}",
            "times",
            *(where, direction, mask, str(width), lengths, heads, backends),
            limit_s=240,
            group="times",
        )
        for direction in ("inference", "backward")
        for width in size.widths
        for mask in size.masks
    ]
    batch, num_heads, groups = heads.split(",")
    axes = ["scope=attention", f"batch_size={batch}", f"num_heads={num_heads}", f"num_kv_heads={groups}", "mask=causal"]
    axes += [f"device={where}", "head_dim=64", "direction=forward_backward"]
    shape = [word for axis in axes for word in ("--set", axis)]
    names = [word for name in size.backends for word in ("-i", name)]
    growth = step("growth", "run", "growth", *names, *shape, "--set", f"seq_len={lengths}", limit_s=240, group="memory")
    traces = [
        step(f"trace-{name}", "run", "profile", "-i", name, *shape, "--set", "seq_len=256", limit_s=120, group="traces")
        for name in size.backends
    ]
    return [
        (1, [step("versions", "versions", limit_s=60, group="machine")]),
        (1, planted),
        (size.at_once, kernels),
        (1, [step("tests", "tests", limit_s=900, group="tests")]),
        (1, gauges),
        (1, checks),
        (1, times),
        (1, [growth, *traces]),
    ]
