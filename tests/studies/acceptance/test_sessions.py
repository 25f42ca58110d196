"""Acceptance sessions: their rows, resumption, and faults counted as misses."""

import dataclasses
import json
import os
import shlex
import sys
from functools import partial
from pathlib import Path

import pytest

from studies import first_answer, frame
from studies.acceptance import __main__ as acceptance
from studies.acceptance import printed, sessions
from studies.acceptance.spent import spent


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
        (partial(acceptance._identical, least_equal=0.95), [row("equivalent")] * 19 + [row("undecided")], True),
        (partial(acceptance._identical, least_equal=0.95), [row("equivalent")] * 19 + [row("faster")], False),
        (partial(acceptance._identical, least_equal=0.95), [row("equivalent")] * 9 + [row("undecided")], False),
        (acceptance._against_loop, [row("slower", loop=1.034, low=1.03, high=1.04)] * 20, True),
        (acceptance._against_loop, [row("slower", loop=1.034, low=1.01, high=1.03)] * 20, False),
        (acceptance._against_loop, [row("undecided", loop=1.034, low=0.99, high=1.04)] * 20, False),
        (acceptance._honest, [row("undecided", kind="a", status="ok")], True),
        (acceptance._honest, [row("none", kind="a", status="ok"), row("none", kind="b", status="invalid")], False),
    ],
)
def test_rows_pass_or_miss(judge, rows, passes):
    assert judge(rows)[1] is passes


@pytest.mark.parametrize(("error", "passes"), [(0.001, True), (0.0011, True), (0.0013, False), (0.1, False)])
def test_the_error_is_that_of_the_plain_loop_and_below_those_of_all_tools(error, passes):
    logs = {("attnbench", "ratio"): error, ("plain loop", "ratio"): 0.001, ("pyperf", "mean"): 0.02}
    rows = [{"tool": tool, "statistic": name, "log": log} for (tool, name), log in logs.items()]
    assert acceptance._errors(rows)[1] is passes
    assert not acceptance._errors([*rows, {"tool": "pyperf", "statistic": "min", "log": 0.0}])[1]


@pytest.mark.parametrize(("samples", "passes"), [(6.0, True), (4.0, False)])
def test_at_least_half_of_the_time_of_a_run_is_spent_on_samples(samples, passes):
    found = {"samples": samples, "checks": 1.0, "run": 10.0, "timing": 8.0}
    words, result = acceptance._spending([{"spent": found, "command_s": 12.0}], least=0.5)
    assert result is passes
    assert f"{samples / 12:.0%} of the command" in words


def test_the_parts_of_a_run_add_up_to_its_time(tmp_path):
    """Two samples of 1 s, a control and a probe, between which 2 s pass in calls and 1 s elsewhere."""

    def taken(start_s, **arm):
        return {"arm": arm, "samples": [[0.5, 2, 0, 0, 0, 0, start_s, 0]]}

    control = taken(106.0, implementation="a", role="control")
    arms = [taken(100.0, implementation="a"), taken(103.0, implementation="b"), control, taken(107.0, role="probe")]
    events = [
        {"type": "cell_checked", "check_s": 1.5},
        {"type": "ceilings_measured", "spent_s": 0.5},
        {"type": "visit_finished", "arms": arms, "called_s": 6.0, "elapsed_s": 11.0},
        {"type": "run_finished", "elapsed_s": 12.0},
    ]
    journal = tmp_path / "journal.jsonl"
    journal.write_text("".join(f"{json.dumps(event)}\n" for event in events), encoding="utf-8")
    parts = spent(journal)
    assert (parts.pop("run"), parts.pop("timing")) == (12.0, 8.0)
    assert parts == {
        "samples": 2.0,
        "controls": 1.0,
        "probes": 1.0,
        "other calls (warm-up, verification)": 2.0,
        "between": 2.0,
        "checks": 1.5,
        "ceilings": 0.5,
        "before and after": 2.0,
    }


@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({}, True),
        ({"seconds": 1.015}, True),
        ({"seconds": 1.03}, False),
        ({"seconds": 1.2}, False),
        ({"after": 1.2, "seconds": 1.1}, False),  # nothing was judged
    ],
)
def test_each_way_must_print_the_time_of_the_plain_loop(changes, passes):
    cell = {"before": 1.0, "seconds": 1.0, "after": 1.0} | changes
    rows = [
        {"session": 0, "way": way} | {key: dict.fromkeys(printed.SPECS, value) for key, value in cell.items()}
        for way in printed.WAYS
    ]
    assert printed.judge(rows * 3)[1] is passes


def test_one_reading_far_from_the_loop_is_a_miss():
    readings = [1.0, 1.0, 1.0, 1.0, 1.06]
    same = dict.fromkeys(printed.SPECS, 1.0)
    rows = [
        {"way": way, "before": same, "after": same, "seconds": dict.fromkeys(printed.SPECS, seconds)}
        for way in printed.WAYS
        for seconds in readings
    ]
    assert not printed.judge(rows)[1]


def test_the_lines_of_the_plain_loop_are_read_and_threads_are_set_at_its_start(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("MKL_NUM_THREADS", "3")
    (tmp_path / "mine.py").write_text(sessions.PRODUCT.format(share=0.0), encoding="utf-8")
    (tmp_path / "fused.py").write_text(printed.fused(), encoding="utf-8")
    (sdpa, one), (mine, _), (fused, _) = sessions.plain_loop(
        ["torch:sdpa", "mine.py:mine", "fused.py:attention"], tmp_path, seconds=0.1, seq_len=16, num_threads=1
    )
    assert one == 1.0
    assert 0 < min(sdpa, mine, fused) < 1
    assert not {*sessions.THREADS} & {*sessions.surroundings()}


def test_honest_functions_are_of_many_kinds(tmp_path):
    names = {sessions.honest_kind(number, tmp_path / "mine.py") for number in range(2 * sessions.NUM_KINDS)}
    assert len(names) == sessions.NUM_KINDS
    assert "attention" in (tmp_path / "mine.py").read_text(encoding="utf-8")


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
    assert "Not run: W1" in text


def test_sessions_of_an_older_tree_have_a_row_of_their_own_in_the_table(tmp_path):
    def take(number, tree=None):
        return [row("slower" if tree == tmp_path / "harness" else "equivalent", loop=1.03, low=1.0, high=1.1)]

    test = dataclasses.replace(acceptance.TESTS["W2"], number=2, take=take, judge=acceptance._identical)
    frame.complete(acceptance.pieces(test, tmp_path), tmp_path)
    assert acceptance.outcome(test, tmp_path).passes
    assert not acceptance.outcome(test, tmp_path, acceptance.OLD).passes
    assert "W2, older" in acceptance.table(tmp_path)


@pytest.mark.long
def test_each_kind_of_session_gives_the_rows_that_its_judge_reads(monkeypatch):
    """Each once read a format that the commands no longer printed, and no test ran it."""
    slowed = sessions.compare(3, share=1.0, budget_s=40.0, loop_s=0.1)
    assert (slowed["verdict"], slowed["alike"]) == ("slower", 1.0)
    assert slowed["loop"] > 1.5
    assert slowed["spent"]["samples"] > 0
    assert slowed["processes"] >= 4
    for by_fixture in (False, True):
        judged = acceptance._neighbours([sessions.neighbour(1, num_busy=0, num_threads=1, by_fixture=by_fixture)])
        assert "neither" in judged[0]
    assert acceptance._honest([sessions.honest(1, num_busy=0)])[1]
    tools = {row["tool"] for row in sessions.rivals(1, budget_s=2.0)}
    assert tools == {"attnbench", "plain loop", "pyperf", "pytest-benchmark", "torch Timer"}
    monkeypatch.setattr(printed, "LOOP_S", 0.1)
    ways = {row["way"]: set(row["seconds"]) for row in printed.session(1, num_threads=1, seq_len=64)}
    assert ways == {way: set(printed.SPECS) for way in printed.WAYS}


STARTS = {
    "a session of acceptance": lambda folder: sessions.run_python(["-c", "pass"], folder),
    "a command that is timed": lambda _: first_answer.timed("sdpa", first_answer.ROOT),
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_what_was_added_to_the_path_of_modules_is_passed_on(start, tmp_path, monkeypatch):
    noted = tmp_path / "noted"
    program = tmp_path / "python"
    program.write_text(f'#!/bin/sh\nprintf %s "$PYTHONPATH" > {shlex.quote(str(noted))}\n', encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "dependencies"))
    start(tmp_path)
    folders = noted.read_text(encoding="utf-8").split(os.pathsep)
    assert "harness" in folders[0] or Path(folders[0], "attnbench").is_dir()
    assert folders[1:][-1:] == [str(tmp_path / "dependencies")]
