"""examples/tutorials makes every table: printed ones to their tolerance, the others by a formula.

Each formula is written as its tutorial writes it, in plain torch, independent of the project.
"""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from examples.tutorials import TUTORIALS, reading
from examples.tutorials.tutorial_002 import more_draws
from examples.tutorials.tutorial_004 import batched, words
from tests import forks

ROOT = Path(__file__).parent.parent.parent
FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))
TABLES = {number: tables() for number, tables in TUTORIALS.items()}
PRINTED = [
    (number, name)
    for number in TUTORIALS
    for name, table in FACTS[number].items()
    if isinstance(table, dict) and "value" in table
]
INPUT = torch.tensor(FACTS["003"]["input"])


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor | None = None, dim: int = -1) -> list[Tensor]:
    """Return the scaled scores, the weights and the context of (..., T, K), (..., S, K) and (..., S, V)."""
    scores = query @ key.mT / query.shape[-1] ** 0.5
    scores = scores if hidden is None else scores.masked_fill(hidden, float("-inf"))
    weights = F.softmax(scores, dim=dim)
    return [scores, weights, weights @ value]


def later(length: int) -> Tensor:
    return torch.triu(torch.ones(length, length), diagonal=1).bool()


def by_formula_000() -> dict[str, Tensor]:
    torch.manual_seed(42)
    x = nn.Embedding(8, 16)(torch.tensor(FACTS["000"]["token_ids"])).detach()
    query, key, value = (x @ torch.rand(width, 16).T for width in (24, 24, 28))
    _, _, wrong = attend(query, key, value, dim=0)
    _, right, context = attend(query, key, value)
    heads = [x @ torch.rand(3, width, 16).mT for width in (24, 24, 28)]  # (H,T,K) or (H,T,V)
    _, wrongs, mixed_wrongly = attend(*heads, dim=0)
    _, rights, mixed = attend(*heads)
    return {
        "token_ids": torch.tensor(FACTS["000"]["token_ids"]),
        "context_first_word": context[0],
        "context_single_head": wrong,
        "weights_single_head_over_keys": right,
        "context_single_head_over_keys": context,
        "weights_multi_head_dim0": wrongs,
        "context_multi_head_dim0": mixed_wrongly,
        "weights_multi_head_over_keys": rights,
        "context_multi_head_over_keys": mixed,
        "output_multi_head_over_keys": torch.cat(list(mixed), dim=1),
    }


def by_formula_001() -> dict[str, Tensor]:
    printed = torch.tensor(FACTS["001"]["qkv_data_point_1"]["value"])
    _, unmasked, values = attend(*printed.chunk(3, dim=-1))
    scores, masked, masked_values = attend(*printed.chunk(3, dim=-1), torch.tensor([1, 2, 0, 0]) == 0)
    torch.manual_seed(2)
    tokens = torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]])
    x = nn.Embedding(5, 4, padding_idx=0)(tokens).detach()
    layer = [nn.Linear(4, 12, bias=False) for _ in range(2)][1]
    heads = layer(x).detach().reshape(2, 4, 2, 6).permute(0, 2, 1, 3).chunk(3, dim=-1)
    outputs = [attend(*heads, hidden)[2] for hidden in (None, (tokens == 0)[:, None, None, :])]
    merged = [output.permute(0, 2, 1, 3).reshape(2, 4, 4) for output in outputs]
    return {
        "qkv_data_point_1_from_the_seed": printed,
        "weights_data_point_1_unmasked": unmasked,
        "values_data_point_1_unmasked": values,
        "scores_data_point_1_masked": scores,
        "weights_data_point_1_masked": masked,
        "values_data_point_1_masked": masked_values,
        "output_unmasked": merged[0],
        "output_masked": merged[1],
    }


def by_formula_002() -> dict[str, Tensor]:
    torch.manual_seed(123)
    x = nn.Embedding(50000, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()
    torch.manual_seed(123)
    w_query, w_key, w_value = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 4)
    query, key, value = x @ w_query, x @ w_key, x @ w_value
    _, weights, context = attend(query, key, value)
    several, other = more_draws()
    _, heads, mixed = attend(x @ several.query.mT, x @ several.key.mT, x @ several.value.mT)
    causal = attend(query, key, value, later(6))
    crossed = attend(query, other @ w_key, other @ w_value)
    return {
        "token_ids": torch.tensor([0, 4, 5, 2, 1, 3]),
        "weights_second_token": weights[1],
        "context_second_token": context[1],
        "scores_all_tokens": query @ key.T,
        "weights_all_tokens": weights,
        "context_all_tokens": context,
        "weights_multi_head": heads,
        "output_multi_head": torch.cat(list(mixed), dim=-1),
        "scores_causal": causal[0],
        "weights_causal": causal[1],
        "context_causal": causal[2],
        "weights_cross": crossed[1],
        "context_cross": crossed[2],
    }


def by_formula_003() -> dict[str, Tensor]:
    torch.manual_seed(123)
    layer, dropout, out = nn.Linear(3, 6, bias=False), nn.Dropout(0.5), nn.Linear(2, 2)
    batch = torch.stack([INPUT, INPUT])
    keys, queries, values = (part.view(2, 9, 2, 1).transpose(1, 2) for part in layer(batch).chunk(3, dim=-1))
    _, weights, _ = attend(queries, keys, values, later(9))

    def finish(weights: Tensor) -> Tensor:
        return out((weights @ values).transpose(1, 2).reshape(2, 9, 2)).detach()[1]

    return {
        "input": INPUT,
        "softmax_examples": torch.tensor([each["weights"] for each in FACTS["003"]["softmax_examples"]]),
        "fused_causal": finish(weights),
        "fused_causal_with_dropout_in_evaluation": finish(dropout.eval()(weights)),
    }


def by_formula_004() -> dict[str, Tensor]:
    _, weights, context = attend(*batched())
    causal = attend(*batched(), later(4))
    vector = torch.tensor([0.1, -0.2, 0.3, -0.2, 0.5])
    torch.manual_seed(0)
    products = torch.randn(5, 10_000) @ torch.randn(10_000)
    x, drawn = words()
    _, heads, _ = attend(x @ drawn.query.mT, x @ drawn.key.mT, x @ drawn.value.mT)
    return {
        "weights_batched": weights,
        "context_batched": context,
        "scores_causal": causal[0],
        "weights_causal": causal[1],
        "context_causal": causal[2],
        "softmax_of_a_vector": vector.exp() / vector.exp().sum(),
        "softmax_of_the_vector_times_100": torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]),
        "softmax_of_wide_products": F.softmax(products, dim=0),
        "softmax_of_wide_products_scaled": F.softmax(products / 100, dim=0),
        "weights_of_both_sentences": heads,
        "weights_first_sentence_on_second": heads[:, :5, 5:],
        "weights_second_sentence_on_first": heads[:, 5:, :5],
    }


FORMULAS = (by_formula_000, by_formula_001, by_formula_002, by_formula_003, by_formula_004)


@pytest.mark.parametrize(("number", "name"), PRINTED)
def test_what_is_printed(number: str, name: str) -> None:
    fact = FACTS[number][name]
    expected = torch.tensor(fact["value"])
    torch.testing.assert_close(TABLES[number][name], expected, rtol=0, atol=fact.get("tolerance", 0.0))


@pytest.mark.parametrize(("number", "formula"), [*zip(TUTORIALS, FORMULAS, strict=True)])
def test_what_follows_from_the_formulas_and_nothing_else_is_left(number: str, formula: Callable[[], dict]) -> None:
    with torch.random.fork_rng(devices=[]):
        expected = formula()
    for name, table in expected.items():
        torch.testing.assert_close(
            TABLES[number][name], table, rtol=1e-4, atol=1e-4, msg=lambda reported, name=name: f"{name}: {reported}"
        )
    assert expected.keys() | {name for tutorial, name in PRINTED if tutorial == number} == TABLES[number].keys()


@pytest.mark.parametrize("number", TUTORIALS)
def test_making_tables_leaves_the_generator_as_it_was(number: str) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    TUTORIALS[number]()
    assert torch.equal(torch.get_rng_state(), before)


def test_rows_of_right_weights_add_up_to_1_and_those_of_the_quirks_do_not() -> None:
    for number, tables in TABLES.items():
        for name, table in tables.items():
            if name.startswith("weights") and "_on_" not in name:
                rows = table.sum(dim=-1)
                assert torch.allclose(rows, torch.ones_like(rows), atol=1e-5) is ("dim0" not in name), (number, name)


def reported(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [forks.python(), "-m", "examples.tutorials", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)


def test_the_program_prints_every_table() -> None:
    printed = reported()
    assert printed.returncode == 0, printed.stderr
    names = [
        f"{number} {name} {tuple(table.shape)}\n" for number, made in TABLES.items() for name, table in made.items()
    ]
    assert all(name in printed.stdout for name in names)
    assert "e-" in printed.stdout  # as torch prints
    assert "..." not in printed.stdout


def test_the_program_prints_json_for_a_program() -> None:
    printed = reported("001", "003", "--json")

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    made = json.loads(printed.stdout, parse_constant=refuse)
    assert list(made) == ["001", "003"]
    torch.testing.assert_close(torch.tensor(made["003"]["fused_causal"]), TABLES["003"]["fused_causal"])
    assert made["001"]["scores_data_point_1_masked"][0][0][3] == "-inf"


def test_the_program_says_what_there_is() -> None:
    printed = reported("005")
    assert printed.returncode == 2
    assert "000, 001, 002, 003, 004" in printed.stderr


SHOWPIECE = ("naive_loop", "module_list", "fused", "bmm", "einsum", "sdpa", "chunked")


def test_the_files_of_a_learner_have_at_most_sixty_lines_and_are_counted():
    files = [ROOT / "implementations" / f"{name}.py" for name in SHOWPIECE]
    _, _, *rows = reading.rows(map(str, files))
    assert [row.split("`")[1] for row in rows] == [*SHOWPIECE]
    assert all(len(file.read_text(encoding="utf-8").splitlines()) <= 60 for file in files)
