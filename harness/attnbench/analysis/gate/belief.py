"""What is too good to be believed: code that computes less than it did is faster too."""

import msgspec

from attnbench.analysis.gate import certain
from attnbench.analysis.gate.cells import Couple
from attnbench.analysis.gate.rulings import Kind, Outcome, Ruling
from attnbench.analysis.gate.thresholds import Thresholds

WHOLE = ("normal", "needles", "large", "equal")
"""The probes of a whole check (checking/probes.py); a workload on which one says nothing tries fewer."""


def believed(ruling: Ruling, couple: Couple, thresholds: Thresholds) -> Ruling:
    """The same, or a finding where it is too good to be taken over: it may compute less than it did."""
    if ruling.kind is not Kind.faster or ruling.effect is None or ruling.effect >= 1 - thresholds.suspicious:
        return ruling
    assert couple.candidate is not None
    if is_checked(couple):
        words = f"{ruling.words}; more than {100 * thresholds.suspicious:g} %, and its check in this run was whole"
        return msgspec.structs.replace(ruling, words=words)
    words = f"{ruling.words}: too good to be believed without a check of its own; run it with its check"
    return msgspec.structs.replace(ruling, kind=Kind.suspicious, outcome=Outcome.finding, words=words)


def is_checked(couple: Couple) -> bool:
    """Whether the candidate was checked in its run, agreed, and was tried on everything or on all that the base was."""
    assert couple.candidate is not None
    agreement = couple.candidate.agreement
    if agreement is None or not agreement.agrees:
        return False
    tried = {probe.probe for probe in agreement.probes}
    before = None if couple.base is None else couple.base.agreement
    wanted = certain.tried(before) if before is not None else set()
    return set(WHOLE) <= tried or (bool(wanted) and wanted <= certain.tried(agreement) and len(tried) > 1)
