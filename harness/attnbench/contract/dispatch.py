"""`attention`: scaled_dot_product_attention, computed by the implementation that a policy chooses for the call.

The first call of a kind (shapes, dtype, device, whether gradients are needed, is_causal, scale, threads) asks the
policy and builds what it chooses; later ones look it up. Where the policy leaves open who is the fastest, those who may
be are tried on the call's own tensors, and what came out holds for lengths nearby, too. PyTorch's own runs where there
is no policy or it is of another machine, where a mask is given as a tensor, inside of torch.compile and of autocast,
and wherever the chosen implementation does not support the call.

Shapes as in the contract.
"""

import math
import threading
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.contract import BoundMask, Implementation, Weights, trial
from attnbench.contract.loading import implementation
from attnbench.devices import device, environment, names
from attnbench.workloads.counts import score_matrix_bytes
from attnbench.workloads.masks import Causal, Mask, parse_mask
from attnbench.workloads.policy import ITSELF, OTHERWISE, USUAL_PATH, VARIABLE, Policy, default_path
from attnbench.workloads.workload import DTYPES, Workload

MOST_KINDS = 64
"""Of calls that are kept; the oldest goes first. A mask may be kept with each."""
MOST_CHOICES = 1024
"""That are remembered, with lengths rounded."""
STEPS = 4
"""An octave of lengths has so many choices: as a cache grows by a token a call, hardly any call is a first one."""
OTHERS_BYTES = 2**25
"""What something else writes between the calls of a trial: more than the caches of one core hold."""
SHORT_OF_MEMORY = 16
"""No trial on the processor where the free memory does not hold so many matrices of scores."""
TORCH_DTYPES = {getattr(torch, name): name for name in DTYPES}
Given = Policy | str | Path
"""A policy, or the file that holds it."""
Tensors = tuple[Tensor, Tensor, Tensor]
"""Query, key, value."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_is_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled  # noqa: SLF001 - the public one is asked for one device
_is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms  # noqa: SLF001 - the public one, without its wrapper
_is_compiling = torch.compiler.is_compiling
_is_grad_enabled = torch.is_grad_enabled
_num_threads = torch.get_num_threads
_own = torch.nn.functional.scaled_dot_product_attention


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Who computes workloads like that one, and among whom a trial chose: of one name, there was none."""

    workload: Workload
    name: str
    contenders: tuple[str, ...]


class Dispatcher:
    """What calls are bound to, by their kinds."""

    def __init__(self) -> None:
        """Nothing is bound or chosen yet, and no file was read."""
        self._bound: dict[Hashable, Attend] = {}
        self._choices: dict[Hashable, Choice] = {}
        self._lock = threading.Lock()
        self._trials = threading.RLock()  # one at a time: two would slow down one another

    def attention(  # noqa: PLR0913 - those of scaled_dot_product_attention, and the policy
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        policy: Given | None = None,
        trials: bool = True,
    ) -> Tensor:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, H, T, V), as a policy chooses.

        `mask`, `is_causal` (aligned at the start) and `scale` are those of scaled_dot_product_attention, which computes
        the call where `mask` is given. `policy` is a Policy or its file; None stands for the file that ATTNBENCH_POLICY
        names, else results/policy.json, else none. A file is read once. Inside of torch.compile and of autocast,
        PyTorch's own runs.

        Where the policy is unsure, the first call of a kind takes as long as some of its contenders' calls, forward
        and backward if gradients are needed: with `trials=False`, and with torch.use_deterministic_algorithms, since
        contenders differ by their rounding, what is expected to be the fastest is called untried.

        Raises:
            ValueError: the policy cannot be read.
        """
        if mask is not None or _is_compiling() or _is_autocast():
            return _own(query, key, value, mask, 0.0, is_causal, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
        kind = (
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            query.device,
            is_causal,
            scale,
            _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad),
            _num_threads(),
            policy,
            trials and not _is_deterministic(),
        )
        try:
            attend = self._bound[kind]
        except KeyError:
            rule = rule_of(is_causal=is_causal)
            attend = self._bind(kind, lambda: self._drop_in((query, key, value), rule, scale, policy, trials=trials))
        return attend(query, key, value)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: BoundMask, *, trials: bool = True) -> Tensor:
        """The same with any mask that an implementation is given.

        Raises:
            ValueError: neither the chosen implementation nor `sdpa` supports the call.
        """
        needs_grad = _is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
        kind = (
            query.shape,
            key.shape,
            value.shape,
            query.dtype,
            query.device,
            mask,
            needs_grad,
            _num_threads(),
            trials and not _is_deterministic(),
        )
        try:
            attend = self._bound[kind]
        except KeyError:
            attend = self._bind(kind, lambda: self._any_mask((query, key, value), mask, trials=trials))
        return attend(query, key, value)

    def kept(self) -> list[Attend]:
        """What is bound to each kind of call that is kept."""
        return list(self._bound.values())

    def choices(self) -> list[Choice]:
        """What was chosen where trials are allowed, in order."""
        return list(self._choices.values())

    def _bind(self, kind: Hashable, make: Callable[[], Attend]) -> Attend:
        made = make()
        self._keep(self._bound, kind, made, MOST_KINDS)
        return made

    def _keep(self, kept: dict[Hashable, Any], key: Hashable, value: object, most: int) -> None:
        with self._lock:
            while key not in kept and len(kept) >= most:
                del kept[next(iter(kept))]
            kept[key] = value

    def _drop_in(
        self, given: Tensors, rule: Mask, scale: float | None, policy: Given | None, *, trials: bool
    ) -> Attend:
        """What computes calls of this kind, whose mask is causal or none."""
        query, key, _ = given
        is_grouped = query.dim() > 1 < key.dim() and query.shape[1] != key.shape[1]
        own = partial(_own, is_causal=isinstance(rule, Causal), scale=scale, enable_gqa=is_grouped)
        found = usable(policy)
        if found is None:
            return own
        if trials and _is_ordinary(given):  # as a cache grows by a token a call, this is all that a call asks
            choice = self._choices.get(nearby(given, rule, found))
            if choice is not None and choice.name == OTHERWISE:
                return own
        workload = _workload(given, rule, scale)
        if workload is None:
            return own
        mask = BoundMask(rule, workload_sizes(workload), query.device, scale=scale)
        name, reason = self._chosen(found, workload, given, mask, trials=trials)
        return own if name == OTHERWISE or reason is not None else _bound_to(name, given, mask)

    def _any_mask(self, given: Tensors, mask: BoundMask, *, trials: bool) -> Attend:
        """What computes calls with this mask."""
        workload, found = _workload(given, mask.rule, mask.scale), usable(None)
        name, reason = OTHERWISE, None
        if workload is None:  # a rule that has no name
            more_than_a_bias = f"{OTHERWISE} takes no mask that changes scores by more than a bias"
            reason = None if mask.rule.is_additive else more_than_a_bias
        elif found is None:
            reason = _implementation(name).unsupported(workload)
        else:
            name, reason = self._chosen(found, workload, given, mask, trials=trials)
        if reason is not None:
            raise ValueError(reason)
        return _bound_to(name, given, mask)

    def _chosen(
        self, policy: Policy, workload: Workload, given: Tensors, mask: BoundMask, *, trials: bool
    ) -> tuple[str, str | None]:
        """Who computes a workload: as remembered for lengths nearby, as tried, or as the policy expects."""
        asked = asked_of(workload)
        if not (trials and _is_ordinary(given)):
            return supported(policy.choose(asked), asked)
        place = nearby(given, mask.rule, policy)
        with self._trials:
            choice = self._choices.get(place)
            if choice is None:
                if not _has_memory(asked):
                    return supported(policy.choose(asked), asked)
                may = tuple(each for each in policy.contenders(asked) if supported(each, asked)[0] == each) or (
                    OTHERWISE,
                )
                name = may[0]
                if len(may) > 1:
                    tried = _tried(may, given, mask)
                    name = policy.choose(asked) if tried is None else policy.settled(asked, tried)
                choice = Choice(workload=asked, name=name, contenders=may)
                self._keep(self._choices, place, choice, MOST_CHOICES)
        return supported(choice.name, asked)


_dispatcher = Dispatcher()
attention = _dispatcher.attention
attend_by_policy = _dispatcher.attend


def reason_against(workload: Workload) -> str | None:
    """Why a workload cannot be computed as the usual policy says, in words, or None."""
    path = default_path()
    if path is None:
        learn = "learn one with `attnbench fastest --sweep NAME --policy FILE`"
        return f"there is no policy: {learn}, and name it in {VARIABLE} or put it at {USUAL_PATH}"
    try:
        policy = read(path)
    except ValueError as error:
        return str(error)
    if policy.machine != _machine():
        return f"the policy {path} is {_elsewhere(policy)}"
    asked = asked_of(workload)
    return supported(policy.choose(asked), asked)[1]


@lru_cache(maxsize=8)
def read(path: str | Path) -> Policy:
    """The policy in a file, read once.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    return Policy.load(path)


def usable(given: Given | None) -> Policy | None:
    """The policy to be followed here; None, with a warning for each that is of another machine.

    Raises:
        ValueError: it cannot be read.
    """
    found = default_path() if given is None else given
    if found is None:
        return None
    policy = found if isinstance(found, Policy) else read(found)
    if policy.machine != _machine():
        _warn_once(policy)
        return None
    return policy


@lru_cache(maxsize=8)
def _warn_once(policy: Policy) -> None:
    message = f"the policy is {_elsewhere(policy)}; until then, attention is PyTorch's own"
    warnings.warn(message, stacklevel=6)


def _elsewhere(policy: Policy) -> str:
    return (
        f"of another machine or other versions (fingerprint {policy.machine}, and here it is {_machine()}): learn one "
        "here with `attnbench fastest --sweep NAME --policy FILE`"
    )


@lru_cache(maxsize=1)
def _machine() -> str:
    return environment.collect().machine_fingerprint


@cache
def rule_of(*, is_causal: bool) -> Mask:
    """The mask of a call that is given none as a tensor."""
    return parse_mask("causal" if is_causal else "none")


def workload_sizes(workload: Workload) -> tuple[int, int, int]:
    """B, T, S."""
    return workload.batch_size, workload.seq_len, workload.kv_len


def asked_of(workload: Workload) -> Workload:
    """What a policy is asked for a workload: a call that needs gradients is one whose backward pass follows."""
    direction = workload.direction if workload.direction == "inference" else "forward_backward"
    return _with(workload, scope="attention", direction=direction)


def supported(name: str, workload: Workload) -> tuple[str, str | None]:
    """Who computes a workload: PyTorch's own where the chosen one does not; and why that does not, too."""
    reason = _implementation(name).unsupported(workload)
    if reason is not None and name != OTHERWISE:
        name, reason = OTHERWISE, _implementation(OTHERWISE).unsupported(workload)
    return name, reason


def nearby(given: Tensors, rule: Mask, policy: Policy) -> Hashable:
    """What calls have in common that one choice is made for: all but their lengths, with STEPS of them an octave."""
    query, key, value = given
    batch, heads, tokens, width = query.shape
    lengths = tuple(round(STEPS * math.log2(each)) if each else -1 for each in (tokens, key.shape[2]))
    sizes = (batch, heads, width, key.shape[1], value.shape[3], lengths)
    return sizes, query.dtype, query.device, rule, _needs_grad(given), _num_threads(), policy


def _tried(contenders: Sequence[str], given: Tensors, mask: BoundMask) -> dict[str, trial.Tried] | None:
    """How long each takes on these tensors against the first; gradients are those of a sum, and go nowhere.

    None: nothing is tried, since a call takes long or memory is short.
    """
    own = tuple(each.detach().requires_grad_(each.requires_grad) for each in given)
    wanted = [each for each in own if each.requires_grad]
    needs_grad, clock = _needs_grad(given), device(str(given[0].device)).clock
    try:
        others = torch.zeros(OTHERS_BYTES, dtype=torch.uint8, device=given[0].device)
        ones = given[0].new_ones(*given[0].shape[:3], given[2].shape[3]) if needs_grad else given[0]
    except RuntimeError:  # memory is short
        return None

    def call_of(name: str) -> Callable[[], object]:
        attend = _bound_to(name, given, mask)
        if needs_grad:
            return lambda: torch.autograd.grad(attend(*own), wanted, ones)
        return lambda: attend(*own)

    # Hooks of the caller, such as those of checkpoints, count what is saved: none of this is theirs.
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        return trial.trial({name: call_of(name) for name in contenders}, clock, lambda: others.add_(1))


def _is_ordinary(given: Tensors) -> bool:
    """Whether a trial on these tensors is allowed, and measures what it should."""
    query = given[0]
    if any(type(each) is not Tensor or each.dim() != 4 for each in given):  # noqa: PLR2004 - B, H, T, K
        return False  # of subclasses nobody knows what a call does
    if torch.are_deterministic_algorithms_enabled():
        return False  # rounding must not depend on a trial
    return query.device.type in names() and not device(str(query.device)).is_capturing()


def _has_memory(workload: Workload) -> bool:
    """Whether a trial cannot take the memory of the whole machine; on a device, whoever takes too much just fails."""
    place = device(workload.device)
    return not place.is_host or SHORT_OF_MEMORY * score_matrix_bytes(workload) <= place.free_bytes()


def _needs_grad(given: Tensors) -> bool:
    return _is_grad_enabled() and any(each.requires_grad for each in given)


def _with(workload: Workload, **axes: Any) -> Workload:  # noqa: ANN401 - values of axes
    return Workload(**(workload.axes() | axes))


def _workload(given: Tensors, rule: Mask, scale: float | None) -> Workload | None:
    """The call as a workload; None where it is none."""
    query, key, value = given
    if not query.dim() == key.dim() == value.dim() == 4 or query.dtype not in TORCH_DTYPES:  # noqa: PLR2004 - B, H, T, K
        return None
    if not query.dtype == key.dtype == value.dtype or key.shape[:3] != value.shape[:3]:
        return None
    batch, heads, tokens, width = query.shape
    if (key.shape[0], key.shape[3]) != (batch, width):
        return None
    try:
        return Workload(
            batch_size=batch,
            seq_len=tokens,
            kv_len=key.shape[2],
            num_heads=heads,
            num_kv_heads=key.shape[1],
            head_dim=width,
            value_dim=value.shape[3],
            dtype=TORCH_DTYPES[query.dtype],
            device=str(query.device),
            mask=str(rule),
            direction="forward_backward" if _needs_grad(given) else "inference",
            num_threads=_num_threads(),
            scale=scale or 0.0,
        )
    except ValueError:
        return None


def _bound_to(name: str, given: Tensors, mask: BoundMask) -> Attend:
    """The `attend` of an implementation, built for these sizes, with its mask."""
    query, key, value = given
    sizes = (query.shape[1], query.shape[3], key.shape[1], value.shape[3])
    attend: Callable[..., Tensor] = _module(name, sizes, query.dtype, query.device).attend  # type: ignore[assignment] # `unsupported` saw to it
    return lambda query, key, value: attend(query, key, value, mask)


@lru_cache(maxsize=MOST_KINDS)
def _implementation(name: str) -> Implementation:
    """An installed implementation, looked for once."""
    return implementation(name)


@lru_cache(maxsize=MOST_KINDS)
def _module(name: str, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Module:
    """An implementation for sizes H, K, G, V, with weights that `attend` does not read."""
    heads, width, groups, value_dim = sizes
    assert name != ITSELF  # Policy has seen to it
    with torch.inference_mode(mode=False):
        shapes = {"query": (heads, width, 1), "key": (groups, width, 1), "value": (groups, value_dim, 1)}
        weights = {each: torch.zeros(shape, dtype=dtype, device=device) for each, shape in shapes.items()}
        return _implementation(name).build(Weights(**weights)).eval()


def register_attention(name: str = "attnbench", *, trials: bool = True) -> None:
    """Make `attention` known to the package transformers, as `attn_implementation=name` of its models.

    Calls with a mask, dropout or anything else that a policy does not choose for go to the package's own `sdpa`.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    own: Any = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(  # noqa: PLR0913, PLR0917 - the package's own signature
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,  # noqa: FBT001
        **more: Any,  # noqa: ANN401
    ) -> tuple[Tensor, None]:
        """Query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, T, H, V)."""
        for each in ("softcap", "s_aux"):
            if more.get(each) is not None:
                raise ValueError(
                    f"{name} does not take {each}, which the model asks for: choose another, such as eager"
                )
        if (
            attention_mask is not None
            or dropout
            or any(more.get(each) is not None for each in ("position_bias", "cache"))
        ):
            more |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            result: tuple[Tensor, None] = own(module, query, key, value, attention_mask, **more)
            return result
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        is_causal = bool(is_causal) and query.shape[2] > 1  # of a single query no key is hidden
        output = attention(query, key, value, is_causal=is_causal, scale=scaling, trials=trials)
        return output.transpose(1, 2).contiguous(), None  # (B,H,T,V) -> (B,T,H,V)

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, sdpa_mask)
