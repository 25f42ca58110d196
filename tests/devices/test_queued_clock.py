"""The clock of a device with queues, on a simulated timeline: hidden and visible work, and planted faults."""

import pytest

from attnbench.devices.queued import LONGEST_SPIN_S, QueuedClock
from attnbench.storage.records import Arm, Flag
from attnbench.timing import blocks
from studies.simulated.timeline import SimulatedRuntime


def made(**settings) -> tuple[QueuedClock, SimulatedRuntime]:
    runtime = SimulatedRuntime(**settings)
    return QueuedClock(runtime, runtime.host_s), runtime


def repeated(runtime: SimulatedRuntime, seconds: float, number: int = 1):
    """Build a call of `number` kernels with this duration each."""

    def call() -> None:
        for _ in range(number):
            runtime.launch(seconds)

    return call


@pytest.mark.one_in(3)
@pytest.mark.parametrize("num_kernels", [1, 40, 900])
@pytest.mark.parametrize("num_calls", [1, 64, 1500])
def test_short_kernels_are_timed_without_the_launches_that_take_longer(num_kernels, num_calls):
    """900 kernels a call fill the launch queue with the second call: fewer calls fit behind one block."""
    clock, runtime = made(launch_s=20e-6)
    seen = clock.read(repeated(runtime, 2e-6, num_kernels), num_calls)
    assert seen.elapsed_s == pytest.approx(num_calls * num_kernels * 2e-6)
    assert seen.host_s == pytest.approx(num_calls * num_kernels * 20e-6)
    assert Flag(seen.flags) == Flag.host_bound


@pytest.mark.parametrize(
    ("device_s", "flag"), [(0.9, Flag.host_bound), (1.1, Flag.host_near), (4.9, Flag.host_near), (5.1, Flag(0))]
)
def test_a_call_is_host_bound_below_the_host_time_and_nearly_below_five_times_it(device_s, flag):
    clock, runtime = made(launch_s=10e-6)
    assert Flag(clock.read(repeated(runtime, device_s * 10e-6), 10).flags) == flag


def test_a_host_that_is_slower_than_before_gets_a_longer_block():
    clock, runtime = made()
    call = repeated(runtime, 10e-6)
    clock.read(call, 50)
    runtime.launch_s = 300e-6
    seen = clock.read(call, 50)
    assert seen.elapsed_s == pytest.approx(50 * 10e-6)
    assert Flag(seen.flags) == Flag.host_bound


def test_a_spin_that_is_too_short_is_seen_and_ends():
    """Planted: spins last a thousandth of the request."""
    clock, runtime = made(launch_s=50e-6)
    _ = clock.cycles_per_s
    runtime.spin_share = 1e-4
    seen = clock.read(repeated(runtime, 10e-6), 20)
    assert seen.flags & Flag.not_hidden
    assert seen.flags & Flag.host_bound
    assert runtime.spent_s < 40 * LONGEST_SPIN_S


def test_a_call_that_synchronises_is_named_and_does_not_hang():
    clock, runtime = made()

    def call() -> None:
        runtime.launch(1e-3)
        runtime.wait()
        runtime.launch(1e-3)

    for _ in range(2):
        seen = clock.read(call, 4)
        assert Flag(seen.flags) & (Flag.waits | Flag.not_hidden) == Flag.waits | Flag.not_hidden
        assert seen.elapsed_s == pytest.approx(8e-3, rel=0.05)
    assert runtime.now_s < 4.0
    assert not clock.read(repeated(runtime, 1e-3), 4).flags  # others are unchanged


@pytest.mark.parametrize("main_s", [0.0, 50e-6])
def test_work_that_is_left_on_another_stream_is_seen(main_s):
    clock, runtime = made()

    def leaves() -> None:
        runtime.launch(main_s)
        runtime.launch(400e-6, stream=1)

    def joins() -> None:
        leaves()
        runtime.ends_s[0] = max(runtime.ends_s[0], runtime.ends_s[1])
        runtime.launch(50e-6)

    assert clock.inspect(leaves) == Flag.other_stream
    assert clock.inspect(joins) == Flag(0)
    assert clock.inspect(repeated(runtime, 1e-3)) == Flag(0)


def test_a_driver_that_is_slow_to_find_an_idle_device_is_no_work_on_another_stream():
    clock, runtime = made(notice_s=60e-6)
    call = repeated(runtime, 1e-3)
    assert not Flag(clock.read(call, 4).flags) & Flag.other_stream
    assert clock.inspect(call) == Flag(0)  # it knows the usual time of the driver now
    runtime.notice_s = 500e-6  # as after long calls
    assert clock.inspect(repeated(runtime, 4e-3)) == Flag(0)


def test_what_two_events_cost_is_no_part_of_a_cold_call():
    clock, runtime = made(event_s=3e-6)
    cold = clock.read(lambda: runtime.touch(10e-6, 30e-6), 8, runtime.flush)
    assert cold.elapsed_s == pytest.approx(8 * 30e-6)
    clock.read(lambda: runtime.touch(10e-6, 30e-6), 1)
    hot = clock.read(lambda: runtime.touch(10e-6, 30e-6), 8)
    assert hot.elapsed_s == pytest.approx(8 * 10e-6)


def test_samples_of_a_visit_carry_host_time_and_flags():
    clock, runtime = made()

    def leaves_work() -> None:
        runtime.launch(1e-4)
        runtime.launch(400e-6, stream=1)

    calls = {"busy": repeated(runtime, 1e-3), "short": repeated(runtime, 2e-6), "leaves": leaves_work}
    arms = [blocks.TimedCall(arm=Arm(implementation=name), call=call) for name, call in calls.items()]
    taken = blocks.visit(arms, clock, blocks.Visit(epoch=0, number=0, num_blocks=3, seed=1))
    busy, short, leaves = taken.values()
    assert {each.flags for each in busy} == {0}
    assert [each.host_s for each in busy] == pytest.approx([5e-6] * 3)
    assert {each.flags for each in short} == {Flag.host_bound}
    assert [each.value for each in short] == pytest.approx([2e-6] * 3)
    assert all(each.flags & Flag.other_stream for each in leaves)


def test_a_graph_of_many_short_kernels_is_no_longer_host_bound():
    """40 kernels of 10 us, each 20 us to launch on the host: their device time is the same."""
    clock, runtime = made(launch_s=20e-6)
    call = repeated(runtime, 10e-6, 40)
    eager, graph = clock.read(call, 8), clock.read(runtime.captured(call), 8)
    assert [each.elapsed_s for each in (eager, graph)] == pytest.approx([8 * 40 * 10e-6] * 2)
    assert (Flag(eager.flags), Flag(graph.flags)) == (Flag.host_bound, Flag(0))
    assert graph.host_s == pytest.approx(8 * 20e-6)


@pytest.mark.parametrize("slower", [1.0, 1.25])
def test_the_blocks_of_a_visit_are_a_clock_of_the_device(slower):
    """The driver's reading is of an idle moment; a spin has a number of cycles, whatever they take."""
    clock, runtime = made()
    call = repeated(runtime, 50e-6)
    clock.read(call, 4)
    clock.clock_hz()
    runtime.spin_share = slower
    clock.read(call, 4)
    assert clock.clock_hz() == pytest.approx(1e9 / slower)
    assert clock.clock_hz() == 0.0  # nothing since


def test_a_spin_that_the_host_queued_too_late_is_no_clock():
    clock, runtime = made()
    _ = clock.cycles_per_s, clock.floor_s
    runtime.launch_s = 300e-6  # the device idles between the spins
    clock.read(repeated(runtime, 50e-6), 1)
    assert clock.clock_hz() == 0.0


@pytest.mark.parametrize(("kernel_s", "flags"), [(1e-3, Flag(0)), (2e-6, Flag.not_hidden | Flag.host_bound)])
def test_without_a_spin_short_calls_are_as_long_as_their_launches_and_say_so(kernel_s, flags):
    clock, runtime = made(event_s=0.0, can_spin=False)
    seen = clock.read(repeated(runtime, kernel_s), 20)
    assert seen.flags == flags
    assert seen.elapsed_s == pytest.approx(20 * max(kernel_s, 5e-6), rel=0.1)
    assert seen.host_s == pytest.approx(20 * 5e-6)


def test_without_a_spin_a_flush_is_outside_of_the_span():
    clock, runtime = made(event_s=0.0, launch_s=1e-6, can_spin=False)
    cold = clock.read(lambda: runtime.touch(40e-6, 90e-6), 4, runtime.flush)
    assert cold.elapsed_s == pytest.approx(4 * 90e-6, rel=0.05)
