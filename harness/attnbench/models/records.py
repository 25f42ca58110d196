"""The specification of a check inside a model, and its findings."""

import msgspec

OWN = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Attention implementations that transformers itself provides."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, and the sizes of the model to build from it."""

    config: str  # path of a config.json, or of its folder
    num_layers: int = 0  # 0: as many as fit in memory
    batch_size: int = 2
    seq_len: int = 128
    dtype: str = "float32"
    seed: int = 0
    has_gradients: bool = True


class ModelBuilt(msgspec.Struct, frozen=True, kw_only=True, tag="model_built"):
    """The sizes of a built model. It may have fewer layers than its configuration, so that it fits in memory."""

    architecture: str  # name of the model's class
    num_layers: int
    all_layers: int  # number of layers in the configuration
    num_parameters: int
    batch_size: int
    seq_len: int
    dtype: str
    batches: tuple[str, ...]  # "whole" and, for token models, "padded"


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the model whose error exceeds its limit `allowed`."""

    place: str  # path of an attention module, logits or last_hidden_state, or the gradient of a parameter
    batch: str  # whole or padded
    error: float | None  # None: not finite
    allowed: float


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged"):
    """The result of checking one attention implementation: differences, or why it could not be compared."""

    attention: str
    reason: str = ""  # why it could not be compared
    is_refused: bool = False  # the reason is a refusal by the model or the implementation; otherwise a failure
    differences: tuple[Difference, ...] = ()  # in the order of the forward pass, then gradients from the output back
    num_compared: int = 0  # number of compared tensors
    error_ratio: float | None = None  # largest ratio of an error to its limit; None: not finite, or no comparison

    @property
    def is_right(self) -> bool:
        """Whether the attention was compared, and all its tensors agree."""
        return not self.reason and not self.differences

    @property
    def is_finding(self) -> bool:
        """Whether the attention is wrong, or failed; a refusal is no finding."""
        return bool(self.differences or (self.reason and not self.is_refused))


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The time of a whole model's step with one attention implementation, and its ratio to that with the first one."""

    attention: str
    seconds: float  # median
    ratio: float | None = None  # None for the first attention, or without a comparison
    low: float | None = None  # bounds of the ratio's interval
    high: float | None = None
    verdict: str = ""
