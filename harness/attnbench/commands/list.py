"""`attnbench list`: list implementations, sweeps, axes, masks, models, metrics or reports."""

from collections.abc import Iterable, Sequence
from typing import Literal

from attnbench import plugins
from attnbench.commands import OUTPUT, Command
from attnbench.commands.frame import present
from attnbench.commands.terminal import print_table
from attnbench.console import say
from attnbench.devices import device, names
from attnbench.units import grouped
from attnbench.workloads import models, sweep
from attnbench.workloads.masks import Combined, Mask, masks
from attnbench.workloads.workload import CHOICES, FOLLOWS, Workload

What = Literal["implementations", "sweeps", "axes", "masks", "models", "metrics", "reports"]


def list_what(what: What = "implementations") -> None:
    """List implementations and what each supports here; or axes, sweeps, models, masks, metrics or reports.

    Options:
        what: The list to print.
    """
    if what == "implementations":
        supports = implementations(plugins.implementation_names())
        present(lambda: supports, lambda: print_support(supports))
        return
    listed = entries(what)
    columns = [column for column in listed[0] if column != "source"]

    def show() -> None:
        print_table(columns, [tuple(map(entry.__getitem__, columns)) for entry in listed])
        for entry in listed:
            if "source" in entry:
                say(f"{entry[columns[0]]}: {entry['source']}", "dim")

    present(lambda: listed, show)


QUESTIONS: dict[str, dict[str, object]] = {
    "attention only": {},
    "module": {"scope": "module"},
    "causal": {"mask": "causal", "scope": "module"},
    "window": {"mask": "sliding_window(8)", "scope": "module"},
    "padding": {"mask": "padding", "scope": "module"},
    "alibi": {"mask": "causal+alibi", "scope": "module"},
    "softcap": {"mask": "causal+softcap(20)", "scope": "module"},
    "grouped heads": {"num_kv_heads": 2, "scope": "module"},
    "other key length": {"kv_len": 96, "scope": "module"},
    "other value width": {"value_dim": 32, "scope": "module"},
    "f64": {"dtype": "float64", "scope": "module"},
    "bf16": {"dtype": "bfloat16", "scope": "module"},
    "f16": {"dtype": "float16", "scope": "module"},
    "train": {"direction": "forward_backward", "scope": "module"},
    "dropout": {"direction": "forward_backward", "dropout": 0.1, "scope": "module"},
    "layout": {"layout": "transposed"},
}
QUESTIONS |= {
    name: {"device": name, "dtype": "bfloat16", "scope": "module"}
    for name in names()
    if name != Workload().device and not device(name).untried
}
"""Columns of the table: whether an implementation supports a small workload with these axes, by default in inference.
"attention only" and "layout" need scope attention; the others use scope module, which all implementations have."""
USUAL: dict[str, object] = {"seq_len": 64, "batch_size": 2, "direction": "inference"}
MASKS = ("none", "causal")
"""Masks to try for a column that sets none: some implementations support only one of these two."""
DEFAULTS = {axis: rule if "*" in rule else f"as {rule}" for axis, rule in FOLLOWS.items()} | {
    "head_dim": "embed_dim / num_heads, or 64",
    "num_threads": "physical cores",
    "scale": "1 / sqrt(head_dim)",
}
"""Descriptions of defaults that are not plain numbers, by axis."""
ALLOWED = {axis: ", ".join(choices) for axis, choices in CHOICES.items()} | {
    "device": f"{', '.join(names())}; NAME:N for one of several; or all",
    "mask": "see `attnbench list masks`",
    "dropout": "a probability below 1; not in inference",
    "scale": "a number above 0",
}
ALLOWED["layout"] += "; scope attention alone"
ALLOWED["float32_matmul_precision"] += "; dtype float32 alone; TF32 on CUDA"


def entries(what: str) -> list[dict[str, str]]:
    """Return the rows of a list of sweeps, axes, masks, models, metrics or reports. All rows have the same columns."""
    match what:
        case "sweeps":
            sweeps = {name: sweep.load(name) for name in sweep.names()}
            numbers = {name: len(sweep.workloads(each, {}, ("cpu",))) for name, each in sweeps.items()}
            return [
                {"sweep": name, "workloads": f"{numbers[name]} on the CPU", "meaning": each.summary}
                for name, each in sweeps.items()
            ]
        case "axes":
            kinds = {int: "a whole number", float: "a number"}
            defaults = {name: str(DEFAULTS.get(name, getattr(Workload(), name))) for name in sweep.AXES}
            return [
                {"axis": name, "default": defaults[name], "allowed": ALLOWED.get(name, kinds.get(axis.type, "a word"))}
                for name, axis in sweep.AXES.items()
            ]
        case "models":
            presets = [models.preset(name) for name in models.names()]
            sizes = {each.name: models.summarised(each) for each in presets}
            return [
                {"model": each.name, "layers x H/G/K": sizes[each.name], "phases": ", ".join(each.phases)}
                | {"meaning": each.summary, "source": each.source}
                for each in presets
            ]
        case "masks":
            listed: list[type[Mask]] = [*masks().values(), Combined]
            return [{"mask": mask.usage, "meaning": mask.summary} for mask in listed]
        case "metrics":
            found = plugins.plugs("attnbench.metrics", "METRIC")
            return [{"metric": name, "unit": metric.unit, "meaning": metric.summary} for name, metric in found.items()]
        case _:
            found = plugins.plugs("attnbench.reports", "REPORT")
            return [{"report": name, "meaning": report.summary} for name, report in found.items()]


def implementations(specs: Iterable[str]) -> list[dict[str, str]]:
    """Return a row for each implementation, which is given as a name or as path/to/file.py:Name.

    A row says yes or no for each feature, and has the reasons for each no in `why`, and the `source`. If an
    implementation cannot be loaded, every feature is "?", and `source` has the error.
    """
    from attnbench.case import reason_against
    from attnbench.contract.loading import implementation

    rows: list[dict[str, str]] = []
    for spec in specs:
        row, against = {"implementation": plugins.name_of(spec)}, dict[str, None]()
        try:
            plug = implementation(spec)
            for column, axes in QUESTIONS.items():
                workloads = [Workload(**({"mask": mask} | USUAL | axes)) for mask in MASKS]  # type: ignore[arg-type]
                reasons = [reason_against(plug, workload) or "" for workload in workloads]
                row[column] = "no" if all(reasons) else "yes"
                against |= {" ".join(reasons[0].split()): None} if all(reasons) else {}
        except Exception as error:  # noqa: BLE001 - a plug that cannot be loaded is listed like the others
            why = f"cannot be loaded: {type(error).__name__}: {error}"
            rows.append(row | dict.fromkeys(QUESTIONS, "?") | {"why": "", "source": why})
            continue
        rows.append(row | {"why": "; ".join(against), "source": plug.source})
    return rows


def print_support(entries: Sequence[dict[str, str]]) -> None:
    """Print the features that usable implementations lack, then implementations that support nothing here, and why."""

    def is_yes_for_some(question: str) -> bool:
        return any(entry[question] == "yes" for entry in entries)

    columns = list(filter(is_yes_for_some, QUESTIONS))
    here = [entry for entry in entries if "yes" in map(entry.__getitem__, columns)]
    rows = []
    for entry in here:
        lacks = [name for name in columns if entry[name] != "yes"]
        rows.append((entry["implementation"], ", ".join(lacks) or "-"))
    print_table(("implementation", "lacks"), rows)
    absent = [entry for entry in entries if entry not in here]
    first = grouped(absent, lambda entry: entry["why"].partition("; ")[0] or entry["source"])
    for reason, members in first.items():
        say(f"Not here: {', '.join(entry['implementation'] for entry in members)}: {reason}", "dim")
    for entry in entries if OUTPUT.is_verbose else ():
        say(f"{entry['implementation']}: {entry['why'] or '-'} ({entry['source']})", "dim")


COMMAND = Command(list_what, order=310)
