"""Scaled dot-product attention on a batch, a causal mask, why scores are scaled, and the words of two sentences.

The notes print no numbers, so all numbers are drawn here.
"""

import math

import torch
from torch import Tensor, nn

from attnbench.checking import steps
from attnbench.contract import Weights
from examples.tutorials.blocks import attend_tokens, row_mask, seeded

SENTENCES = ("time flies like an arrow", "fruit flies like a banana")
NUM_HEADS, HEAD_WIDTH, EMBED_WIDTH = 2, 4, 8
VECTOR = (0.1, -0.2, 0.3, -0.2, 0.5)
TIMES = 100
WIDE = 10_000


def batched() -> tuple[Tensor, Tensor, Tensor]:
    """Draw query, key and value (B, T, K) of two sequences of four tokens."""
    with seeded(0):
        query, key, value = torch.randn(3, 2, 4, HEAD_WIDTH)
    return query, key, value


def words() -> tuple[Tensor, Weights]:
    """Draw a vector for each word, in one row for both sentences (T, D), and the weights of two heads."""
    spoken = " ".join(SENTENCES).split()
    known = sorted(set(spoken))
    with seeded(0):
        vectors = nn.Embedding(len(known), EMBED_WIDTH)
        shape = (NUM_HEADS, HEAD_WIDTH, EMBED_WIDTH)
        query, key, value = (torch.randn(shape) / math.sqrt(EMBED_WIDTH) for _ in range(3))
    x = vectors(torch.tensor([known.index(word) for word in spoken])).detach()
    return x, Weights(query=query, key=key, value=value)


def wide_scores() -> Tensor:
    """Compute the products (S,) of a wide query with five wide keys, all standard normal: their spread is sqrt(K)."""
    with seeded(0):
        return torch.randn(5, WIDE) @ torch.randn(WIDE)


def tables() -> dict[str, Tensor]:
    """Compute every table, by name."""
    query, key, value = (tensor[:, None] for tensor in batched())  # (B,T,K) -> (B,H=1,T,K)
    plain = steps.attend(query, key, value, row_mask(4, 4, batch_size=2))
    causal = steps.attend(query, key, value, row_mask(4, 4, "causal", batch_size=2))
    vector, products = torch.tensor(VECTOR), wide_scores()
    x, weights = words()
    split = len(SENTENCES[0].split())
    together = attend_tokens(x, weights)["weights"]  # (H,T,S)
    return {
        "weights_batched": plain["weights"][:, 0],
        "context_batched": plain["context"][:, 0],
        "scores_causal": causal["masked scores"][:, 0],
        "weights_causal": causal["weights"][:, 0],
        "context_causal": causal["context"][:, 0],
        "softmax_of_a_vector": vector.softmax(dim=0),
        "softmax_of_the_vector_times_100": (vector * TIMES).softmax(dim=0),
        "softmax_of_wide_products": products.softmax(dim=0),
        "softmax_of_wide_products_scaled": (products / math.sqrt(WIDE)).softmax(dim=0),
        "weights_of_both_sentences": together,
        "weights_first_sentence_on_second": together[:, :split, split:],
        "weights_second_sentence_on_first": together[:, split:, :split],
    }
