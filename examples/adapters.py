"""Functions and modules as people write them, for the table of docs/adapters.md: nothing here uses attnbench."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everybody imports it


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **more: object) -> Tensor:
    """Compute the attention of every example below, so that a mistake planted here is in all of them."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **more)  # type: ignore[arg-type]


def attention(q, k, v, attn_mask=None):
    return attend(q, k, v, attn_mask)


def flash(q, k, v, causal, softmax_scale=None):
    """All tensors are (B, T, H, K), as in the package flash-attn."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return attend(q, k, v, is_causal=causal, scale=softmax_scale).transpose(1, 2)


def causal_only(q, k, v):
    return attend(q, k, v, is_causal=True)


def at_the_end(q, k, v, is_causal=False):
    """The causal mask is aligned at the end: the last query sees every key."""
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return attend(q, k, v, seen if is_causal else None)


def windowed(q, k, v):
    """Query i sees the keys from i-8 to i."""
    apart = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    return attend(q, k, v, (apart >= 0) & (apart < 9))


def rotated(x: Tensor) -> Tensor:
    """Rotate x (B, H, T, K) with base 10000: columns i and i + K/2 form a pair."""
    pairs = x.shape[-1] // 2
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(pairs) / pairs)
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)


def rotary(q, k, v, is_causal=False):
    return attend(rotated(q), rotated(k), v, is_causal=is_causal)


def unscaled(q, k, v, mask=None):
    return attend(q, k, v, mask, scale=1.0)


def additive(q, k, v, mask=None):
    """The mask contains numbers that are added to the scores."""
    return attend(q, k, v, None if mask is None else mask.to(q.dtype))


def hides_true(q, k, v, mask=None):
    """A key is hidden where the mask is True."""
    return attend(q, k, v, None if mask is None else ~mask)


def fixed_length(q, k, v):
    """Only 24 tokens are accepted, as in models with a learned table of positions."""
    if q.shape[2] != 24:
        raise RuntimeError("24 tokens")
    return attend(q, k, v)


def self_attention(q, k, v, mask=None):
    if q.shape[2] != k.shape[2]:
        raise NotImplementedError("as many keys as queries")
    return attend(q, k, v, mask)


def linear_attention(q, k, v):
    """An approximation of attention: small scores stand in for those of linear attention."""
    return attend(0.1 * q, 0.1 * k, v)


class Packed(nn.Module):
    """One linear layer for query, key and value, and one for the output."""

    def __init__(self, dim, num_heads, *, bias=True):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=bias), nn.Linear(dim, dim, bias=bias)

    def forward(self, x, mask=None):
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (3,B,H,T,K)
        return self.proj(self.core(q, k, v, mask).transpose(1, 2).flatten(2))

    def core(self, q, k, v, mask):
        return attend(q, k, v, mask)


class GPT(Packed):
    """Causal, whatever mask is given."""

    def core(self, q, k, v, mask):
        return attend(q, k, v, is_causal=True)


class Llama(nn.Module):
    """Causal attention with grouped heads and rotary embedding, without biases."""

    def __init__(self, dim, num_heads, num_kv_heads):
        super().__init__()
        self.width = dim // num_heads
        self.wq, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(dim, num_kv_heads * self.width, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for layer in (self.wq, self.wk, self.wv))
        k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
        return self.wo(attend(rotated(q), rotated(k), v, is_causal=True).transpose(1, 2).flatten(2))


class Whisper(nn.Module):
    """The key projection has no bias, and a mask of numbers (B or 1, 1, T, S) is added to the scores."""

    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)

    def forward(self, x, context, mask):
        tokens = (self.query, x), (self.key, context), (self.value, context)
        q, k, v = (layer(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for layer, x in tokens)
        return self.out(attend(q, k, v, mask).transpose(1, 2).flatten(2)), None


class Padded(Packed):
    """The lengths (B,) of the batch rows replace a mask."""

    def forward(self, x, lengths=None):
        places = torch.arange(x.shape[1])
        return super().forward(x, None if lengths is None else (places < lengths[:, None])[:, None, None])


class Gained(Packed):
    """The module has a parameter that does not belong to attention."""

    def __init__(self, dim, num_heads):
        super().__init__(dim, num_heads)
        self.gain = nn.Parameter(torch.rand(dim))

    def forward(self, x, mask=None):
        return super().forward(self.gain * x, mask)


class Residual(Packed):
    def forward(self, x, mask=None):
        return x + super().forward(x, mask)


class Cached(Packed):
    """Causal attention with a cache: keys and values of earlier calls are visible, too."""

    past: tuple[Tensor, Tensor] | None = None

    def core(self, q, k, v, mask):
        if self.past is not None:
            k, v = (torch.cat(pair, dim=2) for pair in zip(self.past, (k, v), strict=True))
        self.past = k, v
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        return attend(q, k, v, seen)


class Heads(nn.Module):
    """A list of heads without an output projection, as in tutorials."""

    def __init__(self, dim, num_heads):
        super().__init__()
        layers = lambda: {name: nn.Linear(dim, dim // num_heads, bias=False) for name in ("query", "key", "value")}  # noqa: E731
        self.heads = nn.ModuleList(nn.ModuleDict(layers()) for _ in range(num_heads))

    def forward(self, x):
        names = ("query", "key", "value")
        return torch.cat([attend(*(head[name](x)[:, None] for name in names))[:, 0] for head in self.heads], dim=-1)
