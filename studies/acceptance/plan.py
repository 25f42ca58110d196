"""What each test asks and how long it takes: limits and sizes, all of them fixed before anything runs.

The full form is what METHOD asks for; the short one, about 15 minutes on two cores, says less and is marked so.
"""

from dataclasses import dataclass, replace

from studies.acceptance.outcome import LABELS, Outcome

# ---- limits --------------------------------------------------------------------------------------------------------

ALPHA = 0.05
AA_RMS = 0.005
AA_SHARE_OF_RIVAL = 0.1
POWER_LIMITS = {0.05: (0.95, 5.0), 0.02: (0.90, 20.0)}
"""By injected slowdown: the share that must be found, and within how many seconds."""
EFFECT = 0.05
"""The slowdown of T6, and of the pictures."""
DECIDE_S = 1.0
DECIDE_SHARE_OF_RIVAL = 0.2
DECIDE_POWER = 0.95
REPEAT_SD = 0.015
REPEAT_SHARE_OF_RIVAL = 1 / 3
COVERAGE = (0.93, 0.98)
INVARIANCE_ERRORS = 1.0
OVERHEAD = 0.01
CALLED_SHARE = 0.70
KILLS = 50
SMALL_EFFECT, SMALL_S, SMALL_FOUND, SMALL_FALSE_SHARE = 0.01, 60.0, 0.90, 0.001
"""The slowdown of T18, within how many seconds it is to be found, and in what share of sessions; and in what share of
sessions of identical code its verdicts may be false."""
SMALL_SESSIONS = {"same": 60, "slower": 40}
"""Its real sessions: identical code, in none of which anything may be called faster or slower, and the slowdown."""
GATE_S = 120.0
GATE_WRONG = 0.05
GATE_FOUND = 0.95
"""Of sessions of two revisions, 16 cells in two minutes: how many may alarm for nothing, and must find a slowdown."""

# ---- sizes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much of a test is done. What does not apply to a test is left at its default."""

    num_pieces: int = 1  # each in a fresh process
    piece_s: float  # a guess, for the time left
    num_cells: int = 0
    compare_s: float = 0.0  # of one comparison by one tool
    num_repeats: int = 1  # inside a piece; in T5, of an extra head
    num_rivals: int = 0  # pieces in which the rivals take part
    ladder_s: tuple[float, ...] = ()  # budgets that the rivals are given


SHORT = {
    "aa_error": Size(num_pieces=2, piece_s=55, num_cells=8, compare_s=2.0, num_rivals=1),
    "false_alarms": Size(num_pieces=1, piece_s=25, num_cells=8, compare_s=0.5, num_repeats=5),
    "power": Size(num_pieces=2, piece_s=65, num_cells=2, num_rivals=2),
    "time_to_verdict": Size(num_pieces=2, piece_s=35, num_repeats=3, ladder_s=(1.0, 5.0)),
    "repeatability": Size(num_pieces=18, piece_s=6, compare_s=2.0),  # six for each session
    "coverage": Size(num_pieces=12, piece_s=6, compare_s=2.0, num_repeats=40),
    "busy_neighbour": Size(piece_s=20, compare_s=0.5, num_repeats=8),
    "order_and_names": Size(piece_s=15, compare_s=1.0, num_repeats=10),
    "kills": Size(piece_s=75, num_repeats=5),
    "overhead": Size(piece_s=10, num_repeats=300),
    "called_share": Size(piece_s=290),
    "small_slowdown": Size(num_pieces=1, piece_s=30, num_cells=16, compare_s=SMALL_S),
    "small_slowdown_simulated": Size(piece_s=20),
    "many_cells": Size(piece_s=70),
}
OFTEN = (0.5, 1.0, 2.0) * 4 + (5.0, 10.0)
"""Budgets in each of T6's six pieces. A threshold at 5 % false alarms takes twenty comparisons of identical code: the
largest of six lets one in seven pass, and then makes out of eleven statistics a best one that is not."""
FULL = {
    "aa_error": Size(num_pieces=25, piece_s=60, num_cells=16, compare_s=2.0, num_rivals=2),
    "false_alarms": Size(num_pieces=0, piece_s=0),  # the 400 comparisons of T1
    "power": Size(num_pieces=4, piece_s=200, num_cells=8, num_repeats=4, num_rivals=2),
    "time_to_verdict": Size(num_pieces=6, piece_s=160, num_repeats=6, ladder_s=OFTEN),
    "repeatability": Size(num_pieces=120, piece_s=9.5, compare_s=6.0),
    "coverage": Size(num_pieces=60, piece_s=15, compare_s=11.0, num_repeats=200),
    "busy_neighbour": Size(num_pieces=4, piece_s=50, compare_s=1.0, num_repeats=10),
    "order_and_names": Size(piece_s=105, compare_s=5.0, num_repeats=20),
    "kills": Size(piece_s=350, num_repeats=KILLS),
    "overhead": Size(piece_s=40, num_repeats=3000),
    "called_share": Size(piece_s=330),
    "small_slowdown": Size(
        num_pieces=SMALL_SESSIONS["same"],
        piece_s=60,
        num_cells=16,
        compare_s=SMALL_S,
        num_repeats=SMALL_SESSIONS["slower"],
        num_rivals=3,
    ),
    "small_slowdown_simulated": Size(piece_s=250),
    "many_cells": Size(piece_s=70),
}
ON_CUDA = {
    "kernel_sum": Size(piece_s=15),
    "cold_caches": Size(piece_s=10),
    "heat_up": Size(piece_s=60),
    "flush": Size(piece_s=10),
    "graph_mode": Size(piece_s=15),
}
"""Alike in both forms."""
GATE_SHORT = dict.fromkeys(
    ("same_code", "slowdown", "same_code_apart", "slowdown_apart"), Size(num_pieces=2, piece_s=135, compare_s=GATE_S)
)
GATE_SESSIONS = {
    "same_code": 6,
    "slowdown": 6,
    "same_code_apart": 20,
    "slowdown_apart": 20,
}  # more where each side has processes of its own
GATE_FULL = {test: replace(size, num_pieces=GATE_SESSIONS[test]) for test, size in GATE_SHORT.items()}
"""Sessions of two revisions; a test by itself (`-- gate`)."""
WHOLE = {
    "many_cells": "growth",
    "small_slowdown_simulated": "small",
    **dict.fromkeys(ON_CUDA, "on_cuda"),
}
"""Tests made by one function that gives the whole outcome, and its module."""
CAUSES = {
    "aa_error": "each cell is within its limit, or missed it in a noisy hour. In a calm hour a tenth of the best of "
    "eleven rival statistics, chosen afterwards, is less than two seconds allow: our comparisons print "
    "standard errors of 0.10 to 0.24 % by cell (9091618). Tried without success: winsorized visits, "
    "retained memory, Huber's estimate, the median of all pairs",
    "time_to_verdict": "a block is four samples, each after an untimed call: 8 ms for a millisecond operation in calm "
    "minutes, 15 ms in others. Half of the verdicts take a third of a second; the last ones wait for an "
    "interval. Tried: retained memory (a third less)",
    "repeatability": "a third of the best of ten rival statistics, chosen afterwards, is less than the ratio itself "
    "moves: "
    "processes of one session differ by 1.35 % (a standard deviation; d9b8937), as each lays out memory "
    "differently, and six are averaged; the rest is from session to session. Tried: retained memory, "
    "which halved the spread of four sessions; one, three and six processes in a session",
}
"""Of misses that were looked into, and what was tried against them."""
COMPARED_IN_FULL = 400  # by T2


def sizes(*, short: bool) -> dict[str, Size]:
    """By test."""
    return (SHORT | GATE_SHORT if short else FULL | GATE_FULL) | ON_CUDA


def largest_count(number: int) -> int:
    """So many alarms of `number` are exceeded with a chance of 5 % where each comes with 5 %: 27 of 400, say."""
    from scipy.stats import binom

    return int(binom.ppf(1 - ALPHA, number, ALPHA))


def missing(test: str, title: str, limit: str, cause: str, *, short: bool) -> Outcome:
    """The outcome of a test that found nothing: a miss."""
    return Outcome(
        id=LABELS[test], title=title, limit=limit, found="nothing", passes=False, is_short=short, cause=cause
    )
