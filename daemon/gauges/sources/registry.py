"""All gauge sources: the choices in the configuration, and the sources of each choice.

Owns: the import of every module of this package, by which each source registers itself (`offers`). Does not own the
sources.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ....ipc.messages.modes import Tier
from ..reading import Source
from .offers import OFFERS, Offer, Opening

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f".{_module.name}", __package__)


def offered(tier: Tier) -> list[Offer]:
    """The tier's sources: first those of `auto`, best first, then the others in the order of their names."""
    every = (each for each in OFFERS if each.tier is tier)
    return sorted(every, key=lambda each: (each.auto is None, each.auto or 0, each.name))


def choices(tier: Tier) -> list[str]:
    """The values that the configuration accepts for a tier."""
    return ["auto", *(each.name for each in offered(tier) if each.by_name), "none"]


def opened(tier: Tier, choice: str, given: Opening) -> list[Source]:
    """The sources of a choice, best first. No source is opened or loaded before its first reading."""
    assert choice in choices(tier), choice
    every = offered(tier)
    return [each.make(given) for each in every if each.name == choice or (choice == "auto" and each.auto is not None)]
