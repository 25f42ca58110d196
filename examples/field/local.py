from local_attention import LocalAttention

from attnbench.contract.adapters import adapt

local = adapt(
    LocalAttention(window_size=8, causal=True, exact_windowsize=True, autopad=True),
    call=lambda f, q, k, v, mask: f(q, k, v),
    masks=("sliding_window(9)",),
    sizes={"kv_len": 0},
)
