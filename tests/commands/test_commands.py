"""A file with COMMAND is a command; the fields of a dataclass parameter become options."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import attnbench
from attnbench import plugins
from attnbench.cli import PANELS, app
from attnbench.commands import EXIT_CODES, ExitCode
from attnbench.commands.options import SelectionOptions, TimingOptions
from attnbench.processes.planning import build_plan

COMMANDS = plugins.plugs("attnbench.commands", "COMMAND")


def test_every_file_that_holds_a_command_is_one_in_its_own_place():
    shown = [command.name for command in app.registered_commands]
    assert shown == sorted(COMMANDS, key=lambda name: COMMANDS[name].order)
    assert len({command.order for command in COMMANDS.values()}) == len(COMMANDS) == 15
    assert list(dict.fromkeys(command.rich_help_panel for command in app.registered_commands)) == list(PANELS)
    assert not {"options", "running", "terminal", "frame"} & set(COMMANDS)


def test_help_shows_groups_and_defaults_and_a_number_below_the_least_is_refused():
    help_text = CliRunner().invoke(app, ["run", "--help"], terminal_width=200).output
    for words in ("What", "How", "Output", "[default: quick]", "attnbench run --resume RUN"):
        assert words in help_text
    assert CliRunner().invoke(app, ["run", "--budget", "-1"]).exit_code == 2
    lines = CliRunner().invoke(app, ["fastest", "--help"], terminal_width=200).output.splitlines()
    places = [next(place for place, line in enumerate(lines) if text in line) for text in ("--from", "--to ", " How ")]
    assert places == sorted(places)  # --to was in the group of --results


QUANTITIES = {
    "SIZE": {"8GiB": 2.0**33, "8G": 2.0**33, "8 gib": 2.0**33, "1.5MiB": 1.5 * 2**20, "1000000": 1e6, "0": 0.0},
    "SECONDS": {"90": 90.0, "90s": 90.0, "1.5min": 90.0, "1h": 3600.0, "1500ms": 1.5, "1e3": 1000.0},
    "SHARE": {"0.02": 0.02, "2%": 0.02, "7.5 %": 0.075},
}
WITH_UNITS = [
    (name, command, each)
    for name, command in typer.main.get_command(app).commands.items()
    for each in command.params
    if each.metavar in QUANTITIES
]


@pytest.mark.parametrize(("name", "command", "option"), WITH_UNITS, ids=lambda part: getattr(part, "name", part))
def test_sizes_durations_and_shares_are_written_alike_in_all_commands(name, command, option):
    context = command.make_context(name, [], resilient_parsing=True)
    for text, value in QUANTITIES[option.metavar].items():
        if value:
            assert option.process_value(context, text) == pytest.approx(value)
    for text in ("many", "-1", "inf", "nan", "3 apples", "", *(["2"] if option.metavar == "SIZE" else [])):
        done = CliRunner().invoke(app, [name, f"{max(option.opts, key=len)}={text}"])
        assert done.exit_code == 2, (text, done.output)


def test_every_number_of_bytes_or_seconds_has_a_unit():
    assert len(WITH_UNITS) > 10
    known = {(name, option.name) for name, _, option in WITH_UNITS}
    for name, command in typer.main.get_command(app).commands.items():
        for option in command.params:
            if option.name.endswith("_s") or "memory" in option.name or "effect" in option.name:
                assert (name, option.name) in known


def test_every_exit_code_is_explained():
    assert set(EXIT_CODES) == set(ExitCode)
    shown = " ".join(CliRunner().invoke(app, ["--help"], terminal_width=500).output.split())
    assert all(f"{code.value} {words.split()[0]}" in shown for code, words in EXIT_CODES.items())


def test_the_version_is_that_of_the_package():
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.output) == (0, f"attnbench {version('attnbench')}\n")


@pytest.mark.parametrize(
    ("module", "heavy"),
    [("attnbench", {"numpy", "pandas", "torch"}), ("attnbench.processes.execution", {"pandas", "torch"})],
)
def test_what_need_not_be_imported_is_not(module, heavy):
    code = f"import sys, {module}; print(sorted({heavy!r} & set(sys.modules)))"
    environment = {"PYTHONPATH": str(Path(attnbench.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_each_run_draws_a_seed_unless_one_is_given():
    drawn = {SelectionOptions(sweep="check").fields()["seed"] for _ in range(8)}
    assert len(drawn) > 1
    assert SelectionOptions(sweep="check", seed=0).fields()["seed"] == 0


def test_conditions_and_the_phase_of_a_model_are_parameters_of_a_plan():
    typed = TimingOptions(sweep="quick", conditions="cold,graph, sustained,steady,shared", model="a/config.json:decode")
    expected = {"cache": "cold", "launch": "graph", "pace": "sustained", "allocator": "steady", "isolation": "shared"}
    expected |= {"model": "a/config.json", "phase": "decode"}
    assert expected.items() <= typed.fields().items()
    usual = TimingOptions(sweep="quick", model="smollm2-135m").fields()
    assert usual["model"] == "smollm2-135m"
    assert not {"phase", "cache", "allocator"} & usual.keys()


def test_a_device_alone_keeps_the_shapes_of_the_sweep():
    usual = build_plan(sweep="check", implementations=["sdpa"])
    set_alone = build_plan(sweep="check", implementations=["sdpa"], settings=["device=cpu"], is_exact=True)
    assert set_alone.workloads == tuple(each for each in usual.workloads if each.device == "cpu")
    assert len(set_alone.workloads) > 1


@pytest.mark.parametrize(
    ("conditions", "words"), [("clod", "did you mean cold"), ("cold,warm", "cold and warm exclude one another")]
)
def test_a_mistake_in_the_conditions_is_named(conditions, words):
    with pytest.raises(ValueError, match=words):
        TimingOptions(sweep="quick", conditions=conditions).fields()
