"""The picture: every mistake against every rule, coloured by detection rate."""

from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from attnbench.reports import Picture
from attnbench.reports.style import INK, SETTINGS, picture
from studies.detection.table import power, share

COLOURS = "cividis"
DARK_BELOW = 0.6
"""Up to this share the colour is dark enough for a white number."""


def draw(cells: pd.DataFrame, steps: dict[str, str]) -> Picture:
    """Draw a cell for each mistake and rule, coloured by the share of dtypes and lengths at which it is caught."""
    shares = power(cells)
    with mpl.rc_context(SETTINGS):
        figure = Figure(figsize=(12.0, 2.6 + 0.215 * len(shares)), layout="constrained")
        axes = figure.subplots()
        image = axes.imshow(shares.to_numpy(dtype=float), cmap=COLOURS, vmin=0.0, vmax=1.0, aspect="auto")
        _label(axes, shares, steps)
        _write_numbers(axes, shares)
        bar = figure.colorbar(image, ax=axes, location="bottom", shrink=0.35, aspect=40, pad=0.01)
        bar.set_label("share of dtypes and lengths at which the mistake is caught")
        figure.suptitle("Which mistakes are caught, by which rule, on which inputs", x=0.01, ha="left", fontsize=13)
        caption = (
            "Numbers, in per cent, where a mistake is caught at some dtypes and lengths but not at all of them; "
            "a cell without a number is 0 or 100 by its colour. Ours is every probe and every rule of the check."
        )
        return picture(figure, "Detection power", caption)


def _label(axes: Axes, shares: pd.DataFrame, steps: dict[str, str]) -> None:
    """Label the axes: mistakes on the left, rules above, inputs over them; lines separate steps and inputs."""
    names = list(shares.index)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    columns: list[Any] = list(shares.columns)  # pairs (inputs, rule)
    rules = [rule for _, rule in columns]
    axes.set_xticks(range(len(rules)), rules, rotation=50, ha="left", rotation_mode="anchor", fontsize=8)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=0)
    axes.grid(visible=False)
    inputs = [name for name, _ in columns]
    for name in dict.fromkeys(inputs):
        places = [number for number, each in enumerate(inputs) if each == name]
        title = "every probe" if name == "all" else f"{name} inputs"
        axes.text(float(np.mean(places)), len(names) - 0.2, title, ha="center", va="top", fontsize=9, color=INK)
        axes.axvline(places[-1] + 0.5, color="white", linewidth=3)
    for row in range(1, len(names)):
        if steps[names[row]] != steps[names[row - 1]]:
            axes.axhline(row - 0.5, color="white", linewidth=1.5)


def _write_numbers(axes: Axes, shares: pd.DataFrame) -> None:
    for row, values in enumerate(shares.to_numpy(dtype=float)):
        for column, value in enumerate(values):
            if np.isnan(value) or 0 < value < 1:
                colour = "white" if value <= DARK_BELOW else "black"
                text = "-" if np.isnan(value) else share(value).removesuffix(" %")
                axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=colour)
