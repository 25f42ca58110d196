"""The functions of the README: a right one, and one with a mistake."""


def mine(query, key, value, *, mask=None):
    """All (B, H, T, K); mask is None or boolean, True where a key is visible."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is None:
        return scores.softmax(dim=-1) @ value
    weights = scores.masked_fill(~mask, float("-inf")).softmax(dim=-1)
    return weights.masked_fill(~mask, 0.0) @ value  # a query that sees no key gets 0, not NaN


def mistaken(query, key, value, *, mask=None):
    """Like `mine`, but the softmax is over the queries instead of the keys."""
    scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.softmax(dim=-2).nan_to_num(0.0) @ value
