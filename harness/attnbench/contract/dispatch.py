"""`attention`: scaled_dot_product_attention, computed by the implementation that a policy chooses for the call.

The first call of a kind (shapes, dtype, device, whether gradients are needed, is_causal, scale, threads) asks the
policy and builds its choice; later calls look it up. PyTorch's own function runs without a policy or with one of
another machine, for a mask given as a tensor, inside torch.compile and autocast, and for calls that the chosen
implementation does not support.

Shapes as in the contract.
"""

import warnings
from collections.abc import Callable
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Weights
from attnbench.contract.loading import implementation
from attnbench.devices import environment
from attnbench.workloads.policy import LEARN, OTHERWISE, USUAL_PATH, VARIABLE, Policy, default_path
from attnbench.workloads.workload import DTYPES, Workload

MOST_KINDS = 64
"""The number of kinds of calls that are kept; the least recently used is evicted. A mask may be kept with each."""
TORCH_DTYPES = {getattr(torch, name): name for name in DTYPES}
PolicyOrFile = Policy | str | Path
_is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # noqa: SLF001 - the public one is of one device
_sdpa = torch.nn.functional.scaled_dot_product_attention


def attention(  # noqa: PLR0913 - those of scaled_dot_product_attention, and the policy
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    policy: PolicyOrFile | None = None,
) -> Tensor:
    """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V), as a policy chooses.

    `mask`, `is_causal` (aligned at the start) and `scale` are those of scaled_dot_product_attention, which computes the
    call if `mask` is given. `policy` is a Policy or its file; None means the file that ATTNBENCH_POLICY names, else
    results/policy.json, else none. A file is read once. Inside torch.compile and autocast, PyTorch's own function runs.

    Raises:
        ValueError: the policy cannot be read.

    >>> query, (key, value) = torch.randn(1, 4, 8, 16), torch.randn(2, 1, 2, 8, 16)
    >>> attnbench.attention(query, key, value, is_causal=True).shape
    torch.Size([1, 4, 8, 16])
    """
    if mask is not None or torch.compiler.is_compiling() or _is_autocast():
        return _sdpa(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    needs_grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    attend = chosen(
        (query.shape, key.shape, value.shape),
        (query.dtype, key.dtype, value.dtype),
        query.device,
        needs_grad,
        torch.get_num_threads(),
        is_causal,
        scale,
        policy,
    )
    return attend(query, key, value)


@lru_cache(maxsize=MOST_KINDS)
def chosen(  # noqa: PLR0913, PLR0917 - the facts that a choice depends on
    shapes: tuple[torch.Size, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    needs_grad: bool,  # noqa: FBT001 - a key of the cache
    num_threads: int,
    is_causal: bool,  # noqa: FBT001
    scale: float | None,
    policy_or_file: PolicyOrFile | None,
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The function for calls of one kind, without a mask tensor."""
    query, key, _ = shapes
    is_grouped = len(query) > 1 < len(key) and query[1] != key[1]
    sdpa = partial(_sdpa, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
    policy = usable(policy_or_file)
    axes = {"num_threads": num_threads, "scale": scale or 0.0, "mask": "causal" if is_causal else "none"}
    axes |= {"device": str(device), "direction": "forward_backward" if needs_grad else "inference"}
    workload = None if policy is None else workload_of(shapes, dtypes, axes)
    if policy is None or workload is None or (name := policy.choose(workload)) == OTHERWISE:
        return sdpa
    choice = implementation(name)
    if choice.unsupported(workload):
        return sdpa
    sizes = (workload.batch_size, workload.seq_len, workload.kv_len)
    mask = BoundMask(workload.mask_rule, sizes, device, scale=scale)
    with torch.inference_mode(mode=False):
        narrow = Weights.shapes(workload, 1)
        parts = {part: torch.zeros(narrow[part], dtype=dtypes[0], device=device) for part in ("query", "key", "value")}
        module = choice.build(Weights(**parts)).eval()  # `attend` does not read them
    attend: Callable[..., Tensor] = module.attend  # type: ignore[assignment] # `unsupported` saw to it
    return lambda query, key, value: attend(query, key, value, mask)


def workload_of(
    shapes: tuple[torch.Size, ...], dtypes: tuple[torch.dtype, ...], axes: dict[str, Any]
) -> Workload | None:
    """A call as a workload with other axes, or None if its shapes or dtypes do not fit one."""
    query, key, value = shapes
    if not len(query) == len(key) == len(value) == 4 or dtypes[0] not in TORCH_DTYPES:  # noqa: PLR2004 - B, H, T, K
        return None
    if len(set(dtypes)) > 1 or key[:3] != value[:3] or (key[0], key[3]) != (query[0], query[3]):
        return None
    batch_size, num_heads, seq_len, head_dim = query
    axes |= {"batch_size": batch_size, "num_heads": num_heads, "seq_len": seq_len, "head_dim": head_dim}
    axes |= {"num_kv_heads": key[1], "kv_len": key[2], "value_dim": value[3], "dtype": TORCH_DTYPES[dtypes[0]]}
    try:
        return Workload(**axes)
    except ValueError:
        return None


def reason_against(workload: Workload) -> str | None:  # noqa: ARG001 - the signature of `unsupported`
    """Return why there is no default policy for this machine, or None."""
    path = default_path()
    if path is None:
        return f"there is no policy: learn one with {LEARN}, and name it in {VARIABLE} or put it at {USUAL_PATH}"
    try:
        return elsewhere(read(path))
    except ValueError as error:
        return str(error)


read = lru_cache(maxsize=8)(Policy.load)
"""Read the policy in a file, once. Raises ValueError: there is none, or it is damaged."""


def usable(policy: PolicyOrFile | None) -> Policy | None:
    """The policy to use here; None, with one warning, if it is for another machine.

    Raises:
        ValueError: it cannot be read.
    """
    named = default_path() if policy is None else policy
    found = named if named is None or isinstance(named, Policy) else read(named)
    if found is None or elsewhere(found) is None:
        return found
    _warn_once(found)
    return None


@lru_cache(maxsize=8)
def _warn_once(policy: Policy) -> None:
    message = f"{elsewhere(policy)}; until then, attention is PyTorch's own"
    warnings.warn(message, stacklevel=5)  # this, usable, chosen, attention, and its caller


def elsewhere(policy: Policy) -> str | None:
    """Return why a policy is not for this machine, or None."""
    if policy.machine == (here := _machine()):
        return None
    there = f"of another machine or other versions (fingerprint {policy.machine}, and here it is {here})"
    return f"the policy is {there}: learn one here with {LEARN}"


_machine = cache(lambda: environment.collect().machine_fingerprint)


def register_attention(name: str = "attnbench") -> None:
    """Register `attention` with the package transformers, as `attn_implementation=name` of its models.

    Calls with a mask, dropout or anything else that a policy does not cover go to the package's own `sdpa`.

    Raises:
        ModuleNotFoundError: transformers is not installed.

    >>> attnbench.register_attention("mine")
    >>> "mine" in transformers.AttentionInterface().valid_keys()
    True
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    package_sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        **more: Any,  # noqa: ANN401 - the package's own names
    ) -> tuple[Tensor, None]:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, T, H, V)."""
        passed = {argument for argument, value in more.items() if value is not None}
        for argument in passed & {"softcap", "s_aux"}:
            raise ValueError(f"{name} does not take {argument}, which the model asks for: choose another, as eager")
        if attention_mask is not None or more.get("dropout") or passed & {"position_bias", "cache"}:
            result: tuple[Tensor, None] = package_sdpa(module, query, key, value, attention_mask, **more)
            return result
        is_causal = more["is_causal"] if "is_causal" in passed else getattr(module, "is_causal", True)
        is_causal = bool(is_causal) and query.shape[2] > 1  # a single query sees every key
        output = attention(query, key, value, is_causal=is_causal, scale=more.get("scaling"))
        return output.transpose(1, 2).contiguous(), None  # (B,H,T,V) -> (B,T,H,V)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
