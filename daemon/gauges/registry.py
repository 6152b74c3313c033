"""All sources of gauges: what the configuration offers for a tier, and the sources that a choice stands for.

Every module of this package is imported here, and each source registers itself when its module is imported (`offers`).
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ...ipc.modes import Tier
from .offers import OFFERS, Offer, Opening
from .reading import Source

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f".{_module.name}", __package__)


def offered(tier: Tier) -> list[Offer]:
    """The tier's sources: those of `auto` first, best first, and the others by name."""
    every = (each for each in OFFERS if each.tier is tier)
    return sorted(every, key=lambda each: (each.auto is None, each.auto or 0, each.name))


def choices(tier: Tier) -> list[str]:
    """What the configuration may say for a tier."""
    return ["auto", *(each.name for each in offered(tier) if each.by_name), "none"]


def described(tier: Tier) -> str:
    """What `auto` stands for, in words."""
    says = [each.says for each in offered(tier) if each.auto is not None]
    return "auto: " + ", ".join(says) + (", whichever answers first" if len(says) > 1 else "")


def opened(tier: Tier, choice: str, given: Opening) -> list[Source]:
    """The sources that a choice stands for, best first. Nothing is opened, or loaded, before the first reading."""
    assert choice in choices(tier), choice
    every = offered(tier)
    return [each.make(given) for each in every if each.name == choice or (choice == "auto" and each.auto is not None)]
