"""Checks whether computed values can be stored. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..status import unstorable
from .finding import Finding, ok, warn

_RECENT_S: Final = 3600.0


def stored(reasons: Sequence[Mapping[str, Any]] | None) -> Finding:
    """Whether values of `get_or_compute` were lately refused for good. `reasons`: from the daemon's status; None
    without a daemon, or from an older one."""
    check = "values"
    if reasons is None:
        return ok(check, "no daemon to ask")
    recent = [each for each in reasons if each["ago_s"] < _RECENT_S]
    if not recent:
        return ok(check, "all computed values could be stored")
    said = "; ".join(unstorable(each) for each in recent)
    return warn(
        check,
        f"every process computes these values itself, since they cannot be stored: {said}",
        "do what the reason says; until then each call of get_or_compute costs a computation",
    )
