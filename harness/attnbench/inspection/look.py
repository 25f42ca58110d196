"""The inspection itself: sentences through the textbook form in float64, and an implementation beside the oracle."""

from collections.abc import Sequence

import torch
from torch import Tensor

from attnbench import plugins
from attnbench.checking import oracle, steps
from attnbench.checking.inputs import Inputs
from attnbench.inspection import beside, sentence, softness
from attnbench.inspection.found import Found, Masking, Step, Walk
from attnbench.workloads.masks import Causal, Mask
from attnbench.workloads.workload import Workload

MOST_JOINED_WORDS = 2 * sentence.MOST_WORDS


def look(name: str, sentences: Sequence[str], settings: Sequence[str] = (), seed: int = 0) -> Found:
    """Everything about the implementation `name` (or path/to/file.py:Name) on these sentences.

    Raises:
        ValueError: an implementation that cannot be found, a sentence without words, or settings that cannot be.
    """
    plugins.check_specs([name])
    told = sentence.split(sentences or [sentence.DEFAULT])
    points = [sentence.workload(len(words), settings, seed) for words in told]
    implementation = beside.load(name)
    given = [sentence.inputs(words, point) for words, point in zip(told, points, strict=True)]
    together = list(zip(told, points, given, strict=True))
    return Found(
        spec=name,
        implementation=plugins.name_of(name),
        walks=tuple(walk(*each) for each in together),
        besides=tuple(beside.beside(implementation, *each) for each in together),
        joined=_joined(told, settings, seed),
        examples=softness.examples(),
        growth=softness.growth(seed),
    )


def _joined(told: Sequence[tuple[str, ...]], settings: Sequence[str], seed: int) -> Walk | None:
    """All sentences in one row, where every word sees every other; None for a single sentence, or too many words."""
    words = tuple(word for each in told for word in each)
    if len(told) == 1 or len(words) > MOST_JOINED_WORDS:
        return None
    point = sentence.workload(len(words), settings, seed, mask="none")
    return walk(words, point, sentence.inputs(words, point))


def walk(words: tuple[str, ...], workload: Workload, inputs: Inputs) -> Walk:
    """Every step of the textbook form on one sentence: x (B=1, T, D) and the canonical weights, in float64."""
    x = inputs.tensors["x"]
    mask = oracle.row_mask(workload, torch.arange(workload.seq_len))
    made = steps.attend_tokens(x, x, inputs.weights, mask)
    query, key, value = steps.project(x, x, inputs.weights)
    return Walk(
        words=words,
        workload=workload,
        steps=tuple(_steps(workload, made | {"x": x, "query": query, "key": key, "value": value})),
        masking=_masking(workload, made["scores"], mask),
        scaling=softness.of_scores(made["scores"], workload.head_dim),
    )


def _steps(workload: Workload, made: dict[str, Tensor]) -> list[Step]:
    rule = workload.mask_rule
    width = workload.head_dim
    groups = workload.num_kv_heads
    shared = "" if groups == workload.num_heads else f"; {workload.num_heads // groups} query heads read each"
    first = "Scores are changed where the mask says so. " if rule.changes_scores else ""
    rows = {
        "x": ("BTD", f"Each word is a vector of D={workload.embed_dim} numbers, drawn from the seed and the word."),
        "query": ("BHTK", "What each word looks for: x times the head's query weights, plus a bias."),
        "key": ("BGSK", f"What each word offers to be found by: x times the head's key weights{shared}."),
        "value": ("BGSV", f"What each word hands on where it is found: x times the head's value weights{shared}."),
        "scores": ("BHTS", f"Each query (row) times each key (column), divided by sqrt(K) = sqrt({width})."),
        "masked scores": ("BHTS", f"{first}Keys that a query may not see get -inf. Mask {rule}: {rule.summary}."),
        "weights": ("BHTS", "Softmax along each row: no weight is negative, and those of a query add up to 1."),
        "context": ("BHTV", "For each query, the mean of the values by its weights."),
        "output": (
            "BTD",
            "The heads side by side, times the output weights, plus a bias: a vector for each word again.",
        ),
    }
    return [
        Step(name=name, letters=letters, values=made[name].numpy(), told=told) for name, (letters, told) in rows.items()
    ]


def _masking(workload: Workload, scores: Tensor, mask: oracle.RowMask) -> Masking:
    """What the workload's mask changes; for a workload without any, what the causal one would."""
    rule = workload.mask_rule
    is_chosen = type(rule) is not Mask
    shown = rule if is_chosen else Causal()
    seen = mask.seen_under(shown)  # (B,1,T,S)
    masked = steps.masked_scores(scores, mask) if is_chosen else scores.masked_fill(~seen, -torch.inf)
    under = steps.weights(masked, mask)
    return Masking(
        mask=str(shown),
        summary=shown.summary,
        is_chosen=is_chosen,
        seen=seen[0, 0].numpy(),
        without=steps.weights(scores, mask)[0].numpy(),
        under=under[0].numpy(),
    )
