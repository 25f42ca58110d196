"""The line that declares to an adapter what a check takes for a mistake, and its author may mean."""

import re

LINES = {
    "bottom_right_for_top_left": 'adapt(..., masks=("none", "causal_bottom_right"))',
    "causal_unasked": 'adapt(..., masks=("causal",))',
    "heads_for_positions": 'adapt(..., layout="bthk")',
    "mask_added_as_number": "adapt(..., call=lambda f, q, k, v, mask: f(q, k, v, mask.added(q.dtype)))",
    "mask_inverted": "adapt(..., call=lambda f, q, k, v, mask: f(q, k, v, mask.hidden))",
    "no_scale": "adapt(..., scale=1.0)",
}
_ROTARY = re.compile(r"\(rotary embedding, (?:in )?(halves|interleaved), .* base (\S+)\)")


def declaration(name: str, words: str) -> str:
    """A sentence with the line to write if the mistake `name`, described by `words`, is meant; or ""."""
    rotary = _ROTARY.search(words)
    base = float(f"{float(rotary[2]):.3g}") if rotary else 0.0  # the fit is off by less
    line = f'adapt(..., rotary="{rotary[1]}({base:g})")' if rotary else LINES.get(name)
    return f" If this is meant, write {line}." if line else ""
