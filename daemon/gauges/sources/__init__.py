"""The sources of gauges: each reads how full some devices are, from a library, files of the kernel, or clients.

May import ipc, shm, `reading`, daemon/process and the governor's forms; not the chain nor the threads above it. Owns
the calls of each library, and which sources a choice of the configuration stands for. Does not own when a source is
read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from ....ipc.messages.modes import Tier
from ..reading import Source
from .amd import AmdSource
from .file import FileSource
from .host import HostSource
from .nvidia import NvidiaSource
from .owners import OwnersSource
from .sysfs import SysfsSource

OFFERED: Final[Mapping[Tier, Mapping[str, Callable[[Path], Source]]]] = {
    Tier.HOST: {"host": lambda root: HostSource()},
    Tier.DEVICE: {
        "amd": AmdSource,
        "nvidia": NvidiaSource,
        "sysfs": SysfsSource,
        "owners": lambda root: OwnersSource(),
    },
}
"""What `auto` stands for, by name: of several sources that read one gauge, the first is believed. Each is made for the
folder that has /sys."""
_FILE: Final = "file"


def choices(tier: Tier) -> list[str]:
    """The values that the configuration accepts for a tier."""
    return ["auto", *(name for name in OFFERED[tier] if name != "host"), _FILE, "none"]


def opened(tier: Tier, choice: str, root: Path = Path("/"), file: Path | None = None) -> list[Source]:
    """The sources of a choice, best first. None reads or loads anything before its first reading. `root`: the folder
    that has /sys. `file`: the configured gauge file."""
    assert choice in choices(tier), choice
    if choice == _FILE:
        assert file is not None, "the configuration selects the source `file` and names no file"
        return [FileSource(file, tier)]
    return [make(root) for name, make in OFFERED[tier].items() if choice in ("auto", name)]
