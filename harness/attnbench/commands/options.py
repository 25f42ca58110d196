"""Options that several commands share: each field becomes an option (frame.py)."""

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Annotated, Any, Self

import typer

from attnbench import plugins
from attnbench.processes.planning import build_plan, condition_fields, draw_seed
from attnbench.storage.events import Plan
from attnbench.workloads.models import PHASES


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """Options that select workloads, implementations and limits: parameters of build_plan.

    Options:
        sweep (NAME|FILE): A sweep (attnbench list sweeps), or a TOML file.
        settings (--set AXIS=V,V): Values of an axis (attnbench list axes); may be repeated. Without --sweep: exactly
            these shapes. With --sweep: only its workloads with these values. device alone: the usual workloads there.
        model (NAME[:PHASE]): Shapes of a model's attention: a preset (attnbench list models) or a Hugging Face
            config.json. PHASE is prefill (the default), decode or training.
        implementations (--implementation -i NAME|FILE.py:NAME): May be repeated. NAME+compile: with torch.compile.
            LABEL=FILE.py:NAME: under another name. Default: those of the sweep, or all. Needed to compare revisions,
            folders or environments.
        call_limit_s (--call-limit SECONDS): Leave out calls that are predicted to take longer. Default: the sweep's.
        timeout_s (--timeout SECONDS): Kill a step that takes longer.
        seed (N): Seed of inputs and of all orders. Default: drawn.
    """

    sweep: str
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME|FILE.py:NAME", help="Implementations, as with -i. FILE.py: all in that file."),
    ] = None
    settings: list[str] | None = None
    model: str = ""
    context: typer.Context = None  # type: ignore[assignment]  # typer passes it
    implementations: list[str] | None = None
    call_limit_s: float | None = None
    timeout_s: float = 60.0
    seed: int | None = None

    @property
    def named(self) -> list[str]:
        """Specs of the named implementations; a file stands for all implementations in it.

        Raises:
            ValueError: a file cannot be read, or has no implementation.
        """
        return [
            spec for name in [*(self.names or ()), *(self.implementations or ())] for spec in plugins.expand_spec(name)
        ]

    @property
    def has_shapes(self) -> bool:
        """Whether --set or --model chooses shapes; a device alone does not."""
        return bool(self.model) or any(axis != "device" for axis in self.axes)

    @property
    def axes(self) -> list[str]:
        """The axes that --set names."""
        return [each.partition("=")[0].strip() for each in self.settings or ()]

    @property
    def typed(self) -> set[str]:
        """Names of the options ("--set") and arguments ("names") that the user gave on the command line."""
        if not bool(self.context):  # not from a command line
            return set()
        long_names = {each.name: max(each.opts, key=len) for each in self.context.command.params}
        sources = {name: self.context.get_parameter_source(name) for name in self.context.params}
        return {long_names[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}

    def with_settings(self, *settings: str) -> Self:
        """Return these options with added settings (AXIS=V,V), unless --set, --model or --sweep chooses shapes."""
        is_chosen = self.has_shapes or "--sweep" in self.typed
        return self if is_chosen else replace(self, settings=[*settings, *(self.settings or ())])

    def plan(self, **more: Any) -> Plan:  # noqa: ANN401 - other parameters of build_plan
        """Build the plan of these options; `more` are further parameters of build_plan.

        Raises:
            ValueError: an option has a value that is not allowed, or two options exclude one another.
        """
        return build_plan(**self.fields(**more))

    def fields(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as of `plan`
        """Return the parameters of build_plan that these options set, and `more`.

        Raises:
            ValueError: both --model and --sweep are given.
        """
        if self.model and "--sweep" in self.typed:
            raise ValueError("--model and --sweep exclude one another: give one of them")
        others = {"context", "names", "implementations", "model", "conditions"}
        values = {name: value for name, value in vars(self).items() if value is not None and name not in others}
        if "implementations" not in more:
            values["implementations"] = self.named
        values.setdefault("seed", draw_seed())
        values["is_exact"] = bool(self.context) and "--sweep" not in self.typed
        name, _, phase = self.model.rpartition(":")
        values |= {"model": name, "phase": phase} if phase in PHASES else {"model": self.model}
        return values | more


@dataclass(frozen=True, kw_only=True)
class TimingOptions(SelectionOptions):
    """Selection and timing options.

    Options:
        budget_s (--budget SECONDS): Wall time of the run, once torch is imported (3 s). The run ends earlier when all
            verdicts are decided. Default: the sweep's.
        smallest_effect (SHARE): Differences below this share count as equal. Default: the sweep's, or 0.02.
        num_rounds (--rounds N): Fewest processes for each cell: a verdict needs 4, and a gate should have 8.
        conditions (WORD,WORD): Conditions of timed calls: cold (empty caches), graph (a CUDA graph), sustained (until
            clocks settle), an allocator (system, steady or retain), and process or shared (one process for all code,
            if you trust it).
        is_refereed (--referee): For code that may cheat: another process measures the times, over samples of 20 ms on
            inputs that the code cannot know before, and some outputs are judged afterwards. Takes longer.
    """

    budget_s: float | None = None
    smallest_effect: float | None = None
    num_rounds: int | None = None
    conditions: str = ""
    is_refereed: bool = False

    def fields(self, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - as of `plan`
        """Return the parameters of build_plan that these options and their conditions set, and `more`.

        Raises:
            ValueError: a condition is unknown, two conditions or --referee and a condition exclude one another, or
                both --model and --sweep are given.
        """
        chosen = condition_fields(self.conditions)
        if self.is_refereed and (unfit := sorted(chosen.keys() & {"launch", "pace", "cache", "isolation"})):
            raise ValueError(f"--referee and --conditions {chosen[unfit[0]]} exclude one another: give one of them")
        return super().fields(**(chosen | more))


def require_extra(module: str, extra: str) -> None:
    """Check that an optional package is installed.

    Raises:
        ValueError: the package is not installed; the message has the command that installs it.
    """
    if find_spec(module) is None:
        raise ValueError(f"{module} is not installed: pip install -e '.[{extra}]' in the checkout")
