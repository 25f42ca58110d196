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
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, Weights
from attnbench.contract.loading import implementation
from attnbench.devices import environment
from attnbench.workloads.masks import Mask, parse_mask
from attnbench.workloads.policy import ITSELF, LEARN, OTHERWISE, USUAL_PATH, VARIABLE, Policy, default_path
from attnbench.workloads.workload import DTYPES, Workload

MOST_KINDS = 64
"""The number of kinds of calls that are kept; the least recently used is evicted. A mask may be kept with each."""
TORCH_DTYPES = {getattr(torch, name): name for name in DTYPES}
PolicyOrFile = Policy | str | Path
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # noqa: SLF001 - the public one is of one device
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_num_threads = torch.get_num_threads
_sdpa = torch.nn.functional.scaled_dot_product_attention


class Call(NamedTuple):
    """The facts about query, key and value that a choice depends on."""

    query: torch.Size
    key: torch.Size
    value: torch.Size
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]
    device: torch.device
    needs_grad: bool
    num_threads: int

    def workload(self, rule: Mask, scale: float | None) -> Workload | None:
        """The call as a workload, or None if its shapes or dtypes do not fit one."""
        query, key, value, dtypes = self.query, self.key, self.value, self.dtypes
        if not len(query) == len(key) == len(value) == 4 or dtypes[0] not in TORCH_DTYPES:  # noqa: PLR2004 - B, H, T, K
            return None
        if len(set(dtypes)) > 1 or key[:3] != value[:3] or (key[0], key[3]) != (query[0], query[3]):
            return None
        try:
            return Workload(
                batch_size=query[0],
                seq_len=query[2],
                kv_len=key[2],
                num_heads=query[1],
                num_kv_heads=key[1],
                head_dim=query[3],
                value_dim=value[3],
                dtype=TORCH_DTYPES[dtypes[0]],
                device=str(self.device),
                mask=str(rule),
                direction="forward_backward" if self.needs_grad else "inference",
                num_threads=self.num_threads,
                scale=scale or 0.0,
            )
        except ValueError:
            return None

    def attend_by(self, name: str, mask: BoundMask) -> Attend:
        """The `attend` of an implementation, built for these sizes, with its mask."""
        sizes = (self.query[1], self.query[3], self.key[1], self.value[3])
        attend: Callable[..., Tensor] = _module(name, sizes, self.dtypes[0], self.device).attend  # type: ignore[assignment] # `unsupported` saw to it
        return lambda query, key, value: attend(query, key, value, mask)


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
    """
    if mask is not None or _is_compiling() or _is_autocast():
        return _sdpa(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    attend = bound(
        query.shape,
        key.shape,
        value.shape,
        (query.dtype, key.dtype, value.dtype),
        query.device,
        _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
        _num_threads(),
        is_causal,
        scale,
        policy,
    )
    return attend(query, key, value)


@lru_cache(maxsize=MOST_KINDS)
def bound(*facts: Any) -> Attend:  # noqa: ANN401 - those of a Call, then is_causal, scale and the policy
    """The function for calls of one kind, without a mask tensor."""
    *described, is_causal, scale, policy_or_file = facts
    call = Call(*described)
    is_grouped = len(call.query) > 1 < len(call.key) and call.query[1] != call.key[1]
    sdpa = partial(_sdpa, is_causal=is_causal, scale=scale, enable_gqa=is_grouped)
    policy, rule = usable(policy_or_file), rule_of(is_causal=is_causal)
    workload = None if policy is None else call.workload(rule, scale)
    if policy is None or workload is None:
        return sdpa
    name, reason = supported(policy.choose(workload), workload)
    if name == OTHERWISE or reason is not None:
        return sdpa
    return call.attend_by(name, BoundMask(rule, workload_sizes(workload), call.device, scale=scale))


def attend_by_policy(query: Tensor, key: Tensor, value: Tensor, mask: BoundMask) -> Tensor:
    """Attention with any mask of the contract, as the default policy chooses.

    Raises:
        ValueError: neither the chosen implementation nor `sdpa` supports the call.
    """
    needs_grad = _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    dtypes = (query.dtype, key.dtype, value.dtype)
    call = Call(query.shape, key.shape, value.shape, dtypes, query.device, needs_grad, _num_threads())
    return _with_mask(call, mask)(query, key, value)


@lru_cache(maxsize=MOST_KINDS)
def _with_mask(call: Call, mask: BoundMask) -> Attend:
    """The function for calls of one kind with that mask."""
    workload, policy = call.workload(mask.rule, mask.scale), usable(None)
    if workload is None:  # the rule has no name
        if not mask.rule.is_additive:
            raise ValueError(f"{OTHERWISE} takes no mask that changes scores by more than a bias")
        return call.attend_by(OTHERWISE, mask)
    name, reason = supported(OTHERWISE if policy is None else policy.choose(workload), workload)
    if reason is not None:
        raise ValueError(reason)
    return call.attend_by(name, mask)


def reason_against(workload: Workload) -> str | None:
    """Return why the default policy cannot compute a workload, or None."""
    path = default_path()
    if path is None:
        return f"there is no policy: learn one with {LEARN}, and name it in {VARIABLE} or put it at {USUAL_PATH}"
    try:
        policy = read(path)
    except ValueError as error:
        return str(error)
    if policy.machine != _machine():
        return f"the policy {path} is {_elsewhere(policy)}"
    # A call that needs gradients is followed by its backward pass.
    direction = workload.direction if workload.direction == "inference" else "forward_backward"
    workload = msgspec.structs.replace(workload, scope="attention", direction=direction)
    return supported(policy.choose(workload), workload)[1]


@lru_cache(maxsize=8)
def read(path: str | Path) -> Policy:
    """Read the policy in a file, once.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    return Policy.load(path)


def usable(policy: PolicyOrFile | None) -> Policy | None:
    """The policy to use here; None, with one warning, if it is for another machine.

    Raises:
        ValueError: it cannot be read.
    """
    chosen = default_path() if policy is None else policy
    if chosen is None:
        return None
    chosen = chosen if isinstance(chosen, Policy) else read(chosen)
    if chosen.machine != _machine():
        _warn_once(chosen)
        return None
    return chosen


@lru_cache(maxsize=8)
def _warn_once(policy: Policy) -> None:
    message = f"the policy is {_elsewhere(policy)}; until then, attention is PyTorch's own"
    warnings.warn(message, stacklevel=5)  # this, usable, bound, attention, and its caller


def _elsewhere(policy: Policy) -> str:
    return (
        f"of another machine or other versions (fingerprint {policy.machine}, and here it is {_machine()}): learn one "
        f"here with {LEARN}"
    )


@lru_cache(maxsize=1)
def _machine() -> str:
    return environment.collect().machine_fingerprint


@cache
def rule_of(*, is_causal: bool) -> Mask:
    """The mask of a call without a mask tensor."""
    return parse_mask("causal" if is_causal else "none")


def workload_sizes(workload: Workload) -> tuple[int, int, int]:
    """B, T, S."""
    return workload.batch_size, workload.seq_len, workload.kv_len


def supported(name: str, workload: Workload) -> tuple[str, str | None]:
    """The named implementation, or `sdpa` if it does not support the workload; and why `sdpa` does not either."""
    reason = _implementation(name).unsupported(workload)
    if reason is not None and name != OTHERWISE:
        name, reason = OTHERWISE, _implementation(OTHERWISE).unsupported(workload)
    return name, reason


@lru_cache(maxsize=MOST_KINDS)
def _implementation(name: str) -> Implementation:
    """An installed implementation, loaded once."""
    return implementation(name)


@lru_cache(maxsize=MOST_KINDS)
def _module(name: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """An implementation for sizes H, K, G, V, with weights that `attend` does not read."""
    heads, width, groups, value_dim = sizes
    assert name != ITSELF  # Policy has checked it
    with torch.inference_mode(mode=False):
        shapes = {"query": (heads, width, 1), "key": (groups, width, 1), "value": (groups, value_dim, 1)}
        weights = {part: torch.zeros(shape, dtype=dtype, device=device) for part, shape in shapes.items()}
        return _implementation(name).build(Weights(**weights)).eval()


def register_attention(name: str = "attnbench") -> None:
    """Register `attention` with the package transformers, as `attn_implementation=name` of its models.

    Calls with a mask, dropout or anything else that a policy does not cover go to the package's own `sdpa`.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    package_sdpa: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(  # noqa: PLR0913, PLR0917 - the package's own signature
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,  # noqa: FBT001
        **more: Any,  # noqa: ANN401
    ) -> tuple[Tensor, None]:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, T, H, V)."""
        for argument in ("softcap", "s_aux"):
            if more.get(argument) is not None:
                raise ValueError(
                    f"{name} does not take {argument}, which the model asks for: choose another, such as eager"
                )
        has_more = any(more.get(argument) is not None for argument in ("position_bias", "cache"))
        if attention_mask is not None or dropout or has_more:
            more |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            result: tuple[Tensor, None] = package_sdpa(module, query, key, value, attention_mask, **more)
            return result
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = bool(is_causal) and query.shape[2] > 1  # a single query sees every key
        output = attention(query, key, value, is_causal=is_causal, scale=scaling)
        return output.transpose(1, 2).contiguous(), None  # (B,H,T,V) -> (B,T,H,V)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
