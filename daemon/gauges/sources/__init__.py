"""The sources of gauges: each reads how full some devices are, from a library, files of the kernel, or clients.

May import ipc, shm, `reading`, daemon/process and the governor's forms; not the chain nor the threads above it. Owns
the calls of each library, and which sources a choice of the configuration stands for. Does not own when a source is
read.
"""

from __future__ import annotations

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

DEVICE: Final = (AmdSource.name, NvidiaSource.name, SysfsSource.name, OwnersSource.name)
"""The sources that `auto` stands for, best first."""
CHOICES: Final = {
    Tier.DEVICE: ("auto", *DEVICE, FileSource.name, "none"),
    Tier.HOST: ("auto", FileSource.name, "none"),
}
"""By tier: the values that the configuration accepts."""


def opened(tier: Tier, choice: str, root: Path = Path("/"), file: Path | None = None) -> list[Source]:
    """The sources of a choice, best first. None reads or loads anything before its first reading. `root`: the folder
    that has /sys. `file`: the configured gauge file."""
    assert choice in CHOICES[tier], choice
    if choice == "none":
        return []
    if choice == FileSource.name:
        assert file is not None, "the configuration selects the source `file` and names no file"
        return [FileSource(file, tier)]
    if tier is Tier.HOST:
        return [HostSource()]
    made = (AmdSource(root), NvidiaSource(root), SysfsSource(root), OwnersSource())
    return [source for source in made if choice in ("auto", source.name)]
