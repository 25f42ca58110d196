"""Attention inside a real model of the package transformers: checked layer by layer against float64, and timed.

The model is built from a configuration with random weights. Its attention is replaced through the package's own
interface (https://huggingface.co/docs/transformers/attention_interface). The reference is the same model in float64;
its attention is the textbook form of the oracle, which gets every mask as a tensor. The tolerance comes from the errors
of two textbook forms in the model's dtype, as in the check of one call.
"""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from attnbench.case import TORCH_DTYPES
from attnbench.checking import oracle
from attnbench.checking.oracle import RowMask
from attnbench.checking.tolerance import Tolerance, by_row
from attnbench.contract import BoundMask, Weights
from attnbench.contract.loading import implementation
from attnbench.models.records import OWN, Difference, Judged, ModelBuilt, ModelSpec
from attnbench.workloads.masks import Causal, Combined, Mask, Softcap
from attnbench.workloads.workload import Workload

# names under which the package knows the first textbook form and, by default, a checked implementation
REFERENCE, NAME = "attnbench_reference", "attnbench_candidate"
NUM_ROUNDINGS = 4.0  # assumed number of roundings of a value that has passed through several layers (see Tolerance)
FREE_SHARE = 0.5  # share of the free memory for the models and their gradients
MOST_MASKS = 8  # largest number of bound masks that a Candidate caches
BIAS = "position_bias"  # name of a model's bias among the inputs of a mask


class RefusedError(ValueError):
    """The model rejects an attention implementation, or the implementation lacks a feature that the model needs.

    The message says why.
    """


class GivenMask(Mask):
    """The mask that a model passes to its attention: boolean (B, T, S), True where visible."""

    name = ""  # no name: users cannot select it as `mask`

    def __init__(self, visible: Tensor, sizes: tuple[int, int, int]) -> None:
        """Expand the mask `visible` (B or 1, T or 1, S), True where visible, to `sizes`: B, T and S."""
        super().__init__()
        self.name = "given"
        self.visible = visible.expand(sizes).cpu().numpy()

    def table(self, batch_size: int, query_len: int, key_len: int) -> Any:  # noqa: ANN401, ARG002 - see Mask
        """Return the mask as booleans (B, T, S)."""
        return self.visible

    def span(self, batch: Any, query: Any, table: Any, offset: int) -> Any:  # noqa: ANN401, ARG002 - see Mask
        """Return None, because the visible keys need not be contiguous."""
        return None

    def sees(self, batch: Any, query: Any, key: Any, table: Any, offset: int) -> Any:  # noqa: ANN401, ARG002 - see Mask
        """Return, elementwise, whether `query` sees `key` in the batch row `batch`."""
        return table[batch, query, key]


class GivenBias(Mask):
    """The bias that a model adds to its scores: (B or 1, H or 1, T, S)."""

    name = ""
    changes_scores = is_learned = True

    def index(self, query: Any, key: Any, offset: int, key_len: int) -> tuple[Any, ...]:  # noqa: ANN401, ARG002 - see Mask
        """Return the indices of query and key, broadcast against each other."""
        return (query + key * 0, key + query * 0)

    def looked_up(self, tables: Mapping[str, Any], places: tuple[Any, Any, Any], index: Any) -> Any:  # noqa: ANN401
        """Look up the bias of each batch row, head, query and key; a table with one row or head applies to all."""
        table, (row, head, _) = tables[BIAS], places
        return table[row * (table.shape[0] > 1), head * (table.shape[1] > 1), index[0], index[1]]


PLAIN: dict[str, Any] = {"direction": "inference", "num_heads": 2, "head_dim": 8, "seq_len": 8}
ASKING = {
    "a scale": Workload(**PLAIN, scale=1.0),
    "sinks": Workload(**PLAIN, sinks="learned"),
    "a position bias": Workload(**PLAIN, mask="relative_buckets"),
    "a softcap": Workload(**PLAIN, mask="softcap(20)"),
}
"""For each feature of models: a small workload that only implementations with this feature support."""


@dataclass
class Call:
    """The arguments of a layer's attention: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V), and the mask."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None  # boolean (B, 1, T, S), True where visible
    inputs: dict[str, Tensor]  # "sinks" and BIAS, if the model passes them
    scale: float | None
    softcap: float | None
    is_causal: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes B, T and S."""
        return self.query.shape[0], self.query.shape[2], self.key.shape[2]

    @property
    def rule(self) -> Mask:
        """All changes of the scores as one mask: visibility, bias and softcap."""
        parts: list[Mask] = []
        if self.mask is not None:
            parts.append(GivenMask(self.mask[:, 0], self.sizes))
        elif self.is_causal:
            parts.append(Causal())
        parts += [GivenBias()] * (BIAS in self.inputs)
        if self.softcap is not None:
            parts.append(Softcap(self.softcap))  # type: ignore[arg-type] # a model's may be a fraction
        return Combined(*parts) if len(parts) > 1 else parts[0] if parts else Mask()


def call_of(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **more: Any,  # noqa: ANN401
) -> Call:
    """Read the arguments that a model of transformers passes to its attention; for shapes see Call.

    Raises:
        ValueError: the mask is not boolean.
    """
    if attention_mask is not None and attention_mask.dtype != torch.bool:
        raise ValueError(f"the model passes a mask of {attention_mask.dtype}, but only boolean masks are supported")
    is_causal = more.get("is_causal")
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    operands = {"sinks": more.get("s_aux"), BIAS: more.get("position_bias")}
    return Call(
        query=query,
        key=key,
        value=value,
        mask=attention_mask,
        inputs={name: tensor for name, tensor in operands.items() if tensor is not None},
        scale=more.get("scaling"),
        softcap=more.get("softcap"),
        is_causal=bool(is_causal) and query.shape[2] > 1,
    )


def reference_attention(form: oracle.Form) -> Callable[..., tuple[Tensor, None]]:
    """Turn a textbook form of the oracle into an attention function for transformers.

    The function ignores `is_causal`, because `register` makes models pass every mask as a tensor.
    """

    def attend(*given: Any, **more: Any) -> tuple[Tensor, None]:  # noqa: ANN401 - the package's signature: see `call_of`
        call = call_of(*given, **(more | {"is_causal": False}))
        mask = RowMask(
            rule=call.rule,
            sizes=call.sizes,
            num_heads=call.query.shape[1],
            rows=torch.arange(call.sizes[1]),
            device=call.query.device,
            scale=call.scale,
            inputs=call.inputs,
        )
        return form(call.query, call.key, call.value, mask).transpose(1, 2), None

    return attend


class Candidate:
    """An implementation, from this project or elsewhere, as an attention function for transformers."""

    def __init__(self, spec: str) -> None:
        """Load the implementation; exceptions of foreign code propagate."""
        self.spec, self.implementation = spec, implementation(spec)
        self.modules: dict[tuple[int, ...], nn.Module] = {}
        self.masks: dict[tuple[object, ...], tuple[object, BoundMask]] = {}

    def __call__(self, *given: Any, **more: Any) -> tuple[Tensor, None]:  # noqa: ANN401 - see `call_of`
        """Attend: query (B, H, T, K), key (B, G, S, K), value (B, G, S, V) -> (B, T, H, V), and None for weights."""
        call = call_of(*given, **more)
        self.require(call)
        attended: Tensor = self.module(call).attend(call.query, call.key, call.value, self.bound(call))  # type: ignore[operator]
        return attended.transpose(1, 2), None

    def require(self, call: Call) -> None:
        """Check that the implementation supports the features that the call uses, such as a scale, sinks or a softcap.

        Raises:
            RefusedError: a feature is not supported.
        """
        usual = call.scale is None or math.isclose(call.scale, call.query.shape[-1] ** -0.5, rel_tol=1e-6)
        has = {"a scale": not usual, "sinks": "sinks" in call.inputs}
        has |= {"a position bias": BIAS in call.inputs, "a softcap": call.softcap is not None}
        for what, is_there in has.items():
            if is_there and (reason := self.implementation.unsupported(ASKING[what])):
                raise RefusedError(f"the model has {what}: {reason}")

    def module(self, call: Call) -> nn.Module:
        """Return the implementation's module for the H, K, G and V of the call; build it at first use.

        Raises:
            ValueError: the module has no `attend`.
        """
        sizes = (*call.query.shape[1::2], call.key.shape[1], call.value.shape[-1])
        if sizes not in self.modules:
            heads, width, groups, value_dim = sizes
            query, key, value = (
                torch.zeros(*each, 1) for each in ((heads, width), (groups, width), (groups, value_dim))
            )
            module = self.implementation.build(Weights(query=query, key=key, value=value)).eval()
            if not hasattr(module, "attend"):
                raise ValueError(f"{self.spec} has no attend(query, key, value, mask), which a model's layer calls")
            self.modules[sizes] = module
        return self.modules[sizes]

    def bound(self, call: Call) -> BoundMask:
        """Return the call's mask. Calls with the same mask tensor, such as those of all layers, share one BoundMask."""
        numbers = (call.scale, call.softcap, call.is_causal)
        key = (id(call.mask), BIAS in call.inputs, call.sizes, call.query.shape[1], *numbers)
        if key not in self.masks:
            if len(self.masks) >= MOST_MASKS:
                self.masks.clear()
            bound = BoundMask(call.rule, call.sizes, call.query.device, num_heads=call.query.shape[1], scale=call.scale)
            self.masks[key] = call.mask, bound  # keeping the tensor keeps its id unique
        bound = self.masks[key][1]
        bound.inputs = call.inputs
        return bound


@dataclass
class Model:
    """A model in the requested dtype and in float64, and the batches for its check."""

    spec: ModelSpec
    built: ModelBuilt
    model: nn.Module  # in the requested dtype
    reference: nn.Module  # in float64
    batches: dict[str, tuple[dict[str, Tensor], dict[int, Tensor]]]  # see `_batches`

    @contextmanager
    def attending(self, model: nn.Module, name: str) -> Iterator[None]:
        """Make `model` use the attention function that transformers knows as `name`, inside the context.

        Raises:
            RefusedError: the model refuses the function.
        """
        before = model.config._attn_implementation  # type: ignore[union-attr] # noqa: SLF001 - the package's own name
        try:
            model.set_attn_implementation(name)  # type: ignore[operator]
        except (ValueError, ImportError, KeyError) as error:
            why = (str(error).splitlines() or ["no reason given"])[0].partition(". ")[0]
            raise RefusedError(f"the model refuses it: {why}") from None
        try:
            yield
        finally:
            model.set_attn_implementation(before)  # type: ignore[operator]


def load(spec: ModelSpec) -> Model:
    """Build the model of a configuration file, and register the textbook forms with transformers.

    Raises:
        ValueError: transformers cannot read the configuration, or the model cannot be built.
    """
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    register()
    try:
        config = AutoConfig.from_pretrained(spec.config, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"transformers cannot read {spec.config}: {(str(error).splitlines() or ['?'])[0]}") from None
    return build(spec, config)


def build(spec: ModelSpec, config: Any) -> Model:  # noqa: ANN401 - a configuration of the package
    """Build the model with random weights; if `spec.num_layers` is 0, halve its layers until it fits in memory.

    Raises:
        ValueError: no model class is known for the configuration, or not even one layer fits.
    """
    from attnbench.devices import containers

    kind, dtype = _class_of(config), TORCH_DTYPES[spec.dtype]
    text = config.get_text_config()  # the part that describes the layers of text, or the whole configuration
    everything = int(next(value for name in LAYER_FIELDS if isinstance(value := getattr(text, name, None), int)))
    free = FREE_SHARE * containers.memory()[0]
    number = min(spec.num_layers or everything, everything)
    while True:
        reduced = _reduced(config, number)
        with torch.device("meta"):
            parameters = sum(each.numel() for each in kind._from_config(copy.deepcopy(reduced)).parameters())  # noqa: SLF001
        held = parameters * (8 + dtype.itemsize) * (2 if spec.has_gradients else 1)
        if spec.num_layers or held <= free:
            break
        if number == 1:
            sizes = f"{held / 2**30:.0f} GiB, and {free / 2**30:.0f} are free"
            raise ValueError(f"one layer of it needs {sizes}: give a smaller configuration")
        number = max(1, number // 2)
    torch.manual_seed(spec.seed)
    model = kind._from_config(reduced).eval()  # noqa: SLF001 - AutoModel.from_config reads unknown names
    _draw(model, spec.seed)
    model = model.to(dtype)
    reference = copy.deepcopy(model).double()
    for each in (model, reference):
        if hasattr(each, "set_experts_implementation"):
            each.set_experts_implementation("eager")  # grouped products do not support float64
    length = min(spec.seq_len, getattr(text, "max_position_embeddings", 0) or spec.seq_len)
    batches = _batches(config, model, spec.batch_size, length, spec.seed)
    built = ModelBuilt(
        architecture=kind.__name__,
        num_layers=number,
        all_layers=everything,
        num_parameters=parameters,
        batch_size=spec.batch_size,
        seq_len=length,
        dtype=spec.dtype,
        batches=tuple(batches),
    )
    return Model(spec=spec, built=built, model=model, reference=reference, batches=batches)


def _class_of(config: Any) -> Any:  # noqa: ANN401 - a class of the package
    import transformers

    for kind in ("ForSeq2SeqLM", "ForMaskedLM", "ForCausalLM", "ForImageClassification", ""):
        known: Any = getattr(transformers, f"AutoModel{kind}")._model_mapping  # noqa: SLF001 - there is no other way
        if type(config) in known:
            found = known[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ValueError(f"transformers has no model for a {type(config).__name__} that attnbench can check")


# names that configurations use for the number of layers
LAYER_FIELDS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers", "n_layer")


def _reduced(config: Any, number: int) -> Any:  # noqa: ANN401 - a configuration of the package
    """Return a copy of the configuration with only the first `number` layers."""
    reduced = copy.deepcopy(config)
    for each in (reduced, reduced.get_text_config()):
        for name in LAYER_FIELDS:
            if isinstance(value := getattr(each, name, None), int) and value > number:
                setattr(each, name, number)
        if isinstance(kinds := getattr(each, "layer_types", None), list):
            each.layer_types = kinds[:number]
    return reduced


def _draw(model: nn.Module, seed: int) -> None:
    """Draw weights with variance 1 / fan-in, and biases and sinks that are not 0, so that attention is not uniform."""
    draws = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                fan_in = math.prod(parameter.shape[1:]) if parameter.dim() != 3 else parameter.shape[1]  # noqa: PLR2004
                spread = 1.0 if "relative_attention_bias" in name else 1 / math.sqrt(fan_in)
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * spread)
            elif "sink" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draws) + 2.0)
            elif name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=draws) * 0.1)


def _batches(
    config: Any,  # noqa: ANN401 - a configuration of the package
    model: nn.Module,
    batch_size: int,
    length: int,
    seed: int,
) -> dict[str, tuple[dict[str, Tensor], dict[int, Tensor]]]:
    """Draw the batch "whole" and, for models whose inputs are tokens, "padded", where attention_mask hides some tokens.

    A batch is a pair: inputs by name, and masks (B, T) by length T that are True at the tokens to compare. If a length
    has no mask, all of its tokens are compared.
    """
    draws = torch.Generator().manual_seed(seed + 1)
    main = getattr(model, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = config.image_size if isinstance(config.image_size, int) else config.image_size[0]
        return {"whole": ({main: torch.randn(batch_size, config.num_channels, size, size, generator=draws)}, {})}
    has_encoder = getattr(config, "is_encoder_decoder", False)
    most = getattr(config.get_text_config(), "vocab_size", 100)
    lengths = {"input_ids": length} | ({"decoder_input_ids": length // 2} if has_encoder else {})
    given = {
        name: torch.randint(3, max(4, most), (batch_size, count), generator=draws) for name, count in lengths.items()
    }
    every = torch.ones(batch_size, length, dtype=torch.long)
    some = every.clone()
    for row in range(1, batch_size):
        gone = max(1, row * length // (2 * batch_size))
        is_decoder = not has_encoder and hasattr(model, "generate")
        some[row, slice(None, gone) if is_decoder else slice(length - gone, None)] = 0
    return {
        "whole": ({**given, "attention_mask": every}, {}),
        "padded": ({**given, "attention_mask": some}, {length: some.bool()}),
    }


def arguments(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the arguments of a model's step on a batch, by name; cast floating-point tensors to the model's dtype."""
    dtype = next(model.parameters()).dtype
    given = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in batch.items()}
    return {**given, **({"use_cache": False} if "input_ids" in given else {})}


def observed(model: nn.Module, batch: Mapping[str, Tensor], counted: Mapping[int, Tensor], *, grads: bool) -> Any:  # noqa: ANN401
    """Run a step; return by name the outputs of each attention module and of the model, and gradients if `grads`.

    Outputs are in the order of the forward pass, without the tokens that `counted` excludes. Gradients are those of the
    trainable parameters, from the last parameter to the first.
    """
    seen: dict[str, Tensor] = {}

    def keep(path: str, _module: nn.Module, _given: object, returned: Any) -> None:  # noqa: ANN401
        output = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(output, Tensor):
            seen[path] = _counted(output.detach(), counted)

    hooks = [module.register_forward_hook(partial(keep, path)) for path, module in attention_modules(model)]
    try:
        with torch.set_grad_enabled(grads):
            output = model(**arguments(model, batch))
    finally:
        for hook in hooks:
            hook.remove()
    name = next(each for each in ("logits", "last_hidden_state") if getattr(output, each, None) is not None)
    final: Tensor = getattr(output, name)
    seen[name] = _counted(final.detach(), counted)
    if grads:
        directions = torch.randn(final.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        if final.dim() == 3 and final.shape[1] in counted:  # noqa: PLR2004 - (B, T, D)
            directions = directions * counted[final.shape[1]][..., None]
        named = {path: each for path, each in model.named_parameters() if each.requires_grad}
        found = torch.autograd.grad(
            (final * directions.to(final)).sum(), list(named.values()), allow_unused=True, materialize_grads=True
        )
        for path, gradient in reversed(list(zip(named, found, strict=True))):  # from the output back
            seen[f"gradient of {path}"] = gradient
    return seen


def attention_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) for each innermost module of `model` that has "Attention" in its class name."""
    found = [(path, module) for path, module in model.named_modules() if "Attention" in type(module).__name__]
    paths = [path for path, _ in found]

    def is_innermost(path: str) -> bool:
        return not any(other.startswith(f"{path}.") for other in paths)

    return [(path, module) for path, module in found if is_innermost(path)]


def _counted(tensor: Tensor, counted: Mapping[int, Tensor]) -> Tensor:
    """Select the N tokens of a tensor (B, T, D) that `counted` marks, as (N, D); return other tensors unchanged."""
    is_tokens = tensor.dim() == 3 and tensor.shape[1] in counted  # noqa: PLR2004 - (B, T, D)
    return tensor[counted[tensor.shape[1]]] if is_tokens else tensor


def register() -> None:
    """Register the two textbook forms with transformers, and a mask function that returns every mask as a tensor.

    The mask functions of transformers omit masks that a kernel does not need.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    def written_out(*given: Any, **more: Any) -> Tensor | None:  # noqa: ANN401 - the package's own signature
        return sdpa_mask(*given, **(more | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))

    for name, form in zip((REFERENCE, f"{REFERENCE}_2"), oracle.YARDSTICKS, strict=True):
        AttentionInterface.register(name, reference_attention(form))
        AttentionMaskInterface.register(name, written_out)


def expect(model: Model) -> dict[str, dict[str, Tolerance]]:
    """Compute the Tolerance of each observed tensor, by batch and name: its value in float64, and its error limits."""
    expected: dict[str, dict[str, Tolerance]] = {}
    for name, (batch, counted) in model.batches.items():

        def answers(which: nn.Module, form: str, batch: Any = batch, counted: Any = counted) -> Any:  # noqa: ANN401
            with model.attending(which, form):
                return observed(which, batch, counted, grads=model.spec.has_gradients)

        right = answers(model.reference, REFERENCE)
        honest_ones = [answers(model.model, form) for form in (REFERENCE, f"{REFERENCE}_2")]
        expected[name] = {}
        for place, tensor in right.items():
            axis = 0 if place.startswith("gradient of ") else -2  # rows of a parameter, tokens of an output
            expected[name][place] = Tolerance(
                place,
                tensor,
                [by_row(each[place].double() - tensor, axis) for each in honest_ones],
                axis=axis,
                dtype=TORCH_DTYPES[model.built.dtype],
                num_roundings=NUM_ROUNDINGS,
            )
    return expected


def judge(model: Model, expected: Mapping[str, Mapping[str, Tolerance]], attention: str) -> Judged:
    """Check one attention implementation in the model; if it raises an exception, `Judged.reason` describes it."""
    differences, number, worst = [], 0, 0.0
    try:
        with model.attending(model.model, function_name(attention)):
            for name, (batch, counted) in model.batches.items():
                made = observed(model.model, batch, counted, grads=model.spec.has_gradients)
                for place, tolerance in expected[name].items():
                    number += 1
                    compared = tolerance.judge(made[place])
                    worst = max(worst, math.inf if compared.ratio is None else compared.ratio)
                    if compared.agrees:
                        continue
                    error, allowed = compared.decisive
                    differences.append(Difference(place=place, batch=name, error=error, allowed=allowed))
    except Exception as error:  # noqa: BLE001 - foreign code may raise anything
        is_refused = isinstance(error, RefusedError)
        reason = str(error) if is_refused else f"{type(error).__name__}: {error}"
        first = (reason.splitlines() or ["no reason given"])[0]
        return Judged(attention=attention, reason=first, is_refused=is_refused)
    return Judged(
        attention=attention,
        differences=tuple(differences),
        num_compared=number,
        error_ratio=worst if math.isfinite(worst) else None,
    )


def function_name(attention: str, name: str = NAME) -> str:
    """Return transformers' name of an attention implementation; if it is not in OWN, register it as `name` first.

    Raises:
        Exception: any exception of loading foreign code.
    """
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    if attention in OWN:
        return attention
    AttentionInterface.register(name, Candidate(attention))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name
