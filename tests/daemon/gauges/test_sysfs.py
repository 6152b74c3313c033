from __future__ import annotations

from pathlib import Path

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Reading
from tensord.daemon.gauges.sources.sysfs import SysfsSource
from tensord.ipc.messages.modes import Tier

from .conformance import AnySource, Stage


def card(root: Path, number: int, address: str, used: str, total: str = "17163091968") -> Path:
    """A card as the amdgpu driver shows it: a link in /sys/class/drm into the PCI tree."""
    device = root / "sys/devices/pci0000:00/0000:00:03.1" / address
    drm = device / f"drm/card{number}"
    drm.mkdir(parents=True)
    (drm / "device").symlink_to(device)
    (device / "mem_info_vram_used").write_text(used + "\n")
    (device / "mem_info_vram_total").write_text(total + "\n")
    names = root / "sys/class/drm"
    names.mkdir(parents=True, exist_ok=True)
    (names / f"card{number}").symlink_to(drm)
    (names / f"card{number}-DP-1").symlink_to(drm)
    (names / f"renderD{128 + number}").symlink_to(drm)
    return device


def test_every_card_is_a_gauge_under_its_pci_address_and_one_of_another_driver_is_passed_over(tmp_path: Path) -> None:
    card(tmp_path, 0, "0000:c1:00.0", "1000")
    card(tmp_path, 1, "0000:c4:00.0", "2000")
    other = card(tmp_path, 2, "0000:00:02.0", "1")
    (other / "mem_info_vram_used").unlink()
    (other / "mem_info_vram_total").unlink()
    assert SysfsSource(tmp_path).read(0.0) == {
        "0000:c1:00.0": Reading(1000, 17163091968),
        "0000:c4:00.0": Reading(2000, 17163091968),
    }


@pytest.mark.parametrize(
    ("revision", "vram_total", "expected"),
    [
        (2, 512 << 20, Reading(9000, 64 << 30, {"of": "GTT"})),  # an APU that computes in the host's memory
        (3, 512 << 20, Reading(9000, 64 << 30, {"of": "GTT"})),
        (3, 96 << 30, Reading(1000, 96 << 30)),  # an APU whose memory set aside is larger
        (1, 512 << 20, Reading(1000, 512 << 20)),  # a card of its own
        (None, 512 << 20, Reading(1000, 512 << 20)),  # not known
    ],
)
def test_an_apu_is_as_full_as_the_memory_in_which_its_driver_computes(
    tmp_path: Path, revision: int | None, vram_total: int, expected: Reading
) -> None:
    device = card(tmp_path, 0, "0000:c1:00.0", "1000", str(vram_total))
    (device / "mem_info_gtt_used").write_text("9000\n")
    (device / "mem_info_gtt_total").write_text(f"{64 << 30}\n")
    if revision is not None:
        (device / "gpu_metrics").write_bytes(bytes([120, 0, revision, 0]) + bytes(116))
    assert SysfsSource(tmp_path).read(0.0) == {"0000:c1:00.0": expected}


@pytest.mark.parametrize("text", ["-1", "", "garbage", "1.5"])
def test_an_invalid_number_of_bytes_fails_only_its_gauge(tmp_path: Path, text: str) -> None:
    card(tmp_path, 0, "0000:c1:00.0", text)
    card(tmp_path, 1, "0000:c4:00.0", "2000")
    result = SysfsSource(tmp_path).read(0.0)
    assert result["0000:c4:00.0"] == Reading(2000, 17163091968)
    failed = result["0000:c1:00.0"]
    assert isinstance(failed, GaugeFailed) and repr(text) in str(failed)


class Cards(Stage):
    gauge = "0000:c1:00.0"

    def __init__(self, root: Path) -> None:
        self.source = SysfsSource(root)
        self.device = card(root, 0, self.gauge, "")
        card(root, 1, "0000:c4:00.0", "2000")  # it stays

    def show(self, used_bytes: int, total_bytes: int) -> None:
        (self.device / "mem_info_vram_used").write_text(f"{used_bytes}\n")
        (self.device / "mem_info_vram_total").write_text(f"{total_bytes}\n")

    def lose(self) -> None:
        (self.device / "mem_info_vram_total").unlink()


class TestSource(AnySource):
    tier = Tier.DEVICE

    @pytest.fixture
    def set_up(self, tmp_path: Path) -> Stage:
        return Cards(tmp_path)
