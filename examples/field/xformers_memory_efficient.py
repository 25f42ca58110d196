from xformers.ops import memory_efficient_attention

from attnbench.contract.adapters import adapt

xformers_memory_efficient = adapt(
    memory_efficient_attention,
    layout="bthk",
    call=lambda f, q, k, v, mask: f(q, k, v, mask.added_as("bhts", q.dtype)),
)
