"""Implementations that misbehave, each in another way, for tests that a run survives them."""

import os
import signal
import time
from pathlib import Path

import torch


def right(query, key, value, *, mask=None):
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ value


def wrong(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask) * 1.01


def raising(query, key, value, *, mask=None):
    raise RuntimeError("I do not feel like it\nat all")


def not_a_number(query, key, value, *, mask=None):
    return right(query, key, value, mask=mask) / 0.0 * 0.0


def crashing(query, key, value, *, mask=None):
    if query.shape[2] == 32:
        os.kill(os.getpid(), signal.SIGSEGV)
    return right(query, key, value, mask=mask)


def hanging(query, key, value, *, mask=None):
    if query.shape[2] == 32:
        time.sleep(3600)
    return right(query, key, value, mask=mask)


def greedy(query, key, value, *, mask=None):
    if query.shape[2] == 32:
        torch.empty(2**50)
    return right(query, key, value, mask=mask)


def talking(query, key, value, *, mask=None):
    print('{"type": "visited", "arms": {}}', flush=True)  # noqa: T201 - that is its lie
    return right(query, key, value, mask=mask)


def slow(query, key, value, *, mask=None):
    time.sleep(0.004 * query.shape[2])
    return right(query, key, value, mask=mask)


COUNTERS = Path(os.environ.get("LIARS_COUNTERS", "/nonexistent"))


def is_past_its_check(name, query):
    """Whether all processes together have called the function more often than checks and untimed passes do."""
    if not COUNTERS.exists() or query.shape[2] != 32:
        return False
    counter = COUNTERS / name
    calls = int(counter.read_text()) + 1 if counter.exists() else 1
    counter.write_text(str(calls))
    return calls > 60


def dying_later(query, key, value, *, mask=None):
    """Right in the check, and dies during timing."""
    if is_past_its_check("dying_later", query):
        os._exit(3)
    return right(query, key, value, mask=mask)


KNOWN = {}


def remembering(query, key, value, *, mask=None):
    """Right the first time it sees a tensor; later it answers from memory, whatever the tensor now holds."""
    place = query.data_ptr(), query.shape
    if place not in KNOWN:
        KNOWN[place] = right(query, key, value, mask=mask)
    return KNOWN[place]


def lazy(query, key, value, *, mask=None):
    """Right during the check; later it returns the values without work."""
    return value if is_past_its_check("lazy", query) else right(query, key, value, mask=mask)


def greedy_for_threads(query, key, value, *, mask=None):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return right(query, key, value, mask=mask)


BUFFER = {}


def one_buffer(query, key, value, *, mask=None):
    """Right, but every answer uses the same memory."""
    out = right(query, key, value, mask=mask)
    return BUFFER.setdefault(out.shape, torch.empty_like(out)).copy_(out)


def multiples_of_32(query, key, value, *, mask=None):
    """A kernel that supports only lengths that are multiples of 32; it is right there."""
    assert query.shape[2] % 32 == 0, "length must be a multiple of 32"
    return right(query, key, value, mask=mask)


HELD = {}


def idle(query, key, value, *, mask=None):
    """Right for all inputs, but it recomputes only if they have changed: only its time reveals it."""
    tensors = (query, key, value)
    held = tuple((t.data_ptr(), t._version, t.stride(), t.shape, t.sum().item()) for t in tensors)
    if held not in HELD:
        HELD[held] = right(query, key, value, mask=mask), tensors  # kept alive, so that their memory is not reused
    return HELD[held][0]
