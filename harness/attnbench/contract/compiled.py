"""torch.compile as this project uses it: whole graphs at fixed sizes, or an error; never a silent way back to eager.

PyTorch gives up on a function after `recompile_limit` compilations and runs it eagerly from then on, with no more than
a warning: a run meets more sizes than that, so the limit is lifted, and reaching it is an error.

Source: https://docs.pytorch.org/docs/stable/generated/torch.compile.html, on recompilation:
https://docs.pytorch.org/docs/stable/compile/programming_model.recompilation.html
"""

from collections.abc import Callable
from typing import Any

import torch


class NotOneGraphError(Exception):
    """A function cannot be captured as one graph; says where it breaks."""

    def __init__(self, reason: object) -> None:
        """Keep the first line of what torch.compile says."""
        first = (str(reason).strip().splitlines() or ["no reason given"])[0]
        super().__init__(f"torch.compile cannot take it as one graph: {first}")


def compile_whole(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` compiled at its first call, and again for other sizes, strides, dtypes and gradient modes.

    Raises, when called:
        torch._dynamo.exc.Unsupported: it cannot be captured as one graph.
    """
    settle()
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False, fullgraph=True)
    return compiled


def settle() -> None:
    """Set what torch.compile does in this process; to be called before anything is compiled."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch
    import torch._inductor.config as inductor

    dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 10_000
    dynamo.fail_on_recompile_limit_hit = True
    functorch.donated_buffer = False  # direction `backward` calls the backward pass of one graph again and again
    inductor.cpp.enable_kernel_profile = True  # generated kernels have names of their own in profiles
