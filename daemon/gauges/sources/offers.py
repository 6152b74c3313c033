"""The registration of gauge sources, and the arguments with which a source is made.

Owns: the list of registered sources. Does not own the sources. Imports no source, so that every source can import it.

A source registers itself by one call of `offer` in its module. `registry` imports every module of this package, so that
a new source needs no line anywhere else.

Invariant: a name is registered at most once for each tier.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....ipc.messages.modes import Tier
from ..reading import Source


@dataclass(frozen=True, slots=True)
class Opening:
    """The arguments with which a source is made.

    Args:
        root: the folder that has /sys.
        file: the gauge file, if one is configured.
        devices_max: the most devices whose readings are taken from clients.
    """

    root: Path = Path("/")
    file: Path | None = None
    devices_max: int = 64


@dataclass(frozen=True, slots=True)
class Offer:
    """A registered source of a tier.

    Args:
        name: the name of the source, also in the configuration.
        make: makes the source without opening it.
        auto: the source's position among those of the setting `auto`, lowest first. None: `auto` does not include it.
        by_name: True if the configuration accepts the source's name.
    """

    name: str
    tier: Tier
    make: Callable[[Opening], Source]
    auto: int | None
    by_name: bool


OFFERS: Final[list[Offer]] = []
"""The sources imported so far. `registry` imports all of them."""


def offer(
    name: str,
    tier: Tier,
    make: Callable[[Opening], Source],
    *,
    auto: int | None = None,
    by_name: bool = True,
) -> None:
    """Registers a source for a tier. The arguments are those of `Offer`."""
    assert not any((name, tier) == (each.name, each.tier) for each in OFFERS), f"two sources are named {name}"
    OFFERS.append(Offer(name, tier, make, auto, by_name))
