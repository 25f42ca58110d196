"""The tables that the tutorials print, reproduced by every implementation that can compute them.

A table of weights is an implementation's output for values that are the unit vectors. facts.json holds the tables.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, Weights, Workload
from attnbench.contract.bundled import bundled
from attnbench.workloads.masks import parse_mask

IMPLEMENTATIONS: dict[str, Implementation] = bundled()
FACTS: dict[str, Any] = json.loads(Path(__file__).with_name("facts.json").read_text(encoding="utf-8"))


def taking_part(**axes: int | str) -> Callable[..., Any]:
    """Run a test for each implementation that supports a workload of those sizes."""
    point = Workload(seq_len=8, **axes)
    names = [name for name, found in IMPLEMENTATIONS.items() if found.unsupported(point) is None]
    return pytest.mark.parametrize("name", names)


def assert_printed(actual: Tensor, table: dict[str, Any]) -> None:
    torch.testing.assert_close(actual.detach(), torch.tensor(table["value"]), rtol=0, atol=table["tolerance"])


def attend(name: str, query: Tensor, key: Tensor, value: Tensor, mask: str = "none") -> Tensor:
    """Query (B, H, T, K), key (B, H, S, K), value (B, H, S, V) -> (B, H, T, V)."""
    no_rows = torch.zeros(query.shape[1], 1, 1)
    sizes = Weights(
        query=no_rows.expand(-1, query.shape[-1], 1), key=no_rows.expand(-1, key.shape[-1], 1), value=no_rows
    )
    bound = BoundMask(parse_mask(mask), (query.shape[0], query.shape[2], key.shape[2]), "cpu")
    result: Tensor = IMPLEMENTATIONS[name].build(sizes).attend(query, key, value, bound)
    return result


def weights_of(name: str, query: Tensor, key: Tensor, mask: str = "none") -> Tensor:
    """Return the attention weights (B, H, T, S) that an implementation uses."""
    return attend(name, query, key, torch.eye(key.shape[2]).expand(*key.shape[:2], -1, -1), mask)


def project(name: str, weights: Weights, x: Tensor, mask: str = "none") -> Tensor:
    """Return the module's output (B, T, D)."""
    bound = BoundMask(parse_mask(mask), (x.shape[0], x.shape[1], x.shape[1]), "cpu")
    result: Tensor = IMPLEMENTATIONS[name].build(weights).eval()(x, mask=bound)
    return result


class TestTutorial000:
    """One head with its own value width, then three heads by batched products."""

    facts = FACTS["000"]

    def draws(self) -> tuple[Tensor, Weights, Weights]:
        torch.manual_seed(42)
        x = nn.Embedding(8, 16)(torch.tensor(self.facts["token_ids"])).detach()
        single = Weights(query=torch.rand(24, 16)[None], key=torch.rand(24, 16)[None], value=torch.rand(28, 16)[None])
        multi = Weights(query=torch.rand(3, 24, 16), key=torch.rand(3, 24, 16), value=torch.rand(3, 28, 16))
        return x, single, multi

    def heads(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor]:
        """Return query and key, both (1, H, T, K)."""
        return torch.einsum("td,hkd->htk", x, weights.query)[None], torch.einsum("td,hkd->htk", x, weights.key)[None]

    def test_token_ids_are_last_positions_among_the_sorted_words(self) -> None:
        words = ["life", "is", "short", "eat", "dessert", "first", "is", "life"]
        last = {word: position for position, word in enumerate(sorted(words))}
        assert [last[word] for word in words] == self.facts["token_ids"]

    def test_scores(self) -> None:
        x, single, multi = self.draws()
        for weights, table in ((single, "scores_single_head"), (multi, "scores_multi_head")):
            query, key = self.heads(x, weights)
            assert_printed((query @ key.transpose(-2, -1))[0].squeeze(0), self.facts[table])

    @taking_part(num_heads=1, head_dim=24, value_dim=8)
    def test_weights_of_the_first_word(self, name: str) -> None:
        x, single, _ = self.draws()
        assert_printed(weights_of(name, *self.heads(x, single))[0, 0, 0], self.facts["weights_first_word"])

    @taking_part(num_heads=3, head_dim=24, value_dim=8)
    def test_weights_follow_from_the_printed_scores_of_three_heads(self, name: str) -> None:
        x, _, multi = self.draws()
        expected = (torch.tensor(self.facts["scores_multi_head"]["value"]) / 24**0.5).softmax(-1)
        torch.testing.assert_close(weights_of(name, *self.heads(x, multi))[0], expected, rtol=0, atol=1e-4)

    @taking_part(num_heads=3, head_dim=24, value_dim=28, embed_dim=16, scope="module")
    def test_the_module_is_its_heads_side_by_side(self, name: str) -> None:
        x, _, multi = self.draws()
        expected = [
            ((x @ query.T) @ (x @ key.T).T / 24**0.5).softmax(-1) @ (x @ value.T)
            for query, key, value in zip(multi.query, multi.key, multi.value, strict=True)
        ]
        torch.testing.assert_close(project(name, multi, x[None])[0], torch.cat(expected, dim=-1))

    def test_the_printed_matrix_has_its_softmax_over_the_query_axis(self) -> None:
        """A quirk, reproduced as printed: dimension 0 of the scores is the query, so that no row adds up to 1."""
        query, key = self.heads(*self.draws()[:2])
        wrong = (query @ key.transpose(-2, -1) / 24**0.5)[0, 0].softmax(dim=0)
        assert_printed(wrong, self.facts["weights_single_head_dim0"])
        right = weights_of("fused", query, key)[0, 0]
        assert (wrong.sum(dim=1) - 1).abs().max() > 0.5
        torch.testing.assert_close(right.sum(dim=1), torch.ones(8))

    def test_with_three_heads_dimension_0_is_the_head_axis(self) -> None:
        """A quirk as above, for three heads, which share each pair of words between them."""
        x, _, multi = self.draws()
        query, key = self.heads(x, multi)
        wrong = (query @ key.transpose(-2, -1) / 24**0.5)[0].softmax(dim=0)
        torch.testing.assert_close(wrong.sum(dim=0), torch.ones(8, 8))
        assert (wrong - weights_of("fused", query, key)[0]).abs().max() > 0.5


class TestTutorial001:
    """A fused projection whose chunks are inside each head, and padding."""

    facts = FACTS["001"]

    def heads(self) -> tuple[Tensor, ...]:
        """Return query, key and value (1, 2, 4, 2) from the printed projection."""
        return torch.tensor(self.facts["qkv_data_point_1"]["value"])[None].chunk(3, dim=-1)

    def embedded(self) -> Tensor:
        torch.manual_seed(2)
        return nn.Embedding(5, 4, padding_idx=0)(torch.tensor([[1, 2, 0, 0], [1, 2, 3, 4]])).detach()

    def test_embedding(self) -> None:
        assert_printed(self.embedded().flatten(0, 1), self.facts["embedded"])

    @taking_part(num_heads=2, head_dim=2, value_dim=4)
    def test_scores_as_printed_without_the_mask(self, name: str) -> None:
        query, key, _ = self.heads()
        table = self.facts["scores_data_point_1_unmasked"]
        assert_printed((query @ key.transpose(-2, -1))[0] / 2**0.5, table)
        expected = torch.tensor(table["value"]).softmax(dim=-1)
        torch.testing.assert_close(weights_of(name, query, key)[0], expected, rtol=0, atol=table["tolerance"])

    @taking_part(num_heads=2, head_dim=2, value_dim=4, mask="padding(2)")
    def test_padding_gets_no_weight_once_the_mask_reaches_the_softmax(self, name: str) -> None:
        query, key, _ = self.heads()
        weights = weights_of(name, query, key, mask="padding(2)")[0]
        scores = torch.tensor(self.facts["scores_data_point_1_unmasked"]["value"])
        assert weights[..., 2:].eq(0).all()
        torch.testing.assert_close(weights[..., :2], scores[..., :2].softmax(dim=-1), rtol=0, atol=1e-4)

    @taking_part(num_heads=2, head_dim=2, embed_dim=4, scope="module")
    def test_chunks_inside_each_head(self, name: str) -> None:
        x, layer = self.embedded(), nn.Linear(4, 12, bias=False)
        query, key, value = layer(x).view(2, 4, 2, 6).transpose(1, 2).chunk(3, dim=-1)  # (B,T,12) -> 3 x (B,H,T,2)
        merged = ((query @ key.transpose(-2, -1) / 2**0.5).softmax(-1) @ value).transpose(1, 2).flatten(2)
        rows = layer.weight.detach().view(2, 3, 2, 4).unbind(1)  # head by head: its query, its key, its value
        weights = Weights(query=rows[0], key=rows[1], value=rows[2], out=torch.eye(4))
        torch.testing.assert_close(project(name, weights, x), merged)


class TestTutorial002:
    """One token's attention, then all tokens', with values wider than keys."""

    facts = FACTS["002"]

    def draws(self) -> tuple[Tensor, Weights]:
        torch.manual_seed(123)
        x = nn.Embedding(50000, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()
        torch.manual_seed(123)
        query, key, value = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 4)
        return x, Weights(query=query.T[None], key=key.T[None], value=value.T[None])

    def test_embedding(self) -> None:
        assert_printed(self.draws()[0], self.facts["embedded"])

    @taking_part(num_heads=1, head_dim=2, value_dim=6)
    def test_scores_of_the_second_token(self, name: str) -> None:
        x, weights = self.draws()
        query, key = (x @ weights.query[0].T)[None, None], (x @ weights.key[0].T)[None, None]
        assert_printed((query @ key.transpose(-2, -1))[0, 0, 1], self.facts["scores_second_token"])
        expected = (torch.tensor(self.facts["scores_second_token"]["value"]) / 2**0.5).softmax(dim=0)
        torch.testing.assert_close(weights_of(name, query, key)[0, 0, 1], expected, rtol=0, atol=1e-4)

    @taking_part(num_heads=1, head_dim=2, value_dim=4, embed_dim=3, scope="module")
    def test_context_of_the_second_token(self, name: str) -> None:
        x, weights = self.draws()
        share = (torch.tensor(self.facts["scores_second_token"]["value"]) / 2**0.5).softmax(dim=0)
        expected = share @ (x @ weights.value[0].T)  # (S,) @ (S,V) -> (V,)
        torch.testing.assert_close(project(name, weights, x[None])[0, 1], expected, rtol=0, atol=1e-4)


class TestTutorial003:
    """One head, a list of heads, fused heads, and fused heads under a causal mask."""

    facts = FACTS["003"]

    def batch(self) -> Tensor:
        return torch.tensor(self.facts["input"]).expand(2, -1, -1)  # nine tokens of width 3, twice

    def separate(self, num_heads: int) -> Weights:
        torch.manual_seed(123)
        rows = [[nn.Linear(3, 2, bias=False).weight.detach() for _ in range(3)] for _ in range(num_heads)]
        query, key, value = (torch.stack(part) for part in zip(*rows, strict=True))
        return Weights(query=query, key=key, value=value)

    def fused(self) -> Weights:
        torch.manual_seed(123)
        rows, out = nn.Linear(3, 6, bias=False).weight.detach(), nn.Linear(2, 2)
        key, query, value = rows.view(3, 2, 1, 3)  # keys first; two heads of width 1
        return Weights(query=query, key=key, value=value, out=out.weight.detach(), out_bias=out.bias.detach())

    def assert_both_rows_printed(self, output: Tensor, table: str) -> None:
        for row in output:
            assert_printed(row, self.facts[table])

    def test_scores_of_the_input_with_itself(self) -> None:
        x = self.batch()[0]
        assert_printed(x @ x.T, self.facts["scores_of_input_with_itself"])

    @pytest.mark.parametrize("example", facts["softmax_examples"])
    def test_softmax_sharpens_as_one_score_grows(self, example: dict[str, list[float]]) -> None:
        assert_printed(torch.tensor(example["logits"]).softmax(dim=0), {"value": example["weights"], "tolerance": 1e-4})

    @taking_part(num_heads=1, head_dim=2, embed_dim=3, scope="module")
    def test_simple(self, name: str) -> None:
        self.assert_both_rows_printed(project(name, self.separate(1), self.batch()), "simple")

    @taking_part(num_heads=2, head_dim=2, embed_dim=3, scope="module")
    def test_module_list(self, name: str) -> None:
        self.assert_both_rows_printed(project(name, self.separate(2), self.batch()), "module_list")

    @taking_part(num_heads=2, head_dim=1, embed_dim=3, scope="module")
    def test_fused(self, name: str) -> None:
        self.assert_both_rows_printed(project(name, self.fused(), self.batch()), "fused")

    @taking_part(num_heads=2, head_dim=1, embed_dim=3, scope="module")
    def test_fused_causal_whose_dropout_is_never_applied(self, name: str) -> None:
        """The quirk changes nothing here: in evaluation, an applied dropout leaves the weights unchanged."""
        x, weights, dropout = self.batch(), self.fused(), nn.Dropout(0.5).eval()
        query, key, value = (x @ rows.flatten(0, 1).T for rows in (weights.query, weights.key, weights.value))
        heads = []
        for head in range(2):
            scores = query[..., head, None] @ key[..., head, None].transpose(-2, -1)  # width 1: the scale is 1
            scores = scores.masked_fill(torch.ones(9, 9).triu(1).bool(), -torch.inf)
            heads.append(dropout(scores.softmax(dim=-1)) @ value[..., head, None])
        assert weights.out is not None
        expected = torch.cat(heads, dim=-1) @ weights.out.T + weights.out_bias
        torch.testing.assert_close(project(name, weights, x, mask="causal"), expected)
