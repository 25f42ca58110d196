"""Attention dropout: honest forms pass, each wrong one is described in words, and timed calls are still checked."""

import math
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnbench.case import reason_against
from attnbench.checking import dropout
from attnbench.checking.agreement import References, check
from attnbench.contract import Attention, Implementation, repeat_heads
from attnbench.processes.messages import Failed
from attnbench.processes.worker.answers import PreparedWorkload
from attnbench.storage.records import Arm, Status
from attnbench.workloads.workload import Workload
from tests.checks import cell_of, checked

POINT = Workload(
    batch_size=2,
    seq_len=9,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mask="causal",
    dropout=0.2,
    direction="forward_backward",
)


class Dropping(Attention):
    """The textbook form, with three places where a subclass drops."""

    def attend(self, query, key, value, mask):
        key, value = repeat_heads(key, query.shape[1]), repeat_heads(value, query.shape[1])
        scores = self.of_scores(query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5)
        if mask.hidden is not None:
            scores = scores.masked_fill(mask.hidden, -torch.inf)
        return self.of_output(self.of_weights(scores.softmax(-1)) @ value)

    def of_scores(self, scores):
        return scores

    def of_weights(self, weights):
        return F.dropout(weights, self.dropout)

    def of_output(self, output):
        return output

    def kept(self, *shape):
        return torch.rand(shape) >= self.dropout


class Layer(Dropping):
    def __init__(self, weights):
        super().__init__(weights)
        self.dropout = nn.Dropout(0.5)

    def of_weights(self, weights):
        return self.dropout(weights)


class Seeded(Dropping):
    def of_weights(self, weights):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return F.dropout(weights, self.dropout)


class OtherGradient(torch.autograd.Function):
    """The backward pass drops other weights than the forward pass."""

    @staticmethod
    def forward(ctx, weights, share):
        ctx.share = share
        return F.dropout(weights, share)

    @staticmethod
    def backward(ctx, grad):
        return F.dropout(grad, ctx.share), None


def on(place, change):
    return type("Planted", (Dropping,), {"of_weights": lambda _, weights: weights} | {f"of_{place}": change})


HONEST = {"function": Dropping, "layer": Layer}
PLANTED = {
    "nothing is dropped": on("weights", lambda _, weights: weights),
    "dropout without rescaling": on("weights", lambda m, w: w * m.kept(*w.shape)),
    "rescaled by 1 - p": on("weights", lambda m, w: w * m.kept(*w.shape) * (1 - m.dropout)),
    "and the others multiplied by 5, not by 1.25": on(
        "weights", lambda m, w: F.dropout(w, 1 - m.dropout if m.dropout else 0)
    ),
    "dropout is 0.2, and the others multiplied by 2,": on(
        "weights", lambda m, w: w * m.kept(*w.shape) * (2 if m.dropout else 1)
    ),
    "a query's weights still add up to 1": on("scores", lambda m, s: s.masked_fill(~m.kept(*s.shape), -1e9)),
    "scores are dropped before the softmax": on("scores", lambda m, s: F.dropout(s, m.dropout)),
    "the output is dropped, not the weights": on("output", lambda m, o: F.dropout(o, m.dropout)),
    "does not depend on the head": on("weights", lambda m, w: w * F.dropout(torch.ones_like(w[:, :1]), m.dropout)),
    "does not depend on the batch row": on("weights", lambda m, w: w * F.dropout(torch.ones_like(w[:1]), m.dropout)),
    "does not depend on the query": on("weights", lambda m, w: w * F.dropout(torch.ones_like(w[:, :, :1]), m.dropout)),
    "does not depend on the key": on("weights", lambda m, w: w * F.dropout(torch.ones_like(w[..., :1]), m.dropout)),
    "does not depend on the call": Seeded,
    "in head 3 are dropped": on(
        "weights", lambda m, w: torch.cat([F.dropout(w[:, :3], m.dropout), w[:, 3:] / (1 - m.dropout)], dim=1)
    ),
    "neither 0 nor": on("weights", lambda m, w: w * (1 + m.dropout * torch.rand_like(w))),
    "the backward pass is not that of the weights": on("weights", lambda m, w: OtherGradient.apply(w, m.dropout)),
    "not finite": on("weights", lambda m, w: F.dropout(w, m.dropout) / (0.0 if m.dropout else 1.0)),
    "cannot be checked: RuntimeError: not today": on("weights", lambda m, w: w if not m.dropout else refuse()),
}


def refuse():
    raise RuntimeError("not today\nnor tomorrow")


def examined(module, point=POINT):
    return dropout.examine(Implementation(build=module, source="a test", has_dropout=True), point, 0)


@pytest.mark.parametrize("scope", ["attention", "module"])
@pytest.mark.parametrize("module", HONEST.values(), ids=HONEST)
@pytest.mark.parametrize("axes", [{}, {"seq_len": 24, "num_kv_heads": 4, "mask": "padding_to_nothing"}])
def test_honest_dropout_passes_every_rule(axes, module, scope):
    results = examined(module, Workload(**(POINT.axes() | {"scope": scope} | axes)))
    assert [each.found for each in results] == [""] * len(dropout.RULES)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("scope", ["attention", "module"])
@pytest.mark.parametrize("words", PLANTED)
def test_a_planted_dropout_is_reported(words, scope):
    point = Workload(**(POINT.axes() | {"scope": scope}))
    *passed, wrong = examined(PLANTED[words], point)
    assert words in wrong.found
    assert not wrong.holds
    assert all(each.holds for each in passed)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("p", [0.005, 0.03, 0.5, 0.9, 0.995])
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_rare_and_frequent_dropout_in_every_dtype(p, dtype):
    point = Workload(**(POINT.axes() | {"dropout": p, "dtype": dtype}))
    assert [each.found for each in examined(Dropping, point) if each.found] == []
    assert not examined(PLANTED["nothing is dropped"], point)[-1].holds
    assert not examined(Seeded, point)[-1].holds
    if p > 0.005 or dtype != "bfloat16":  # which rounds 1.005 to 1
        assert not examined(PLANTED["dropout without rescaling"], point)[-1].holds


@pytest.mark.one_in(3)
@pytest.mark.parametrize("axes", [{"seq_len": 1, "kv_len": 40, "num_heads": 2}, {"seq_len": 20, "num_heads": 1}])
@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_few_weights_of_which_a_draw_may_leave_none(axes, mask):
    point = Workload(head_dim=16, dropout=0.995, direction="forward_backward", mask=mask, **axes)
    for seed in range(3):
        implementation = Implementation(build=Dropping, source="a test", has_dropout=True)
        assert [each.found for each in dropout.examine(implementation, point, seed) if each.found] == []


def test_it_does_not_accuse_the_honest():
    """The allowed false alarms are one in 10^9, so never; a rule at 1 % would raise one here."""
    for seed in range(20):
        implementation = Implementation(build=Dropping, source="a test", has_dropout=True)
        assert all(each.holds for each in dropout.examine(implementation, POINT, seed)), seed


def test_a_share_that_is_lost_in_one_place_is_found_at_its_place():
    def change(m, w):
        kept = F.dropout(torch.ones_like(w), m.dropout)
        kept[..., 2, :] = 1 / (1 - m.dropout)
        return w * kept

    *_, wrong = examined(on("weights", change))
    assert "0.0% of" in wrong.found
    assert "in query 2" in wrong.found


def test_keys_that_are_dropped_in_pairs_in_some_heads_are_found():
    def change(m, w):
        half = F.dropout(torch.ones(*w.shape[:-1], math.ceil(w.shape[-1] / 2)), m.dropout)
        twos = half.repeat_interleave(2, dim=-1)[..., : w.shape[-1]]
        return torch.cat([w[:, :2] * twos[:, :2], F.dropout(w[:, 2:], m.dropout)], dim=1)

    *_, wrong = examined(on("weights", change), Workload(**(POINT.axes() | {"mask": "none"})))
    assert re.search(r"dropped or kept as the next key's is, not 68.0%", wrong.found)


def test_the_mean_is_judged_apart():
    class Off(Dropping):
        def of_output(self, output):
            return output + 2.0 if self.dropout and output.shape[2] > 16 else output

    *_, wrong = examined(Off, Workload(**(POINT.axes() | {"seq_len": 40})))
    assert wrong.rule == "dropout mean"
    assert "the weights add up to 3.0" in wrong.found


def test_a_check_under_dropout_holds_what_is_not_dropped_against_the_oracle_first():
    references = References(POINT, 0)
    honest = check(references, Implementation(build=Dropping, source="a test", has_dropout=True))
    assert honest.agrees
    assert {rule.rule for rule in honest.rules} > set(dropout.RULES)
    wrong = check(
        references, Implementation(build=PLANTED["dropout without rescaling"], source="a test", has_dropout=True)
    )
    assert not wrong.agrees
    assert "dropout without rescaling" in wrong.diagnosis
    always = type("Always", (Dropping,), {"of_weights": lambda _, weights: F.dropout(weights, 0.3)})
    active = check(references, Implementation(build=always, source="a test", has_dropout=True))
    assert not active.agrees
    assert "dropout_in_evaluation" in active.mistakes
    assert not {rule.rule for rule in active.rules} & set(dropout.RULES)


@pytest.mark.parametrize(
    ("axes", "has_dropout", "said"),
    [
        ({"direction": "inference"}, True, "nothing is dropped in inference"),
        ({"dropout": 0.001}, True, "give one from 0.005 to 0.995"),
        ({"value_dim": 1}, True, "at least two keys and columns"),
        ({}, False, "has no attention dropout"),
    ],
)
def test_what_cannot_be_checked_is_refused_in_words(axes, has_dropout, said):
    implementation = Implementation(build=Dropping, source="a test", has_dropout=has_dropout)
    assert said in str(reason_against(implementation, Workload(**(POINT.axes() | axes))))


class LaterWrong(Dropping):
    """Right until the test switches it."""

    wrong = None

    def of_weights(self, weights):
        return super().of_weights(weights) if self.wrong is None or not self.dropout else self.wrong(weights)


@pytest.mark.parametrize("scope", ["attention", "module"])
@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        (None, ""),
        (lambda weights: weights, "two calls drop the same, or nothing"),
        (lambda weights: F.dropout(weights, 0.2) * 0.8, "the weights add up to 0."),
    ],
    ids=["as before", "nothing dropped", "not rescaled"],
)
def test_what_is_timed_is_watched_still(wrong, reported, scope):
    point = Workload(**(POINT.axes() | {"scope": scope, "seq_len": 128, "direction": "forward"}))
    bench = PreparedWorkload(point)
    arm = Arm(implementation="it")
    bench.timed(arm, Implementation(build=LaterWrong, source="a test", has_dropout=True))
    assert bench.verify(arm) == ""
    case = bench.cases[arm]
    before = {name: tensor.detach().clone() for name, tensor in case.tensors.items()}
    case.module.wrong = wrong
    found = bench.verify(arm)
    if scope == "module" and "add up" in reported:  # the values are not available there
        reported = ""
    assert reported in found if reported else not found
    assert all(torch.equal(tensor, case.tensors[name]) for name, tensor in before.items())
    assert case.module.dropout == 0.2


@pytest.mark.parametrize("longest", [8, 24])
def test_a_cell_whose_dropout_is_refused_is_unsupported_and_not_tried(tmp_path, longest):
    refuse = f"if dropout_p and key.shape[2] <= {longest}: raise NotImplementedError('too short')"
    lines = ["from torch.nn.functional import scaled_dot_product_attention as sdpa"]
    lines += ["def mine(query, key, value, dropout_p=0.0):", f"    {refuse}"]
    lines += ["    return sdpa(query, key, value, dropout_p=dropout_p)"]
    (tmp_path / "mine.py").write_text("\n".join(lines))
    asked = Workload(seq_len=24, num_heads=2, head_dim=8, dropout=0.2, direction="forward_backward")
    found = checked(cell_of(f"{tmp_path / 'mine.py'}:mine", asked))
    assert isinstance(found, Failed)  # no agreement, so coverage does not count it
    assert found.status is Status.unsupported
    assert found.message == "dropout cannot be checked: NotImplementedError: too short"
