"""What there is to list, as rows of texts: implementations and what each supports here, sweeps, axes, masks, plugs."""

from collections.abc import Iterable

from harness import plugins, sweep
from harness.mask import Combined, Mask, masks
from harness.records import BIASES, DIRECTIONS, DTYPES, SCOPES, Workload

QUESTIONS: dict[str, dict[str, object]] = {
    "attend": {},
    "module": {"scope": "module"},
    "causal": {"mask": "causal", "scope": "module"},
    "padding": {"mask": "padding", "scope": "module"},
    "alibi": {"mask": "causal+alibi", "scope": "module"},
    "softcap": {"mask": "causal+softcap(20)", "scope": "module"},
    "G<H": {"num_kv_heads": 2, "scope": "module"},
    "T!=S": {"kv_len": 96, "scope": "module"},
    "V!=K": {"value_dim": 32, "scope": "module"},
    "bf16": {"dtype": "bfloat16", "scope": "module"},
    "cuda": {"device": "cuda", "scope": "module"},
}
"""A column each: does the implementation support a small workload with these axes? `attend` asks for scope attention;
the others are asked in scope module, which all have."""
FOLLOWS = {
    "kv_len": "as seq_len",
    "num_kv_heads": "as num_heads",
    "head_dim": "embed_dim / num_heads, or 64",
    "value_dim": "as head_dim",
    "embed_dim": "num_heads * head_dim",
    "num_threads": "physical cores",
}
"""What an axis is where it is not given, or given as 0."""
ALLOWED = {
    "dtype": ", ".join(DTYPES),
    "direction": ", ".join(DIRECTIONS),
    "scope": ", ".join(SCOPES),
    "bias": ", ".join(BIASES),
    "device": "cpu, cuda, cuda:N, or all",
    "mask": "see `attnbench list masks`",
    "dropout": "a probability below 1",
}


def entries(what: str) -> list[dict[str, str]]:
    """The rows of a list, all with the same columns: sweeps, axes, masks, metrics or reports."""
    match what:
        case "sweeps":
            return [_sweep(name) for name in sweep.names()]
        case "axes":
            return [_axis(name) for name in sweep.AXES]
        case "masks":
            listed: list[type[Mask]] = [*masks().values(), Combined]
            return [{"mask": mask.usage, "meaning": mask.summary} for mask in listed]
        case "metrics":
            found = plugins.plugs("harness.metrics", "METRIC")
            return [{"metric": name, "unit": metric.unit, "meaning": metric.summary} for name, metric in found.items()]
        case _:
            found = plugins.plugs("harness.reports", "REPORT")
            return [{"report": name, "meaning": report.summary} for name, report in found.items()]


def _sweep(name: str) -> dict[str, str]:
    found = sweep.load(name)
    number = len(sweep.workloads(found, {}, ("cpu",)))
    return {"sweep": name, "workloads": f"{number} on the CPU", "meaning": found.summary}


def _axis(name: str) -> dict[str, str]:
    default = FOLLOWS.get(name, getattr(Workload(), name))
    kind = {int: "a whole number", float: "a number"}.get(sweep.AXES[name].type, "a word")
    return {"axis": name, "default": str(default), "allowed": ALLOWED.get(name, kind)}


def implementations(specs: Iterable[str]) -> list[dict[str, str]]:
    """A row for each implementation, by name or path/to/file.py:Name: what it supports here, and its source."""
    return [_implementation(spec) for spec in specs]


def _implementation(spec: str) -> dict[str, str]:
    """What it supports; a plug that cannot be loaded is listed with its error, since the others still count."""
    from harness.adapt import implementation
    from harness.case import reason_against

    try:
        found = implementation(spec)
        answers = {
            column: "yes" if reason_against(found, Workload(seq_len=64, batch_size=2, **axes)) is None else "no"  # type: ignore[arg-type] # the axes of QUESTIONS
            for column, axes in QUESTIONS.items()
        }
        source = found.source
    except Exception as error:  # noqa: BLE001 - whatever importing somebody's plug raises
        answers, source = dict.fromkeys(QUESTIONS, "?"), f"cannot be loaded: {type(error).__name__}: {error}"
    return {"implementation": plugins.name_of(spec), **answers, "source": source}
