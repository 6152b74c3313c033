"""The result of a check. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..tables import WIDTH, wrapped


class Level(StrEnum):
    """FAIL: it does not work, or will not. WARN: it works, but with less performance, or not permanently."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `remedy` says what to do; empty if nothing has to be done."""

    check: str
    level: Level
    text: str
    remedy: str = ""


def ok(check: str, text: str) -> Finding:
    return Finding(check, Level.OK, text)


def warn(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.WARN, text, remedy)


def fail(check: str, text: str, remedy: str) -> Finding:
    return Finding(check, Level.FAIL, text, remedy)


def findings_text(findings: Sequence[Finding]) -> str:
    """The findings as text within 100 columns, and the number of findings by level."""
    width = max(len(finding.check) for finding in findings)
    indent = " " * (4 + 2 + width + 2)
    lines = []
    for finding in findings:
        first, *rest = wrapped(finding.text, WIDTH - len(indent))
        lines.append(f"{finding.level:<4}  {finding.check:<{width}}  {first}")
        lines += [indent + line for line in rest]
        if finding.remedy:
            arrow, *rest = wrapped(finding.remedy, WIDTH - len(indent) - 3)
            lines.append(f"{indent}-> {arrow}")
            lines += [f"{indent}   {line}" for line in rest]
    sums = Counter(finding.level for finding in findings)
    lines += ["", ", ".join(f"{sums[level]} {level}" for level in Level)]
    return "\n".join(lines)
