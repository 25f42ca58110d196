"""Attention before a change: scores, softmax and the product with the values."""


def attention(query, key, value, *, mask=None):
    """Query, key and value (B, H, T, K); mask is True where a key is visible."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value
