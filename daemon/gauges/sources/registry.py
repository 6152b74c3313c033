"""All gauge sources: the choices in the configuration, and the sources of each choice.

Owns: the table of sources. Does not own the sources.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from ....ipc.messages.modes import Tier
from ...governor.forms.events import OWNERS_EVERY_S
from ...governor.forms.limits import DEVICES_MAX
from ..reading import Source
from .amd import AmdSource
from .file import FileSource
from .host import HostSource
from .nvidia import NvidiaSource
from .owners import OwnersSource
from .sysfs import SysfsSource

_FILE: Final = "file"
SOURCES: Final[dict[Tier, dict[str, Callable[[Path], Source]]]] = {
    Tier.HOST: {"host": lambda root: HostSource()},
    Tier.DEVICE: {
        "amd": AmdSource,
        "nvidia": NvidiaSource,
        "sysfs": SysfsSource,
        "owners": lambda root: OwnersSource(OWNERS_EVERY_S, DEVICES_MAX),
    },
}
"""The sources that `auto` stands for, by name, best first. None is opened or loaded before its first reading."""


def choices(tier: Tier) -> list[str]:
    """The values that the configuration accepts for a tier."""
    return ["auto", *(name for name in SOURCES[tier] if name != "host"), _FILE, "none"]


def opened(tier: Tier, choice: str, root: Path = Path("/"), file: Path | None = None) -> list[Source]:
    """The sources of a choice, best first. `root`: the folder that has /sys. `file`: the configured gauge file."""
    assert choice in choices(tier), choice
    if choice == _FILE:
        assert file is not None, "the configuration selects the source `file` and names no file"
        return [FileSource(file, tier)]
    return [make(root) for name, make in SOURCES[tier].items() if choice in ("auto", name)]
