"""The picture of the scaling study: efficiency by the number of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from studies.scaling.point import Scaled


def draw(points: Sequence[Scaled], path: Path) -> None:
    """A panel for each mask and kind of scaling, a line for each implementation; forward and backward are dashed."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    panels = sorted({(each.kind, each.point.workload.mask) for each in points})
    figure, axes = plt.subplots(1, len(panels), figsize=(3.2 * len(panels), 3), sharey=True, squeeze=False)
    names = sorted({each.point.name for each in points})
    for panel, (kind, mask) in zip(axes[0], panels, strict=True):
        for name in names:
            for direction, style in (("inference", "-"), ("forward_backward", "--")):
                own = [
                    each
                    for each in points
                    if (each.kind, each.point.name) == (kind, name)
                    and (each.point.workload.mask, each.point.workload.direction) == (mask, direction)
                ]
                numbers = [each.point.workload.world_size for each in own]
                label = name if style == "-" else None
                colour = f"C{names.index(name)}"
                panel.plot(numbers, [each.efficiency for each in own], style, marker="o", color=colour, label=label)
        panel.set_title(f"{kind} scaling, mask {mask}", fontsize=9)
        panel.set_xlabel("ranks")
        panel.set_xticks(sorted({each.point.workload.world_size for each in points}))
        panel.set_ylim(bottom=0)
    axes[0][0].set_ylabel("efficiency")
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
