"""What the doctor says of hosts: each one's facts, and every difference that would make them incomparable."""

import msgspec

from attnbench.cluster.comparing import COLUMNS, differences, row
from attnbench.cluster.examining import Examined, Found
from attnbench.workloads.workload import Workload
from tests import journals

NOISE = Found(name="noise floor", value="the same code twice differs by up to 0.50%")


def examined(*findings: Found, **changes) -> Examined:
    environment = msgspec.structs.replace(journals.ENVIRONMENT, **changes)
    return Examined(
        environment=environment, findings=(NOISE, *findings), ceilings=(journals.ceilings(Workload(device="cpu")),)
    )


def test_a_row_says_kind_ceilings_noise_versions_and_clocks():
    cells = dict(zip(COLUMNS, row("one", examined(clocks={"governor": "performance"}), 0.25), strict=True))
    assert "Example CPU" in cells["kind"]
    assert "TFLOP/s" in cells["matrix product and copy, float32"]
    assert "0.50%" in cells["noise"]
    assert "torch 2.13.0" in cells["versions"]
    assert cells["clocks"] == "governor performance; +0.25 s apart from here"


def test_hosts_that_are_alike_are_comparable():
    hosts = {"one": examined(load=0.1), "two": examined(load=3.0)}
    assert differences(hosts, dict.fromkeys(hosts, 0.0)) == []


def test_every_difference_is_named_with_its_hosts():
    other = journals.ENVIRONMENT.versions | {"torch": "2.12.0"}
    hosts = {
        "one": examined(),
        "two": examined(cpu="another", versions=other),
        "three": examined(versions=journals.ENVIRONMENT.versions | {"cuda": "13.0"}),
    }
    lines = differences(hosts, dict.fromkeys(hosts, 0.0))
    assert len(lines) == 3
    assert any(line.startswith("cpu differs") and "another on two" in line for line in lines)
    assert any("versions.torch differs" in line and "2.12.0 on two" in line for line in lines)
    assert any("versions.cuda differs" in line and "13.0 on three; none on one, two" in line for line in lines)


def test_noise_and_clocks_that_are_apart_are_said():
    noisy = Found(name="noise floor", value="9%", advice="smaller differences cannot be detected")
    lines = differences({"one": examined(noisy), "two": examined()}, {"one": 0.0, "two": 5.0})
    assert lines == [
        "one, noise floor: smaller differences cannot be detected",
        "two: its clock is +5.0 s apart from here",
    ]
