"""How a source of gauges is registered, and what it is opened with. Imports no source, so that every source may.

A source registers itself by one call of `offer` in its module. `registry` imports every module of this package, so that
a new source needs no line anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...ipc.modes import Tier
from .reading import Source


@dataclass(frozen=True, slots=True)
class Opening:
    """What a source may be made of.

    Args:
        root: the folder in which /sys is.
        file: the gauge file, where one is configured.
        devices_max: the number of devices whose owners are listened to.
    """

    root: Path = Path("/")
    file: Path | None = None
    devices_max: int = 64


@dataclass(frozen=True, slots=True)
class Offer:
    """A source that a tier may be read from.

    Args:
        name: of the source, and of the choice in the configuration.
        make: makes the source, and opens nothing.
        auto: the source's place among those that `auto` stands for, lowest first. None: `auto` leaves it out.
        says: the source in words, for the configuration's description of `auto`.
        by_name: whether the configuration offers the source by its name.
    """

    name: str
    tier: Tier
    make: Callable[[Opening], Source]
    auto: int | None
    says: str
    by_name: bool


OFFERS: Final[list[Offer]] = []
"""Every source that was imported so far. `registry` has all of them."""


def offer(
    name: str,
    tier: Tier,
    make: Callable[[Opening], Source],
    *,
    auto: int | None = None,
    says: str = "",
    by_name: bool = True,
) -> None:
    """Registers a source for a tier; the arguments are those of `Offer`."""
    assert not any((name, tier) == (each.name, each.tier) for each in OFFERS), f"two sources are named {name}"
    OFFERS.append(Offer(name, tier, make, auto, says, by_name))
