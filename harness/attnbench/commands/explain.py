"""`attnbench explain`: look up the meaning of a word on a screen."""

from attnbench.commands import Command
from attnbench.commands.frame import present
from attnbench.console import say
from attnbench.explained import KINDS, explained, explanations


def explain(name: list[str] | None = None) -> None:
    """Explain a word that a screen, a page or JSON shows: what it means, why it matters, and what to do.

    Options:
        name ([NAME]): A mistake, verdict, status, warning, rule or note. Default: list all.
    """
    found = explained(" ".join(name)) if name else list(explanations())

    def show() -> None:
        for each in found if name else ():
            say(f"{each.name} ({KINDS[each.kind].lower()})", "bold")
            for line in (each.means, f"Why: {each.why}", f"Example: {each.example}", f"Do: {each.do}"):
                say(line)
        for kind, title in KINDS.items() if not name else ():
            say(f"{title}: {', '.join(each.name for each in found if each.kind == kind)}")

    present(lambda: found, show)


COMMAND = Command(explain, order=330)
