"""The sources of gauges: each reads how full some devices are, from a library, files of the kernel, or clients.

May import ipc, shm, `reading`, daemon/process and the governor's forms; not the chain nor the threads above it. Owns
the calls of each library, and which sources a choice of the configuration stands for. Does not own when a source is
read.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from ....ipc.messages.modes import Tier
from ..reading import OFFERED, Source
from .file import FileSource

# Each source offers itself.
for _module in iter_modules(__path__):
    import_module(f".{_module.name}", __name__)


def offered(tier: Tier) -> list[str]:
    """The sources that `auto` stands for, best first."""
    return [name for _, name in sorted((offer.rank, name) for name, offer in OFFERED.items() if offer.tier is tier)]


def choices(tier: Tier) -> list[str]:
    """The values that the configuration accepts for a tier."""
    return ["auto", *(name for name in offered(tier) if name != "host"), FileSource.name, "none"]


def opened(tier: Tier, choice: str, root: Path = Path("/"), file: Path | None = None) -> list[Source]:
    """The sources of a choice, best first. None reads or loads anything before its first reading. `root`: the folder
    that has /sys. `file`: the configured gauge file."""
    assert choice in choices(tier), choice
    if choice == FileSource.name:
        assert file is not None, "the configuration selects the source `file` and names no file"
        return [FileSource(file, tier)]
    return [OFFERED[name].make(root) for name in offered(tier) if choice in ("auto", name)]
