"""Sessions of two sides on the virtual machine: verdicts, exit codes, and two workers behind one interface."""

import dataclasses

import msgspec
import pytest
import typer

from attnbench.analysis.comparisons import comparisons, judgements, whole_session_judgement
from attnbench.analysis.sides import by_side, losses, untried
from attnbench.commands import frame
from attnbench.processes.messages import Failed
from attnbench.reports import exit_status, verdict
from attnbench.reports.summary import markdown, unlike
from attnbench.statistics.verdict import LOOKS
from attnbench.storage import journal
from attnbench.storage.events import CellFailed, VisitFinished
from attnbench.storage.journal import JOURNAL
from attnbench.storage.records import BASE, CANDIDATE, PROBE, Arm, Status, Verdict
from studies.simulated import virtual
from studies.simulated.virtual import SimulatedClient, SimulatedPair, with_sides
from studies.simulated.worlds import WORLDS

pytestmark = pytest.mark.usefixtures("many_visits")


def session(folder, slowdown=0.0, *, names=("x",), is_apart=False, world="calm", seed=1, budget_s=120.0, num_cells=2):
    """Two sides of each name; the candidate is slower by `slowdown`."""

    def cost_s(workload, name):
        return 1e-4 * workload.seq_len * (1.0 if name.endswith("(base)") else 1.0 + slowdown)

    asked = with_sides(virtual.plan(num_cells, names, budget_s=budget_s, seed=seed), is_apart=is_apart)
    make = SimulatedPair if is_apart else SimulatedClient
    return virtual.execute(asked, folder / "run", make(WORLDS[world], cost_s, seed=seed, layout=0.003, process=0.003))


def verdicts(results):
    return {str(row.verdict) for row in comparisons(results)}


def exit_code(results, **more):
    with pytest.raises(typer.Exit) as left:
        frame.finish(exit_status.of_sides(results), **more)
    return left.value.exit_code


@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize(
    ("slowdown", "verdict", "code"), [(0.0, "equivalent", 0), (0.08, "slower", 1), (-0.08, "faster", 0)]
)
def test_a_session_finds_what_was_planted(tmp_path, is_apart, slowdown, verdict, code):
    results = session(tmp_path, slowdown, is_apart=is_apart, budget_s=120.0 if is_apart else 15.0)
    assert verdicts(results) <= ({verdict} if slowdown else {verdict, "undecided"})
    found = whole_session_judgement(results)
    assert found.verdict == verdict
    assert found.ratio == pytest.approx(1 + slowdown, rel=0.02)
    assert found.detectable < 0.08
    assert len(judgements(results)) == 2 + 1
    assert exit_code(results) == code
    words = "equal" if verdict == "equivalent" else verdict
    sentence = exit_status.of_sides(results).sentence
    assert words in sentence
    assert sentence.startswith("fail: " if code == 1 else "pass: ")


def test_a_candidate_that_repairs_a_wrong_base_passes(tmp_path):
    results = session(tmp_path, num_cells=1, budget_s=5.0)
    wrong = {"status": Status.disagrees, "measurements": ()}
    records = tuple(msgspec.structs.replace(each, **wrong) if each.side == BASE else each for each in results.records)
    end = exit_status.of_sides(dataclasses.replace(results, records=records))
    assert end.sentence.startswith("pass: right (x T=")
    assert "the base is WRONG" in end.sentence


def test_no_command_names_a_file_of_a_revision(tmp_path):
    results, replaced = session(tmp_path, 0.1, num_cells=1, budget_s=15.0), msgspec.structs.replace
    end, sides = exit_status.of_sides(results), results.plan.sides
    assert "profile" in str(verdict.report(results, end, 1, ["compare"]).next)
    plan = replaced(results.plan, sides=replaced(sides, candidate=replaced(sides.candidate, commit="1a2b3c4")))
    revised = dataclasses.replace(results, started=replaced(results.started, plan=plan))
    assert "profile" not in str(verdict.report(revised, end, 1, ["compare"]).next)


@pytest.mark.parametrize("is_apart", [False, True])
def test_each_name_is_compared_with_its_own_base_alone(tmp_path, is_apart):
    names = ("x", "y")
    results = session(tmp_path, 0.1, names=names, is_apart=is_apart, num_cells=1)
    assert {(row.implementation, row.side, row.baseline) for row in comparisons(results)} == {
        ("x", CANDIDATE, "x"),
        ("y", CANDIDATE, "y"),
    }
    assert all(results.plan.reference(row.key[1]).side == BASE for row in comparisons(results))
    assert verdicts(results) == {"slower"}
    arms = {taken.arm for event in events(results, VisitFinished) for taken in event.arms}
    base, candidate = ({Arm(implementation=name, side=side) for name in names} for side in (BASE, CANDIDATE))
    assert arms == base | candidate | {PROBE}
    old, new = by_side(results)
    assert [each.implementation for each in old] == [each.implementation for each in new] == list(names)


def events(results, kind):
    return [event for event in journal.events(results.folder / JOURNAL) if isinstance(event, kind)]


def test_apart_each_epoch_is_a_pair_of_processes_and_counts_once(tmp_path):
    results = session(tmp_path, is_apart=True, budget_s=60.0, num_cells=1)
    (row,) = comparisons(results)
    epochs = {event.epoch for event in events(results, VisitFinished)}
    assert len(epochs) == results.num_visits[row.workload.id]
    assert row.effect.num_processes == len(epochs) in LOOKS


class Asked(SimulatedPair):
    """Records which visits were to be verified."""

    def ask(self, function, result, /, **arguments):
        if function == "sample_blocks":
            visit = arguments["visit"]
            self.verified = [*getattr(self, "verified", []), (visit.number, visit.verifies)]
        return super().ask(function, result, **arguments)


def test_answers_are_verified_in_the_first_process_and_then_now_and_then(tmp_path):
    asked = with_sides(virtual.plan(1, ("x",), budget_s=60.0), is_apart=True)
    asked = msgspec.structs.replace(asked, smallest_effect=1e-3)  # it continues until that is seen
    client = Asked(WORLDS["calm"], lambda *_: 2e-3)
    virtual.execute(asked, tmp_path / "run", client)
    assert len(client.verified) >= 8
    assert [visit for visit, verifies in client.verified if verifies and visit < 8] == [0, 4]


def test_a_base_that_fails_while_it_is_timed_ends_its_cell_and_no_other(tmp_path):
    base = Arm(implementation="x", side=BASE)

    class Failing(SimulatedClient):
        def sample_blocks(self, visit):
            if visit.number == 1 and any(arm == base for arm, _ in visit.arms):
                return Failed(arm=base, status=Status.error, message="no more")
            return super().sample_blocks(visit)

    asked = with_sides(virtual.plan(1, ("x", "y"), budget_s=30.0))
    results = virtual.execute(asked, tmp_path / "run", Failing(WORLDS["calm"], lambda *_: 2e-3))
    (failed,) = events(results, CellFailed)
    assert failed.key[1] == base
    assert [(row.implementation, row.verdict) for row in comparisons(results)] == [("y", Verdict.equivalent)]
    last = [event for event in events(results, VisitFinished) if event.visit > 1]
    assert last
    assert not any(taken.arm.implementation == "x" for event in last for taken in event.arms)


class Abroad(SimulatedPair):
    """The base has another torch."""

    def start(self, layout=0):
        ready = super().start(layout)
        older = msgspec.structs.replace(ready.environment, versions={"torch": "1.0"}, python="2")
        return msgspec.structs.replace(ready, base=older)


def test_two_environments_are_distinguished_and_are_no_machine_that_changed(tmp_path):
    asked = with_sides(virtual.plan(2, ("x",), budget_s=0.0), is_apart=True)
    results = virtual.execute(asked, tmp_path / "run", Abroad(WORLDS["calm"], lambda *_: 2e-3))
    base, candidate = by_side(results)
    assert [each.environment.versions for each in (*base, *candidate)] == [{"torch": "1.0"}] * 2 + [{}] * 2
    (line,) = unlike(results)
    assert "python 2 and 3; versions torch 1.0 and none" in line
    assert "machine changed" not in markdown(results)
    moved = msgspec.structs.replace(candidate[0], environment=base[0].environment)
    assert "machine changed" in markdown(dataclasses.replace(results, records=(*base, moved, candidate[1])))


def test_a_cell_predicted_on_one_side_is_no_loss(tmp_path):
    results = session(tmp_path, budget_s=0.0)
    assert untried(results) == {}
    words = "predicted 5 s for one call, over the limit of 2 s; --call-limit 5 includes it"
    changes = {"status": Status.timeout, "message": words, "is_predicted": True}
    for side in (BASE, CANDIDATE):
        left_out = next(record for record in results.records if record.side == side)
        others = tuple(record for record in results.records if record is not left_out)
        found = dataclasses.replace(results, records=(*others, msgspec.structs.replace(left_out, **changes)))
        assert losses(found) == []
        (reason,) = untried(found).values()
        assert "includes it" in reason
