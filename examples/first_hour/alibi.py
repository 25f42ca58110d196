"""ALiBi with grouped heads, and a mistake that is easy to make: the two sizes of the heads' axis are exchanged."""


def mine(query, key, value, *, bias=None, scale=None, num_kv_heads=1):
    """Query (B, H, T, K), key and value (B, G, S, K); bias (1, H, T, S) of ALiBi, with -inf where a key is hidden."""
    each = query.shape[1] // num_kv_heads
    query = query.unflatten(1, (num_kv_heads, each))  # (B, G, H/G, T, K)
    scores = query @ key.unsqueeze(2).transpose(-2, -1) * scale
    bias = bias.unflatten(-3, (each, num_kv_heads)).transpose(-4, -3)  # right: unflatten(-3, (num_kv_heads, each))
    scores = scores + bias
    return (scores.softmax(dim=-1) @ value.unsqueeze(2)).flatten(1, 2)
