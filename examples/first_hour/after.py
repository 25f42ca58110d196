"""The function of before.py after a change: somebody wanted to be safe, and copies the inputs and the scores."""


def attention(query, key, value, *, mask=None):
    """Query, key and value (B, H, T, K); mask is True where a key is visible."""
    query, key, value = (each.clone() for each in (query, key, value))
    scores = (query @ key.transpose(-2, -1)).clone() / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-1) @ value
