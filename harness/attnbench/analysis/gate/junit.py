"""A decision as JUnit XML, which CI systems show as tests: one test case for each cell, one for the suite.

A cell with a finding is a failure, one that could not be judged is skipped, an invalid session is an error.

Source of the form: the schema of the JUnit plug-in of Jenkins, https://github.com/jenkinsci/junit-plugin.
"""

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from attnbench.analysis.gate.rulings import EVERY, Decision, Outcome, Ruling
from attnbench.analysis.gate.text import compared, headline
from attnbench.text import plain


def document(decision: Decision) -> str:
    """The whole document."""
    cells: dict[tuple[str, str], list[Ruling]] = {}
    for ruling in decision.rulings:
        cells.setdefault((ruling.workload, ruling.implementation), []).append(ruling)
    suite = ET.Element("testsuite", name="attnbench gate")
    for (workload, implementation), rulings in cells.items():
        _case(suite, workload, implementation, rulings)
    whole = _case(suite, "suite", "geometric mean", [decision.suite])
    if decision.outcome is Outcome.invalid:
        ET.SubElement(whole, "error", message=plain(headline(decision)), type="invalid")
    counts = {
        "tests": "testcase",
        "failures": "testcase/failure",
        "errors": "testcase/error",
        "skipped": "testcase/skipped",
    }
    for name, path in counts.items():
        suite.set(name, str(len(suite.findall(path))))
    ET.SubElement(suite, "system-out").text = plain(f"{compared(decision)}. {headline(decision)}")
    top = ET.Element("testsuites")
    top.append(suite)
    ET.indent(top)
    return ET.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def _case(suite: ET.Element, workload: str, implementation: str, rulings: Sequence[Ruling]) -> ET.Element:
    case = ET.SubElement(suite, "testcase", classname=plain(workload), name=plain(implementation))
    findings = [ruling for ruling in rulings if ruling.outcome is Outcome.finding]
    unjudged = [ruling for ruling in rulings if ruling.outcome is Outcome.inconclusive]
    if findings:
        kinds = ", ".join(dict.fromkeys(str(ruling.kind) for ruling in findings))
        ET.SubElement(case, "failure", message=_words(findings[:1]), type=kinds).text = _words(findings)
    elif unjudged:
        ET.SubElement(case, "skipped", message=_words(unjudged))
    ET.SubElement(case, "system-out").text = _words(rulings)
    return case


def _words(rulings: Sequence[Ruling]) -> str:
    """A line for each ruling."""
    lines = (f"{'suite' if ruling.workload == EVERY else ruling.metric}: {ruling.words}" for ruling in rulings)
    return "\n".join(plain(line) for line in lines)
