"""A source for AMD GPUs from /sys. It needs no library, no permission and no GPU context.

Owns: the files that it reads, and the list of cards seen. Invariant: a card seen once is in every later result.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ...ipc.modes import Tier
from .offers import offer
from .reading import GaugeAbsent, GaugeFailed, Reading, Result

_CARD: Final = re.compile(r"card[0-9]+")


class SysfsSource:
    """Reads `mem_info_vram_used` and `mem_info_vram_total` of every card that has these files.

    Args:
        root: the folder that has /sys.
    """

    name: Final = "sysfs"

    def __init__(self, root: Path = Path("/")) -> None:
        self._folder = root / "sys/class/drm"
        self._listed: dict[str, None] = {}

    def read(self, now: float) -> Result:
        """As in Source. A gauge has the name of the folder that the card's link points to: its PCI address."""
        result: Result = {}
        for device in self._devices():
            name = device.name
            self._listed[name] = None
            try:
                result[name] = Reading(_number(device / "mem_info_vram_used"), _number(device / "mem_info_vram_total"))
            except GaugeFailed as failed:
                result[name] = failed
        for name in self._listed:
            result.setdefault(name, GaugeFailed(f"the card is no longer in {self._folder}"))
        if not result:
            raise GaugeAbsent(f"no card in {self._folder} has the files mem_info_vram_*")
        return result

    def close(self) -> None:
        """As in Source."""

    def _devices(self) -> list[Path]:
        try:
            cards = sorted(each for each in self._folder.iterdir() if _CARD.fullmatch(each.name))
            devices = [(card / "device").resolve() for card in cards]
            return [device for device in devices if (device / "mem_info_vram_total").exists()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise GaugeFailed(str(error)) from error


def _number(file: Path) -> int:
    try:
        text = file.read_text(encoding="ascii", errors="replace").strip()
    except OSError as error:
        raise GaugeFailed(str(error)) from error
    if not text.isdecimal():
        raise GaugeFailed(f"{file} has {text[:64]!r}; wanted: a number of bytes")
    return int(text)


offer("sysfs", Tier.DEVICE, lambda given: SysfsSource(given.root), auto=3, says="sysfs")
