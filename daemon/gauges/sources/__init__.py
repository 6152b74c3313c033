"""The sources of gauges: each reads how full some devices are, from a library, files of the kernel, or clients.

May import ipc, shm, `reading`, daemon/process and the governor's forms; not the chain nor the threads above it. Owns
the calls of each library, and which sources a choice of the configuration stands for. Does not own when a source is
read.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Final

from ....ipc.messages.modes import Tier
from ..reading import DeviceSource, Source
from .file import FileSource
from .host import HostSource

_modules = [import_module(f".{module.name}", __name__) for module in iter_modules(__path__)]
_classes = {each for module in _modules for each in vars(module).values() if isinstance(each, type)}
DEVICE: Final[list[type[DeviceSource]]] = [each for each in _classes if "preference" in vars(each)]
DEVICE.sort(key=lambda source: source.preference)
"""The sources that `auto` stands for, best first. A source is there by its module."""
CHOICES: Final[dict[Tier, tuple[str, ...]]] = {
    Tier.DEVICE: ("auto", *(source.name for source in DEVICE), FileSource.name, "none"),
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
    return [source(root) for source in DEVICE if choice in ("auto", source.name)]
