"""Tables of detected mistakes. This module does not import torch."""

import math

import pandas as pd

from attnbench.units import markdown_table

TEMPLATE = """# What the check detects

Made by `nox -s detection`: {num_mistakes} known mistakes, planted in the textbook form, tried at lengths {lengths}
in {dtypes}; and {num_implementations} honest implementations on workloads and inputs drawn from {num_seeds} seeds.

Missed by our check: {missed}. Honest results that it rejected: {num_rejected} of {num_honest}; the nearest came to
{nearest} of its limit.

## Rules

Two numbers are the absolute and the relative tolerance. Every rule is given the float64 reference and every gradient,
which is more than most benchmarks give theirs. Ours on `all` is every probe and every rule of the check. A rule that
rejects honest results catches mistakes by luck.

{rules}
## Our check, by dtype and length

{by_length}
## Mistakes

Share of dtypes and lengths at which the best of the other rules, and ours, catch each mistake.

{mistakes}
Not tried, since there it cannot be made, makes no difference, or is no coarser than an honest rounding: {absent}.
"""
OURS = "ours"
OUR_WHOLE = ("all", OURS)
SHOWN_INPUTS = ("uniform", "normal", "needles")


def power(cells: pd.DataFrame) -> pd.DataFrame:
    """Compute the share of dtypes and lengths at which each mistake is caught, by input and rule; NaN if never tried.

    Rows are mistakes in the order of `cells`. Columns are pairs (inputs, rule); the last one is our whole check.
    """
    numbers = cells.assign(share=cells["is_caught"].astype(float))
    shares = numbers.pivot_table(values="share", index="mistake", columns=["inputs", "rule"], sort=False)
    rules = [rule for rule in dict.fromkeys(cells["rule"]) if rule != OURS]
    columns = [(inputs, rule) for inputs in SHOWN_INPUTS for rule in rules] + [OUR_WHOLE]
    return shares.reindex(index=list(dict.fromkeys(cells["mistake"])), columns=pd.MultiIndex.from_tuples(columns))


def summary(cells: pd.DataFrame, trials: pd.DataFrame) -> pd.DataFrame:
    """Count mistakes tried and caught (with the share caught), and right results tried and rejected.

    There is a row for each column (inputs, rule) of `power`.
    """
    caught = cells.groupby(["inputs", "rule"], sort=False)["is_caught"].agg(["size", "sum"])
    rejected = (~trials.set_index(["inputs", "rule"])["is_right"]).groupby(level=[0, 1]).agg(["size", "sum"])
    made = pd.DataFrame(
        {
            "mistakes tried": caught["size"],
            "caught": caught["sum"],
            "share": caught["sum"] / caught["size"],
            "honest tried": rejected["size"],
            "honest rejected": rejected["sum"],
        }
    )
    order = power(cells).columns
    return made.reindex(order).rename_axis(["inputs", "rule"])


def by_length(cells: pd.DataFrame) -> pd.DataFrame:
    """Build a table by dtype and length; "3 of 4" means that our whole check caught 3 of the 4 mistakes tried."""
    whole = cells[(cells["inputs"] == "all") & (cells["rule"] == OURS)]
    return whole.pivot_table(values="is_caught", index="dtype", columns="length", aggfunc=_of, sort=False)


def _of(caught: "pd.Series[bool]") -> str:
    return f"{int(caught.sum())} of {len(caught)}"


def markdown(cells: pd.DataFrame, absent: pd.DataFrame, trials: pd.DataFrame, words: dict[str, str]) -> str:
    """Format the whole report as Markdown; `words` has the description of each mistake, by name."""
    lengths = ", ".join(map(str, sorted(cells["length"].unique())))
    missed = cells[(cells["inputs"] == "all") & ~cells["is_caught"]]
    whole = trials[trials["inputs"] == "all"]
    return TEMPLATE.format(
        num_mistakes=cells["mistake"].nunique(),
        lengths=lengths,
        dtypes=", ".join(cells["dtype"].unique()),
        num_implementations=whole["implementation"].nunique(),
        num_seeds=trials["seed"].nunique(),
        rules=_markdown(_percent(summary(cells, trials).reset_index())),
        by_length=_markdown(by_length(cells).reset_index()),
        mistakes=_markdown(_mistakes(cells, words)),
        missed=", ".join(sorted(set(missed["mistake"]))) or "none",
        num_rejected=int((~whole["is_right"]).sum()),
        num_honest=len(whole),
        nearest=f"{whole['error_ratio'].max():.2f}",
        absent=_absences(absent),
    )


def wide(cells: pd.DataFrame) -> pd.DataFrame:
    """Pivot the cells: a row for each mistake, dtype and length; a column for each input and rule (True: caught)."""
    place = ["mistake", "form", "step", "dtype", "length", "workload"]
    asked = cells["inputs"] + ": " + cells["rule"]
    told = cells.assign(asked=asked)
    shaped = told.pivot_table(index=place, columns="asked", values="is_caught", aggfunc="first")
    rows = pd.MultiIndex.from_frame(cells[place].drop_duplicates())
    return shaped.reindex(rows, columns=asked.unique()).reset_index()


def _mistakes(cells: pd.DataFrame, words: dict[str, str]) -> pd.DataFrame:
    shares = power(cells)
    best = {
        f"{inputs}, best of the others": shares[inputs].to_numpy(dtype=float).max(axis=1)
        for inputs in SHOWN_INPUTS
        if inputs in shares
    }
    made = pd.DataFrame({"mistake": shares.index, "what is wrong": [words[name] for name in shares.index]})
    for title, values in best.items():
        made[title] = [share(value) for value in values]
    made["ours"] = [share(value) for value in shares[OUR_WHOLE]]
    return made


def _absences(absent: pd.DataFrame) -> str:
    if absent.empty:
        return "nothing"
    told = []
    for name, found in absent.groupby("mistake", sort=False):
        places = found.groupby("dtype", sort=False)["length"].apply(lambda lengths: ", ".join(map(str, lengths)))
        told.append(f"`{name}` ({'; '.join(f'{dtype} at {lengths}' for dtype, lengths in places.items())})")
    return ", ".join(told)


def _percent(table: pd.DataFrame) -> pd.DataFrame:
    texts = table.copy()
    texts["share"] = [share(value) for value in texts["share"]]
    for column in ("honest tried", "honest rejected"):
        texts[column] = ["-" if pd.isna(value) else str(int(value)) for value in texts[column]]
    return texts


def share(value: float) -> str:
    """Format a share in percent: 100 only for a share of 1, 0 only for 0, and "-" for NaN."""
    if math.isnan(value):
        return "-"
    shown = round(100 * value)
    return f"{min(99, max(1, shown)) if 0 < value < 1 else shown} %"


def _markdown(table: pd.DataFrame) -> str:
    return markdown_table(table.astype(str).rename(columns=str).to_dict("records"))  # type: ignore[arg-type]
