"""Draw results/gallery/serving/pages.png: how a batch of requests lies in the pages of a pool, for docs/serving.md.

Command: `python docs/pages.py && python docs/figures.py`; docs/figures.py makes the picture's file smaller.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from attnbench.workloads.batch import Cache

PICTURE = Path(__file__).parent.parent / "results" / "gallery" / "serving" / "pages.png"
BATCH, PAGE_SIZE = "q3kv21_q1kv14_q1kv33", 8
COLOURS = ("#0072B2", "#D55E00", "#009E73")
UNUSED, INK = "#E6E6E6", "#222222"


def draw() -> None:
    """Draw the pool on the left, a row for each page, and the block table with the lengths on the right."""
    cache = Cache(batch=BATCH, page_size=PAGE_SIZE, num_heads=1)
    layout, starts = cache.layout(), [0]
    for request in cache.requests:
        starts.append(starts[-1] + request.total)
    owner = {}
    for number, request in enumerate(cache.requests):
        slots = layout.slots[starts[number] : starts[number + 1]].tolist()
        owner |= {slot: (number, key, key >= request.total - request.new) for key, slot in enumerate(slots)}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(1.25, 1), layout="constrained")
    for page in range(layout.num_pages):
        left.text(-0.3, page + 0.5, f"page {page}", ha="right", va="center", fontsize=8, color=INK)
        for slot in range(PAGE_SIZE):
            number, key, is_new = owner.get(page * PAGE_SIZE + slot, (None, "NaN", False))
            colour = UNUSED if number is None else COLOURS[number]
            box = plt.Rectangle((slot, page), 1, 1, facecolor=colour, alpha=1.0 if is_new else 0.55, edgecolor="white")
            left.add_patch(box)
            left.text(
                slot + 0.5, page + 0.5, key, ha="center", va="center", fontsize=7, color="white" if is_new else INK
            )
    left.set(xlim=(-1.6, PAGE_SIZE), ylim=(layout.num_pages, 0))
    left.set_title("The pool: each slot holds a key, or NaN", fontsize=10, loc="left")
    right.set_title("What a function gets", fontsize=10, loc="left")
    for number, request in enumerate(cache.requests):
        pages = layout.block_table[number, : cache.num_pages[number]].tolist()
        words = f"request {number}: {request.new} new token{'s' * (request.new > 1)}, seq_lens {request.total}"
        table = f"block_table  {', '.join(map(str, pages))}, then any page"
        right.text(0, 0.9 - 0.28 * number, words, fontsize=9, color=COLOURS[number], weight="bold", va="top")
        right.text(0.04, 0.81 - 0.28 * number, table, fontsize=9, color=INK, va="top", family="monospace")
    right.text(
        0, 0.02, "Strong colours: keys of new tokens, which are\nthe last of their request.", fontsize=8, color=INK
    )
    for axes in (left, right):
        axes.axis("off")
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)


if __name__ == "__main__":
    draw()
