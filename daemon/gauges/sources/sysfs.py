"""A source for AMD GPUs from /sys. It needs no library, no permission and no GPU context."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from ..reading import DeviceSource, GaugeAbsent, GaugeFailed, Reading, Result, number_in

_CARD: Final = re.compile(r"card[0-9]+")
_APU_REVISIONS: Final = (2, 3)


class SysfsSource(DeviceSource):
    """Reads `mem_info_vram_used` and `mem_info_vram_total` of every card that has these files. Of an APU that computes
    in the host's memory it reads `mem_info_gtt_used` and `mem_info_gtt_total`. `root`: the folder that has /sys."""

    name: Final = "sysfs"
    preference = 3

    def __init__(self, root: Path = Path("/")) -> None:
        self._folder = root / "sys/class/drm"
        self._apus: dict[str, bool] = {}

    def read(self, now: float) -> Result:
        """As in Source. A gauge has the name of the folder that the card's link points to: its PCI address."""
        result: Result = {}
        for device in self._devices():
            try:
                result[device.name] = self._read(device)
            except GaugeFailed as failed:
                result[device.name] = failed
        if not result:
            raise GaugeAbsent(f"no card in {self._folder} has the files mem_info_vram_*")
        return result

    def _read(self, device: Path) -> Reading:
        vram = Reading(number_in(device / "mem_info_vram_used"), number_in(device / "mem_info_vram_total"))
        if device.name not in self._apus:
            self._apus[device.name] = is_apu(device)
        if not self._apus[device.name]:
            return vram
        gtt = Reading(number_in(device / "mem_info_gtt_used"), number_in(device / "mem_info_gtt_total"), {"of": "GTT"})
        return gtt if vram.total_bytes < gtt.total_bytes else vram

    def _devices(self) -> list[Path]:
        try:
            cards = sorted(each for each in self._folder.iterdir() if _CARD.fullmatch(each.name))
            devices = [(card / "device").resolve() for card in cards]
            return [device for device in devices if (device / "mem_info_vram_total").exists()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise GaugeFailed(str(error)) from error


def is_apu(device: Path) -> bool:
    """Whether a card, by its folder in /sys, is part of a processor: formats 2 and 3 of its metrics are those of APUs.
    The driver of one allocates in the host's memory (GTT) for computing if the memory set aside for graphics is smaller
    (`apu_prefer_gtt`). False if that cannot be read."""
    try:
        with (device / "gpu_metrics").open("rb") as file:
            return file.read(4)[2] in _APU_REVISIONS
    except (OSError, IndexError):
        return False
