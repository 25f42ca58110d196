"""`attnbench doctor`: check whether this machine or a cluster is fit for measurements."""

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnbench.commands import Command, ExitCode, running
from attnbench.commands.frame import present
from attnbench.commands.terminal import print_table
from attnbench.console import say
from attnbench.devices import containers, device, names
from attnbench.statistics.effects import numbers
from attnbench.statistics.interference import MANY
from attnbench.statistics.verdict import effect
from attnbench.storage.records import Arm
from attnbench.units import grouped, show

if TYPE_CHECKING:
    from attnbench.timing.functions import FunctionComparison

BUSY_SHARE = 0.3  # share of busy processors above which there is advice
STEAL_PERCENT = 1.0  # percent of time stolen by the hypervisor above which there is advice
NOISY_SHARE = 0.02  # relative difference between times of identical code above which there is advice
AGAIN, AGAIN_S = "the same again", 10.0  # name of the second of two identical functions; seconds of their comparison
SAME_ON_ALL = ("processor", "accelerator", "versions", "fingerprint", "threads", "thread and malloc settings")
"""Findings that must be equal on hosts whose times are compared."""
NOISE_ERROR = 0.05  # two-sided error probability of the interval of the noise floor
SPINNING = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "inf", "KMP_BLOCKTIME": "inf"}
"""Environment variables that keep idle threads spinning forever if their values begin with these texts."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fact about the machine; `advice` is empty if nothing needs to be done."""

    name: str
    value: str
    advice: str = ""


def examine() -> list[Finding]:
    """Examine this machine for 15 to 60 seconds; return all findings, in the order in which they are printed."""
    import psutil

    from attnbench.devices import environment  # needs torch

    here, cores = environment.collect(), environment.usable_cores()
    governor = here.clocks.get("governor", "")
    busy = psutil.cpu_percent(interval=1.0) / 100
    load = "unknown" if here.load is None else f"{here.load:g}"
    spins = [name for name, start in SPINNING.items() if here.settings.get(name, "").lower().startswith(start)]
    values = {
        "processor": f"{here.cpu}, {here.cpu_capability}, {here.num_physical_cores} cores",
        "accelerator": here.accelerator or "none",
        "versions": ", ".join(f"{name} {value}" for name, value in here.versions.items()),
        "free memory": f"{show(containers.memory()[0], 'bytes')} of {show(here.memory_bytes, 'bytes')}",
        "fingerprint": here.fingerprint,
        "frequency governor": governor or "not visible here",
        "load": f"{busy:.0%} of {here.num_logical_cores or 1} cores busy, one-minute average {load}",
        "timer step": show(device("cpu").clock.resolution_s, "s"),
        "container": limits(),
        "threads": f"{here.num_threads} on {cores} usable cores",
        "thread and malloc settings": ", ".join(f"{n}={v}" for n, v in here.settings.items()) or "none set",
    }
    advice = dict[str, str]()
    if governor not in {"", "performance"}:
        advice["frequency governor"] = "clocks follow the load: set the governor to performance"
    if busy > BUSY_SHARE:
        advice["load"] = "other work is running: stop it, or expect wide intervals"
    if here.num_threads > cores:
        advice["threads"] = f"more threads than cores: unset OMP_NUM_THREADS, or set it to {cores}"
    if spins:
        why = "idle threads go on spinning and slow down the next timed call"
        advice["thread and malloc settings"] = f"{why}: unset {', '.join(spins)}"
    if hasattr(psutil.cpu_times(), "steal"):
        stolen = psutil.cpu_times_percent(interval=1.0).steal
        values["stolen by the host"] = f"{stolen:.1f} % of the time"
        if stolen > STEAL_PERCENT:
            advice["stolen by the host"] = "the host takes time away: measure elsewhere, or give --budget more"
    found = [Finding(name=name, value=value, advice=advice.get(name, "")) for name, value in values.items()]
    return [*found, noise_floor()]


def limits() -> str:
    """Describe the limits on processors and memory that cgroups and the affinity mask set; "no limits" without any."""
    import psutil

    quota, (free, whole) = containers.quota(), containers.memory()
    allowed, number = containers.affinity(), os.cpu_count() or 1
    texts = [f"{allowed} of {number} processors by the affinity mask"] if allowed < number else []
    texts += [f"{quota:g} processors by the cgroup"] if quota else []
    if whole < psutil.virtual_memory().total:
        texts.append(f"{show(whole, 'bytes')} of memory by the cgroup, {show(free, 'bytes')} of it free")
    return ", ".join(texts) or "no limits"


def noise_floor() -> Finding:
    """Measure the noise floor: time two identical functions in interleaved blocks, with as many threads as a run."""
    import torch

    from attnbench.timing.functions import FunctionComparison

    matrix = torch.randn(192, 192, generator=torch.Generator().manual_seed(0))
    probe = device("cpu").interference_probe(torch.get_num_threads())
    compared = FunctionComparison(dict.fromkeys(("one", AGAIN), lambda: matrix @ matrix), "one", gauge_work=probe)
    compared.run(AGAIN_S, stops=False)
    return judge_noise(compared)


def judge_noise(compared: "FunctionComparison") -> Finding:
    """Derive the finding `noise floor` from a comparison of identical code."""
    ratios = numbers(compared.samples, Arm(implementation=AGAIN), compared.reference, compared.discarded)
    noise = effect([*ratios.values()] or [0.0])
    width = math.expm1(abs(noise.log) + (noise.half_width(NOISE_ERROR) or 0.0))
    discarded, blocks = sum(map(len, compared.gauge.discarded.values())), compared.gauge.num_blocks
    disturbed = f", {discarded} of {blocks} blocks disturbed" if discarded else ""
    value = f"times of identical code differ by up to {width:.2%} (measured for {compared.spent_s:.1f} s{disturbed})"
    advice = "smaller differences cannot be detected: see what else is running" if width > NOISY_SHARE else ""
    if discarded > MANY * blocks:
        advice = "other work disturbs this machine: do not rely on times that are measured now"
    return Finding(name="noise floor", value=value, advice=advice)


def differences(hosts: Mapping[str, Iterable[Finding]]) -> list[str]:
    """List the differences that make times of hosts incomparable, and the advice for each host, as sentences."""
    lines = []
    for name in SAME_ON_ALL:
        values = {host: each.value for host, findings in hosts.items() for each in findings if each.name == name}
        members = grouped(values, values.__getitem__)
        if len(members) > 1:
            parts = "; ".join(f"{value} on {', '.join(alike)}" for value, alike in members.items())
            lines.append(f"{name} differs, so that times of these hosts are not comparable: {parts}")
    return lines + [
        f"{host}, {each.name}: {each.advice}" for host, findings in hosts.items() for each in findings if each.advice
    ]


def doctor(*, address: str = "") -> ExitCode:
    """Check in 15 to 60 seconds whether this machine is fit to measure: load, threads, timer, clocks and noise floor.

    Options:
        address (--cluster ADDRESS): Examine every host of a Ray cluster, and whether they are comparable. ADDRESS is
            auto or HOST:PORT.
    """
    if address:
        from attnbench.cluster import driver

        hosts, answers = dict[str, list[Finding]](), driver.examined(address)
        for host, answer in answers.items():
            failed = [Finding(name="examination", value="failed", advice=str(answer))]
            hosts[host] = failed if isinstance(answer, str) else [Finding(**each) for each in answer]
        lines = differences(hosts)
        facts: object = {"hosts": answers, "findings": lines}
    else:
        running.note_untried(name for name in names() if device(name).seems_present())
        hosts = {"here": examine()}
        lines = [each.advice for each in hosts["here"] if each.advice]
        facts = hosts["here"]

    def show_hosts() -> None:
        rows = [(host, each.name, each.value) for host, findings in hosts.items() for each in findings]
        print_table(("host", "property", "value"), rows)
        for line in lines or ["This machine is fit to measure."]:
            say(line)

    present(lambda: facts, show_hosts)
    return ExitCode.finding if lines else ExitCode.passed


COMMAND = Command(doctor, order=320)
