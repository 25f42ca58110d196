"""What a check inside a model is asked, and what it says as it goes: a line each, from its process to the command's."""

import msgspec

OWN = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Attentions that are functions of transformers itself."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration, the attentions to try in its model, and the sizes."""

    config: str  # a file, or the folder that it lies in
    attentions: tuple[str, ...]
    num_layers: int = 0  # 0: as many as fit
    batch_size: int = 2
    seq_len: int = 128
    dtype: str = "float32"
    seed: int = 0
    budget_s: float = 30.0
    has_gradients: bool = True
    checked: tuple[str, ...] = ()  # those of `attentions` that need no check again
    timed: tuple[str, ...] = ()  # those that are to be timed though they were checked before; with them all that agree


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """One line."""


class Built(Event, frozen=True, kw_only=True, tag="built"):
    """The model that was built: what was asked for, and what fits here."""

    architecture: str
    num_layers: int
    all_layers: int
    num_parameters: int
    batch_size: int
    seq_len: int
    dtype: str
    batches: tuple[str, ...]


class Trying(Event, frozen=True, kw_only=True, tag="trying"):
    """What comes next, so that a crash can be blamed on the right one; of several at once, none is named."""

    step: str  # building, checking or timing
    attention: str = ""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor of the model that is further from float64 than honest forms are."""

    place: str  # a module's path, logits, or the gradient of a parameter
    batch: str  # whole or padded
    error: float | None  # None: not finite
    allowed: float


class Judged(Event, frozen=True, kw_only=True, tag="judged"):
    """What the check of one attention found: nothing, where it is right."""

    attention: str
    reason: str = ""  # why it could not be tried
    is_refused: bool = False  # by the model or the implementation, with a reason; else it failed
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


class Timed(Event, frozen=True, kw_only=True, tag="timed"):
    """The step of the whole model with one attention: seconds, its ratio to the first, and attention's own share."""

    attention: str
    seconds: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    verdict: str = ""
    attention_share: float | None = None  # of the forward pass of one step


class Impossible(Event, frozen=True, kw_only=True, tag="impossible"):
    """Why there is no model: the words of a ValueError."""

    reason: str


AnyEvent = Built | Trying | Judged | Timed | Impossible
