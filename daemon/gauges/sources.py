"""The sources of each tier, by their names in the configuration.

Owns: the choices, and the order of the sources that `auto` stands for: a vendor's own library first, what clients
report last. Does not own the sources.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from ...ipc.messages.modes import Tier
from ..governor.forms.events import OWNERS_EVERY_S
from .file import FileSource
from .host import HostSource
from .nvidia import NvidiaSource
from .owners import OwnersSource
from .reading import Source
from .sysfs import SysfsSource

DEVICE_CHOICES: Final = ("auto", "nvidia", "sysfs", "owners", "file", "none")
HOST_CHOICES: Final = ("auto", "file", "none")


def opened(
    tier: Tier, choice: str, *, root: Path = Path("/"), file: Path | None = None, devices_max: int = 64
) -> list[Source]:
    """The sources of a choice, best first. No source is opened or loaded before its first reading.

    Args:
        root: the folder that has /sys and /dev.
        file: the gauge file, if one is configured.
        devices_max: the most devices whose readings are taken from clients.
    """
    if choice == "file":
        assert file is not None, "the configuration selects the source `file` and names no file"
        return [FileSource(file, tier)]
    if choice == "none":
        return []
    if tier is Tier.HOST:
        return [HostSource()]
    every: list[Source] = [NvidiaSource(root), SysfsSource(root), OwnersSource(OWNERS_EVERY_S, devices_max)]
    return [each for each in every if choice in ("auto", each.name)]
