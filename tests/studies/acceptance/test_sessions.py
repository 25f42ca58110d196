"""Acceptance sessions: their rows, resumption, and faults counted as misses."""

import dataclasses
import json
import math
import os
import sys
from functools import partial
from pathlib import Path

import pytest

from studies import first_answer, frame
from studies.acceptance import __main__ as acceptance
from studies.acceptance import absolute, sessions


def row(verdict, **more):
    return {"session": 0.0, "verdict": verdict, "alike": 1.0, "load": 1.0, **more}


@pytest.mark.parametrize(
    ("judge", "rows", "passes"),
    [
        (acceptance._same, [row("undecided")] * 20, True),
        (acceptance._same, [row("undecided")] * 19 + [row("undecided", alike=0.0)], False),
        (acceptance._same, [row("slower")] * 2 + [row("equivalent")] * 18, False),
        (acceptance._identical, [row("faster"), row("equivalent")], True),
        (acceptance._identical, [row("slower"), row("equivalent")], False),
        (partial(acceptance._planted, least=0.8), [row("slower")] * 8 + [row("undecided")] * 2, True),
        (partial(acceptance._planted, least=0.8), [row("slower")] * 7 + [row("undecided")] * 3, False),
        (partial(acceptance._planted, least=0.8), [row("slower")] * 9 + [row("equivalent")], False),
        (acceptance._neighbours, [row("slower", off=0.05, is_warned=0.0)], True),
        (acceptance._neighbours, [row("undecided", off=2.0, is_warned=1.0)], True),
        (acceptance._neighbours, [row("slower", off=2.0, is_warned=1.0)], False),
        (acceptance._neighbours, [row("undecided", off=2.0, is_warned=0.0)], False),
        (acceptance._covered, [row("slower", share=0.03, low=1.01, high=1.05)] * 20, True),
        (acceptance._covered, [row("slower", share=0.03, low=1.01, high=1.02)] * 20, False),
        (acceptance._covered, [row("none", share=0.03)], False),
        (acceptance._honest, [row("undecided", status="ok")], True),
        (acceptance._honest, [row("undecided", status="ok"), row("none", status="invalid")], False),
    ],
)
def test_rows_pass_or_miss(judge, rows, passes):
    assert judge(rows)[1] is passes


@pytest.mark.parametrize(
    ("share", "own_log", "alarms", "passes"),
    [(0.0, 0.001, 0.0, True), (0.0, 0.1, 0.0, False), (0.0, 0.001, 1.0, False), (0.05, 0.05, 1.0, True)],
)
def test_ours_must_not_be_worse_than_a_rival(share, own_log, alarms, passes):
    rows = [
        {"session": 0.0, "tool": "attnbench", "statistic": "ratio", "log": own_log},
        {"session": 0.0, "tool": "attnbench", "rule": "verdict", "alarms": alarms},
        {"session": 0.0, "tool": "pyperf", "statistic": "mean", "log": 0.02},
        {"session": 0.0, "tool": "pyperf", "rule": "t test", "alarms": 1.0},
    ]
    assert acceptance._against_rivals(rows, is_planted=bool(share))[1] is passes


@pytest.mark.parametrize(("verdict", "passes"), [("slower", True), ("undecided", False), ("faster", False)])
def test_the_quick_sweep_must_decide_each_large_difference_rightly(verdict, passes):
    rows = [
        {"session": float(session), "cell": cell, "ratio": ratio, "verdict": decided, "elapsed_s": 200.0}
        for session in range(3)
        for cell, ratio, decided in (("far", 1.5, verdict), ("near", 1.15, "slower"), ("same", 1.01, "equivalent"))
    ]
    assert sessions.true_ratios(rows)["far"] == pytest.approx(math.log(1.5))
    assert acceptance._quick(rows)[1] is passes


@pytest.mark.parametrize(
    ("way", "off", "passes"),
    [("fixture", 1.04, True), ("fixture", 1.2, False), ("plain again", 1.2, False), ("none", 1, False)],
)
def test_each_way_must_give_the_time_of_a_plain_loop(way, off, passes):
    seconds = dict.fromkeys(absolute.WAYS, 1.0) | {way: off}
    names = ("sdpa", "fused", "mine")
    session = [{"session": 0, "way": each, "seconds": dict.fromkeys(names, seconds[each])} for each in absolute.WAYS]
    if way == "none":
        session[-1]["seconds"] = {}
    assert absolute.judge(session * 3)[1] is passes


@pytest.mark.parametrize(("calls", "alike"), [((4, 4), True), ((4, 8), False)])
def test_arms_with_other_numbers_of_calls_are_not_alike(calls, alike):
    arms = [
        {"arm": {"implementation": name}, "samples": [[1e-3, number, 0]]}
        for name, number in zip(("one", "other"), calls, strict=True)
    ]
    probe = {"arm": {"role": "probe"}, "samples": [[1e-4, 1, 0]]}
    assert sessions._is_alike({"arms": [*arms, probe]}) is alike


def test_sessions_go_on_where_they_were_stopped_and_the_page_names_what_misses(tmp_path):
    taken = []

    def take(number):
        taken.append(number)
        return [row("slower")]

    test = acceptance.TESTS["V4 same, 1 busy"]
    test = dataclasses.replace(test, number=3, seconds=120, take=take, judge=acceptance._identical)
    path = frame.file_of(tmp_path, test.id)
    frame.save(path, json.dumps([row("undecided")]) + "\n" + '[{"cut off": ')
    assert "\n2 minutes in all" in acceptance.costs([test], tmp_path, 2, None)
    frame.complete(acceptance.pieces(test), tmp_path)
    assert taken == [1, 2]
    assert [one["verdict"] for one in frame.rows(tmp_path, test.id)] == ["undecided", "slower", "slower"]
    text = acceptance.page(tmp_path, "a machine")
    assert "MISS" in text
    assert "Not run: V1" in text


def test_sessions_of_an_older_tree_have_a_row_of_their_own_in_the_table(tmp_path):
    def take(number, tree=None):
        return [row("slower" if tree == tmp_path / "harness" else "equivalent")]

    test = dataclasses.replace(acceptance.TESTS["V4 same, 1 busy"], number=2, take=take, judge=acceptance._identical)
    frame.complete(acceptance.pieces(test, tmp_path), tmp_path)
    assert acceptance.outcome(test, tmp_path).passes
    assert not acceptance.outcome(test, tmp_path, acceptance.OLD).passes
    assert "V4 same, 1 busy, older" in acceptance.table(tmp_path)


@pytest.mark.long
def test_each_kind_of_session_gives_the_rows_that_its_judge_reads(monkeypatch):
    """Each once read a format that the commands no longer printed, and no test ran it."""
    slowed = sessions.compare(3, share=1.0, budget_s=40.0)
    assert (slowed["verdict"], slowed["alike"]) == ("slower", 1.0)
    assert slowed["processes"] >= 4
    for by_fixture in (False, True):
        judged = acceptance._neighbours([sessions.neighbour(1, num_busy=0, num_threads=1, by_fixture=by_fixture)])
        assert "neither" in judged[0]
    assert acceptance._honest([sessions.honest(1, num_busy=0)])[1]
    assert "attnbench" in acceptance._against_rivals(sessions.rivals(1, share=1.0, budget_s=2.0), is_planted=True)[0]
    monkeypatch.setattr(absolute, "BUSY_SHARE", 1.0)  # the tests themselves keep the machine busy
    seconds = {row["way"]: set(row["seconds"]) for row in absolute.session(1, num_threads=1, seq_len=64)}
    assert seconds == {way: {"sdpa", "fused", "mine"} for way in absolute.WAYS}


STARTS = {
    "a session of acceptance": lambda folder: sessions.run_python(["-c", "pass"], folder),
    "a command that is timed": lambda _: first_answer.timed("sdpa", first_answer.ROOT),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_what_was_added_to_the_path_of_modules_is_passed_on(start, tmp_path, monkeypatch):
    noted = tmp_path / "noted"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nprintf %s "$PYTHONPATH" > {noted}\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "dependencies"))
    start(tmp_path)
    folders = noted.read_text(encoding="utf-8").split(os.pathsep)
    assert "harness" in folders[0] or Path(folders[0], "attnbench").is_dir()
    assert folders[1:][-1:] == [str(tmp_path / "dependencies")]
