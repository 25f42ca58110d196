import random

from attnbench.storage.memory_events import MemoryEvent, held, largest, timeline


def events(*sizes: int) -> list[MemoryEvent]:
    return [MemoryEvent(size, f"op{place}") for place, size in enumerate(sizes)]


def test_what_is_held_is_the_running_sum():
    assert held(events(8, 4, -8, 2)) == [8, 12, 4, 6]


def test_the_largest_allocations_are_found_in_the_order_of_time():
    assert largest(events(1, 9, -9, 4, 7), 2) == [1, 4]
    assert largest(events(-1), 2) == []


def test_a_short_timeline_is_left_as_it_is():
    found = timeline(events(8, 4, -8), most=3)
    assert list(found.events) == events(8, 4, -8)
    assert (found.num_events, found.peak_bytes) == (3, 12)
    assert timeline([]).peak_bytes == 0


def test_a_long_timeline_keeps_its_peak_its_end_and_the_largest_operators():
    draws, made, now = random.Random(0), [], 0
    for _ in range(5000):
        change = draws.randint(-min(now, 50), 60)
        now += change
        made.append(change)
    made[2517] += 100_000  # inside a stretch, and gone at once
    made[2518] -= 100_000
    whole = events(*made)
    found = timeline(whole, most=200)
    assert len(found.events) <= 200 < found.num_events == 5000
    assert found.peak_bytes == max(held(whole))
    assert held(found.events)[-1] == held(whole)[-1]
    assert found.events[largest(found.events, 1)[0]].operator == "op2517"
