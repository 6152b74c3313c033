"""Hooks of vLLM's classes.

Owns: that a method is hooked once. Does not own: what a hook does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def hook(owner: type, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replaces a method by `around(method)`. A method that is hooked already, or missing, stays as it is."""
    original = getattr(owner, name, None)
    if original is None or hasattr(original, "_tensord_hook"):
        return
    hooked = around(original)
    hooked._tensord_hook = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)
