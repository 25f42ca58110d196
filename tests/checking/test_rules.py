"""Each rule holds for an honest form, and catches the one that breaks it."""

import math

import pytest
import torch

from attnbench.checking import agreement
from attnbench.contract import Attention, Implementation
from attnbench.contract.loading import implementation
from attnbench.workloads.workload import Workload

RULES = agreement.DECIDING | agreement.NOTED


class Honest(Attention):
    def attend(self, query, key, value, mask):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        scores = scores if mask.hidden is None else scores.masked_fill(mask.hidden, -math.inf)
        return scores.softmax(-1) @ value


class ChangesItsInput(Honest):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        query.mul_(2)
        return out


BUFFER = {}


class OneBuffer(Honest):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return BUFFER.setdefault(out.shape, torch.empty_like(out)).copy_(out)


class Remembers(Honest):
    def attend(self, query, key, value, mask):
        if not hasattr(self, "kept"):
            self.kept = super().attend(query, key, value, mask)
        return self.kept.clone()


class NeedsContiguous(Honest):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value.view(-1).view(value.shape), mask)


class ReadsFromTheStart(Honest):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value.as_strided(value.shape, value.stride(), 0), mask)


class IgnoresStrideZero(Honest):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value * 2 if value.stride(0) == 0 else value, mask)


class HidesByALittle(Honest):
    def attend(self, query, key, value, mask):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return scores.masked_fill(mask.hidden, -30.0).softmax(-1) @ value


class HidesByAnAddend(Honest):
    def attend(self, query, key, value, mask):
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
        return (scores - 20.0 * mask.hidden.to(scores)).softmax(-1) @ value


class LosesNan(Honest):
    def attend(self, query, key, value, mask):
        return super().attend(query, key, value, mask).nan_to_num()


class Random(Honest):
    def attend(self, query, key, value, mask):
        out = super().attend(query, key, value, mask)
        return out + 1e-9 * torch.rand_like(out)


def trial(module, **axes):
    sizes = {"batch_size": 2, "seq_len": 20, "num_heads": 2, "head_dim": 8, "mask": "causal", "direction": "inference"}
    workload = Workload(**(sizes | axes))
    made = Implementation(build=module, source="a test")
    references = agreement.RuleReferences.ask(workload, 0, lambda: None)
    assert references is not None
    return agreement.Candidate(made, references)


def broken(module, **axes):
    return {result.rule for result in agreement.try_rules(trial(module, **axes), RULES) if not result.holds}


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("mask", ["none", "causal", "padding", "padding(20,0)", "sliding_window(3)"])
@pytest.mark.parametrize("scope", ["attention", "module"])
def test_an_honest_form_breaks_only_what_pytorch_breaks_too(dtype, mask, scope):
    module = Honest if mask != "padding(20,0)" else implementation("fused").build
    assert broken(module, dtype=dtype, mask=mask, scope=scope) <= {"hidden NaN"}


@pytest.mark.parametrize(
    ("module", "rule"),
    [
        (ChangesItsInput, "inputs kept"),
        (OneBuffer, "outputs apart"),
        (Remembers, "outputs apart"),
        (ReadsFromTheStart, "layouts"),
        (IgnoresStrideZero, "expanded"),
        (HidesByAnAddend, "hidden keys"),
        (HidesByALittle, "hidden NaN"),
        (LosesNan, "visible NaN"),
        (Random, "repeatable"),
    ],
)
def test_each_rule_finds_who_breaks_it(module, rule):
    assert rule in broken(module)


def test_what_a_hidden_nan_reaches_is_noted_and_decides_nothing():
    found = {result.rule: result for result in agreement.try_rules(trial(Honest), RULES)}
    assert not found["hidden NaN"].holds
    assert found["hidden NaN"].is_noted
    assert "NaN in the value" in found["hidden NaN"].found
    assert "key" not in found["hidden NaN"].found.replace("hidden", "")
    assert {name for name in found if found[name].is_noted} == set(agreement.NOTED)


def test_to_refuse_a_layout_is_noted_and_decides_nothing():
    found = {result.rule: result for result in agreement.try_rules(trial(NeedsContiguous), RULES)}
    assert "view" in found["layouts"].found
    assert found["layouts"].is_noted
    found = {result.rule: result for result in agreement.try_rules(trial(ReadsFromTheStart), RULES)}
    assert not found["layouts"].holds
    assert not found["layouts"].is_noted


def test_each_rule_is_a_step():
    steps = []
    assert len(agreement.try_rules(trial(Honest), RULES, lambda: steps.append(1))) == len(steps)
