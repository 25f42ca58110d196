"""Masks as texts, so that tests also cover masks that are added later."""

from attnbench.workloads.masks import masks, parse_mask


def fits(text: str, sizes: tuple[int, int, int]) -> bool:
    """Whether the mask is valid at sizes (B, T, S)."""
    try:
        parse_mask(text).check(*sizes)
    except ValueError:
        return False
    return True


def plain(name: str) -> str:
    """Return the mask's text with as few arguments as possible, each 3 or the nearest allowed value."""
    (fewest, _), (lowest, highest) = masks()[name].num_arguments, masks()[name].argument_range
    arguments = fewest * [str(max(lowest, min(3, highest)))]
    return f"{name}({','.join(arguments)})" if arguments else name


def not_among(texts: list[str]) -> list[str]:
    """Return the plain text of each mask that does not occur in these texts."""
    named = {part.partition("(")[0] for text in texts for part in text.split("+")}
    return [plain(name) for name in masks() if name not in named]
