"""The steps of a run on a GPU, in order and with time limits, and the smaller steps of a rehearsal on the CPU."""

from dataclasses import dataclass

from studies.gpu.steps import Step

CHECKS = {
    "check": (),
    "check-tf32": ("--set", "float32_matmul_precision=high", "--set", "direction=forward_backward"),
    "check-compiled": ("-i", "fused+compile"),
}
BACKENDS = ("sdpa", "sdpa_cudnn", "sdpa_flash", "flex")
PAGED = ("torch_varlen_paged", "flashinfer_paged", "paged_gather")
"""Implementations over pages, which are checked in bfloat16 on every batch of `attnbench check`, and timed on one."""
GAUGES = ("kernel_sum", "cold_caches", "heat_up", "flush", "graph_mode")
"""Functions of studies/acceptance/on_cuda.py: the tests G1 to G5."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """The contents of a run: the device, shapes, implementations and checks, and options of `attnbench run`."""

    device: str
    widths: tuple[int, ...]
    lengths: tuple[int, ...]
    backends: tuple[str, ...]
    heads: str  # batch size, heads and key/value heads, with commas
    masks: tuple[str, ...] = ("none", "causal")
    paged: tuple[str, ...]
    batch: tuple[str, ...]  # options of the timed batch of requests
    check_sets: tuple[str, ...]
    checks: tuple[str, ...]
    run_options: tuple[str, ...]
    planted: tuple[str, ...] = ()


def full() -> Size:
    """Return the contents of a run on a GPU, which takes about forty minutes."""
    return Size(
        device="cuda",
        widths=(128, 64),
        lengths=(2048, 4096, 8192, 16384),
        backends=BACKENDS,
        heads="2,64,8",
        paged=PAGED,
        batch=("--set", "batch=2q2k_32q1kv4k", "--set", "page_size=256", "--set", "num_heads=32", "--budget", "60"),
        check_sets=("--set", "device=cuda"),
        checks=tuple(CHECKS),
        run_options=("--sweep", "gpu", "--budget", "150", *(word for name in BACKENDS for word in ("-i", name))),
    )


def rehearsal() -> Size:
    """Return the contents of a rehearsal on the CPU: every kind of step with small sizes, and two planted failures."""
    small = ("--set", "seq_len=16", "--set", "num_heads=2", "--set", "head_dim=8", "--set", "batch_size=1")
    return Size(
        device="cpu",
        widths=(8,),
        lengths=(16, 32),
        backends=("sdpa",),
        heads="1,2,1",
        paged=("paged_gather", "paged_loop"),
        batch=("--set", "batch=2q1kv20", "--set", "page_size=16", "--set", "num_heads=2", "--budget", "0.5"),
        masks=("causal",),
        check_sets=("-i", "sdpa", "--set", "device=cpu", *small),
        checks=("check-tf32",),
        run_options=("-i", "sdpa", "-i", "fused", "--budget", "0.5", "--set", "device=cpu", *small),
        planted=("hang", "die"),
    )


def steps(size: Size) -> list[Step]:
    """List the steps of a run in the order in which they are started."""
    where, heads = size.device, size.heads
    lengths, backends = ",".join(map(str, size.lengths)), ",".join(size.backends)

    def step(name: str, work: str, *given: str, limit_s: float) -> Step:
        return Step(name=name, work=work, given=given, limit_s=limit_s)

    planted_limits_s = {"hang": 1.5, "die": 60.0}
    planted = [step(f"planted-{each}", each, limit_s=planted_limits_s[each]) for each in size.planted]
    gauges = [step(f"gauge-{name}", "gauge", where, name, limit_s=180) for name in GAUGES]
    checks = [step(name, "check", *size.check_sets, *CHECKS[name], limit_s=240) for name in size.checks]
    checks.append(step("run", "run", "run", *size.run_options, limit_s=300))
    times = [
        step(
            f"{direction}-{width}-{mask}",
            "times",
            *(where, direction, mask, str(width), lengths, heads, backends),
            limit_s=240,
        )
        for direction in ("inference", "backward")
        for width in size.widths
        for mask in size.masks
    ]
    pages = _of_pages(size)
    batch, num_heads, groups = heads.split(",")
    axes = ["scope=attention", f"batch_size={batch}", f"num_heads={num_heads}", f"num_kv_heads={groups}", "mask=causal"]
    axes += [f"device={where}", "dtype=bfloat16", "head_dim=64", "direction=forward_backward"]
    shape = [word for axis in axes for word in ("--set", axis)]
    traces = [
        step(f"trace-{name}", "run", "profile", "-i", name, *shape, "--set", "seq_len=256", limit_s=120)
        for name in size.backends
    ]
    return [
        step("versions", "versions", limit_s=60),
        *planted,
        step("tests", "tests", limit_s=900),
        *(*pages, *gauges, *checks, *times, *traces),
    ]


def _of_pages(size: Size) -> list[Step]:
    """List a check in bfloat16 of each implementation over pages, and one run that times all of them together."""
    on, half = ("--set", f"device={size.device}"), ("--set", "dtype=bfloat16", "--set", "head_dim=64")
    checks = [
        Step(name=f"pages-{name}", work="check", given=("-i", name, "--sweep", "check_pages", *on), limit_s=120)
        for name in size.paged
    ]
    names = [word for name in size.paged for word in ("-i", name)]
    return [*checks, Step(name="pages-run", work="run", given=("run", *names, *on, *half, *size.batch), limit_s=240)]
