"""The result of a check, and how a list of them is shown. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from ..output import pairs


class Level(StrEnum):
    """FAIL: it does not work, or will not. WARN: it works, but with less performance, or not permanently."""

    OK = "OK"
    WARN = "WARN"
    FAIL = "FAIL"


class Finding(NamedTuple):
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
    """The findings, and the number of findings by level."""
    rows = []
    for check, level, text, remedy in findings:
        rows.append((f"{level:<4}  {check}", text))
        rows += [("", f"-> {remedy}")] * bool(remedy)
    sums = Counter(finding.level for finding in findings)
    return f"{pairs(rows)}\n\n{', '.join(f'{sums[level]} {level}' for level in Level)}"
