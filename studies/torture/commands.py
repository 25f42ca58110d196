"""Invalid command lines and sweeps: each must end with one line that quotes the input and gives a fix."""

import contextlib
import os
import random
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import typer

from attnbench import cli
from attnbench.commands import running
from attnbench.units import sanitize_line
from studies.torture.trial import Trial, note

VALUES = (
    *("", "0", "-1", "1e999", "nan", "inf", "99999999999999999999999", "x" * 5000, "\x1b[31mred", "\udcff", "..", "/"),
    *("seq_len=", "seq_len=0", "seq_len=-5", "seq_len=2147483649", "seq_length=3", "mask=casual", "=", "a=b=c", "--"),
    *("mask=sliding_window()", "mask=sliding_window(99999999999999)", "num_heads=7", "embed_dim=512", "dropout=2"),
    *("num_threads=100000", "device=cuda:99", "device=tpu", "dtype=float8", "scope=both", "seed=-1", "kv_len=3,x"),
    *("..=fused", "\x1b[2J=fused", "fusde", "nowhere.py:f", "mine.py", "mine.py:nothing", "fused+fast", "fused,sdpa"),
    *("nothing", "nothing.toml", "broken.toml", "endless.toml", "/dev/null", "rev:nowhere", "$(touch here)", "😀", "-"),
    *("batch_size=2147483648", "head_dim=2147483648", "num_kv_heads=3", "layout=broadcast", "bias=some"),
)
SKIPPED = 125  # exit code for `git bisect run`: this commit cannot be judged
HINTS = (
    *(
        "one of",
        "choose",
        "give",
        "allowed",
        "did you mean",
        "see: attnbench",
        "write it as",
        "begin with",
        "leave out",
        "install it with",
    ),
    *("name ", "rename", "as in", "go to one", "end in", "put axes into"),
)
"""Phrases of which a message contains at least one if it gives a fix or the allowed values."""
USUAL = ("results", "BASE and CANDIDATE", "there is no name")
"""Words that a message may contain instead of the input: names of defaults, missing arguments and empty names."""
NOT_TRIED = {"tensorboard", "doctor", "inspect"}
"""Commands that are not tried, because they start a server, measure something, or load torch."""
SWEEP = 'summary = "x"\n[[grid]]\nseq_len = [16]\nnum_heads = [2]\nmask = ["none", "causal"]\n'
ACCEPTED = 77
LIMIT_S = 20


def fuzzed(folder: Path, number: int, seed: int = 3) -> Iterator[Trial]:
    """Try `number` inputs: two thirds random command lines, one third random sweep files; all end before measuring."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "broken.toml").write_text("grid = [\n")
    (folder / "endless.toml").write_text(
        'summary = "x"\n[[grid]]\n'
        + "".join(f"{name} = {list(range(1, 1001))}\n" for name in ("seq_len", "batch_size", "seed"))
    )
    (folder / "mine.py").write_text("def mine(query, key, value):\n    return value\n")
    draws = random.Random(seed)
    commands = {each.name: each for each in typer.main.get_command(cli.app).commands.values()}  # type: ignore[attr-defined]
    for turn in range(number):
        if turn % 3:
            arguments = _line(draws, commands)
        else:
            (folder / "sweep.toml").write_text(_sweep(draws), encoding="utf-8", errors="replace")
            arguments = ["run", "--sweep", "sweep.toml"]
        yield told(folder, arguments)


def _line(draws: random.Random, commands: dict[str, object]) -> list[str]:
    name = draws.choice([each for each in commands if each not in NOT_TRIED])
    words = [name] if draws.random() > 0.03 else [draws.choice(VALUES)]  # noqa: PLR2004 - some name no command
    for _ in range(draws.randint(1, 4)):
        param = draws.choice(commands[name].params)  # type: ignore[attr-defined]
        option = max(param.opts, key=len)
        if option in {"--help", "--open"}:
            continue
        if option.startswith("-"):
            words += [option] if param.is_flag else [option, draws.choice(VALUES)]
        else:
            words.append(draws.choice(VALUES))
    return words


def _sweep(draws: random.Random) -> str:
    lines = SWEEP.splitlines()
    for _ in range(draws.randint(1, 3)):
        place = draws.randrange(len(lines) + 1)
        kind = draws.randrange(4)
        if kind == 0 and lines:
            del lines[place % len(lines)]
        elif kind == 1:
            lines.insert(
                place,
                draws.choice(("budget_s = -1", "[[grid]]", "seq_len = 0", "metrics = ['speed']", "num_blocks = 0")),
            )
        elif kind == 2 and lines:  # noqa: PLR2004 - one of four
            line = lines[place % len(lines)]
            lines[place % len(lines)] = line[: draws.randrange(len(line) + 1)] + draws.choice(VALUES)
        else:
            lines.insert(
                place, f"{draws.choice(('seq_len', 'masks', 'num_heads', 'dtype'))} = {draws.choice(VALUES)!r}"
            )
    return "\n".join(lines) + "\n"


def told(folder: Path, arguments: list[str]) -> Trial:
    """Run one command line in a fork of this process, and judge its exit code and output."""
    output = folder / "output.txt"
    child = os.fork()
    if not child:
        _child(folder, arguments, output)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    printed = output.read_text(encoding="utf-8", errors="replace")
    what = sanitize_line(" ".join(arguments), 100)
    died = unclear = ""
    due = {SKIPPED} if "--bisect" in arguments else set[int]()
    if code == -signal.SIGALRM:
        died = "it hung"
    elif code not in {0, 1, 2, 3, 4, ACCEPTED} | due or "Traceback" in printed:
        died = f"exit code {code}: {note(printed)}"
    elif code in {2, 4}:
        said = [line for line in printed.splitlines() if line.startswith(("error: ", "invalid session: "))]
        if len(said) != 1 or not said[0].isprintable():
            unclear = f"not one line: {note(printed)}"
        elif code == 2 and not any(hint in said[0] for hint in HINTS):  # noqa: PLR2004 - wrong usage
            unclear = f"without a way out: {said[0]}"
        elif not _names(said[0], arguments, folder):
            unclear = f"without the input: {said[0]}"
    return Trial(subject="command lines and sweeps", what=what, died=died, unclear=unclear)


def _names(said: str, arguments: list[str], folder: Path) -> bool:
    """Return whether the message `said` contains part of the input, or one of the words in USUAL."""
    given = [*arguments[1:], arguments[0], *USUAL]
    for sweep in ("sweep.toml", "endless.toml"):
        if sweep in given:
            given += (folder / sweep).read_text(encoding="utf-8").replace("=", " ").split()
    words = [sanitize_line(part, 30).rstrip(".") for each in given for part in (each, each.partition("=")[2])]
    is_empty_named = "" in arguments and "''" in said
    return is_empty_named or any(word and word.strip("'\"[],") in said for word in words) or "given: " in said


def _child(folder: Path, arguments: list[str], output: Path) -> None:
    """Run attnbench with these arguments, and exit with ACCEPTED as soon as it would start to measure."""

    def accept(*_: object, **__: object) -> None:
        os._exit(ACCEPTED)

    try:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")  # pytest replaces both
        os.chdir(folder)
        signal.alarm(LIMIT_S)
        running.execute = accept  # type: ignore[assignment]
        sys.argv = ["attnbench", *arguments]
        with contextlib.suppress(SystemExit):
            try:
                cli.main()
            except SystemExit as ended:
                sys.stdout.flush()
                os._exit(int(ended.code or 0))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - this study looks for such errors
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(99)
