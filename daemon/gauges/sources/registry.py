"""All gauge sources: the choices in the configuration, and the sources of each choice.

Owns: the table of sources. Does not own the sources.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....ipc.messages.modes import Tier
from ...governor.forms.events import OWNERS_EVERY_S
from ...governor.forms.limits import DEVICES_MAX
from ..reading import Source
from .amd import amd_source
from .file import FileSource
from .host import HostSource
from .nvidia import nvidia_source
from .owners import OwnersSource
from .sysfs import SysfsSource


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
    devices_max: int = DEVICES_MAX


def _file(tier: Tier) -> Callable[[Opening], Source]:
    def make(given: Opening) -> Source:
        assert given.file is not None, "the configuration selects the source `file` and names no file"
        return FileSource(given.file, tier)

    return make


AUTO: Final[dict[Tier, dict[str, Callable[[Opening], Source]]]] = {
    Tier.HOST: {"host": lambda given: HostSource()},
    Tier.DEVICE: {
        "amd": lambda given: amd_source(given.root),
        "nvidia": lambda given: nvidia_source(given.root),
        "sysfs": lambda given: SysfsSource(given.root),
        "owners": lambda given: OwnersSource(OWNERS_EVERY_S, given.devices_max),
    },
}
"""The sources that `auto` stands for, by name, best first. None is opened or loaded before its first reading."""
SOURCES: Final = {tier: AUTO[tier] | {"file": _file(tier)} for tier in Tier}


def choices(tier: Tier) -> list[str]:
    """The values that the configuration accepts for a tier."""
    return ["auto", *(name for name in SOURCES[tier] if name != "host"), "none"]


def opened(tier: Tier, choice: str, given: Opening) -> list[Source]:
    """The sources of a choice, best first."""
    assert choice in choices(tier), choice
    chosen = AUTO[tier] if choice == "auto" else [choice] if choice in SOURCES[tier] else []
    return [SOURCES[tier][name](given) for name in chosen]
