"""The specification of a check inside a model, and its findings."""

import msgspec

OWN = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Attentions that transformers itself provides."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, and the sizes of the model to build from it."""

    config: str  # a file, or its folder
    num_layers: int = 0  # 0: as many as fit
    batch_size: int = 2
    seq_len: int = 128
    dtype: str = "float32"
    seed: int = 0
    has_gradients: bool = True


class ModelBuilt(msgspec.Struct, frozen=True, kw_only=True, tag="model_built"):
    """The model that was built, with fewer layers if it did not fit."""

    architecture: str
    num_layers: int
    all_layers: int  # in the configuration
    num_parameters: int
    batch_size: int
    seq_len: int
    dtype: str
    batches: tuple[str, ...]


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the model whose error exceeds its limit `allowed`."""

    place: str  # module path, logits, or the gradient of a parameter
    batch: str  # whole or padded
    error: float | None  # None: not finite
    allowed: float


class Judged(msgspec.Struct, frozen=True, kw_only=True, tag="judged"):
    """The findings of the check of one attention; none if it is right."""

    attention: str
    reason: str = ""  # why it could not be tried
    is_refused: bool = False  # refused by the model or the implementation; otherwise it failed
    differences: tuple[Difference, ...] = ()  # in the order of the forward pass, then gradients from the output back
    num_compared: int = 0
    error_ratio: float | None = None  # the largest error / tolerance; None: not finite

    @property
    def is_right(self) -> bool:
        """Whether it was tried and agrees."""
        return not self.reason and not self.differences

    @property
    def is_finding(self) -> bool:
        """Whether it is wrong, or failed."""
        return bool(self.differences or (self.reason and not self.is_refused))


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """The seconds of the whole model's step with one attention, and the ratio to the first's, with its interval."""

    attention: str
    seconds: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""
