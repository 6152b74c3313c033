from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tensord.daemon.gauges.reading import GaugeAbsent
from tensord.ipc.messages.modes import Tier

from .cards import GIB, Begin, Card, Cards, OneCard
from .conformance import AnySource, Stage

GONE = 19
LIBDRM_SAYS = "amdgpu.ids: No such file or directory\n"


def ahead(folder: Path) -> str:
    """A PYTHONPATH on which `folder` comes first."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Where /sys says that the driver is loaded."""
    module = tmp_path / "root/sys/module/amdgpu"
    module.mkdir(parents=True)
    (module / "initstate").write_text("live\n")
    return tmp_path / "root"


@pytest.fixture
def begin(rocm_folder: Path, cards: Cards, root: Path, begun: Begin) -> Begin:
    return partial(begun, "amd", root, ROCM_PATH=str(rocm_folder), STANDIN_CARDS=str(cards.file))


def test_every_gpu_is_read_with_its_whole_handle(cards: Cards, begin: Begin) -> None:
    """The stand-in's handles are pointers: cut to 32 bits, as pyrsmi passes them, they would be nobody's."""
    cards.show(Card(3 * GIB, 192 * GIB, bus=0xC1), Card(5 * GIB, domain=0x2, bus=0x03, device=0x11, function=2))
    reader = begin()
    assert reader.gauges() == {"0000:c1:00.0": [3 * GIB, 192 * GIB], "0002:03:11.2": [5 * GIB, 80 * GIB]}
    assert reader.end() == LIBDRM_SAYS


def test_a_library_that_lists_gpus_by_socket_is_read_as_well(cards: Cards, begin: Begin, old_rocm_folder: Path) -> None:
    cards.show(Card(1, bus=1), Card(2, bus=2))
    assert begin(ROCM_PATH=str(old_rocm_folder)).gauges() == {
        "0000:01:00.0": [1, 80 * GIB],
        "0000:02:00.0": [2, 80 * GIB],
    }


def test_minus_one_is_a_failure_that_says_why_and_never_a_value(cards: Cards, begin: Begin) -> None:
    cards.show(Card(1, bus=1), Card(2, bus=2))
    reader = begin()
    reader.gauges()
    cards.cards[0].error = GONE
    cards.cards[1].used_bytes = 22
    cards.show()
    gauges = reader.gauges()
    assert gauges["0000:02:00.0"] == [22, 80 * GIB]
    assert gauges["0000:01:00.0"].startswith("pyrsmi answers -1 of -1 bytes used: ")
    assert "the card is gone" in gauges["0000:01:00.0"]
    cards.cards[0].error = 0
    cards.show()
    assert reader.gauges()["0000:01:00.0"] == [1, 80 * GIB]
    assert reader.end() == LIBDRM_SAYS, "pyrsmi's errors are the source's to tell, and nobody else's"


def test_every_partition_of_a_card_is_a_gauge_of_its_own(cards: Cards, begin: Begin) -> None:
    """In CPX mode. Libraries number them in the function of the address, or give all of them one address."""
    numbered = (Card(number, bus=1, function=number) for number in range(4))
    cards.show(*numbered, *(Card(10 + number, bus=2) for number in range(4)))
    assert begin().gauges() == {
        **{f"0000:01:00.{number}": [number, 80 * GIB] for number in range(4)},
        **{f"0000:02:00.{number}": [10 + number, 80 * GIB] for number in range(4)},
    }


def test_an_apu_that_computes_in_the_hosts_memory_is_as_full_as_that(cards: Cards, begin: Begin, root: Path) -> None:
    """The driver does so if the memory set aside for graphics is smaller. A card's own memory always counts."""
    cards.show(
        Card(400 << 20, 512 << 20, bus=1, gtt_used_bytes=9 * GIB, gtt_total_bytes=64 * GIB),
        Card(30 * GIB, 96 * GIB, bus=2, gtt_used_bytes=1, gtt_total_bytes=16 * GIB),
        Card(7 * GIB, 8 * GIB, bus=3, gtt_used_bytes=1, gtt_total_bytes=64 * GIB),
    )
    for bus, revision in ((1, 2), (2, 3), (3, 1)):
        device = root / f"sys/bus/pci/devices/0000:{bus:02x}:00.0"
        device.mkdir(parents=True)
        (device / "gpu_metrics").write_bytes(bytes([120, 0, revision, 0]) + bytes(116))
    assert begin().gauges() == {
        "0000:01:00.0": [9 * GIB, 64 * GIB],
        "0000:02:00.0": [30 * GIB, 96 * GIB],
        "0000:03:00.0": [7 * GIB, 8 * GIB],
    }


def test_without_a_driver_nothing_is_asked(cards: Cards, begin: Begin, root: Path) -> None:
    (root / "sys/module/amdgpu/initstate").unlink()
    (root / "sys/module/amdgpu").rmdir()
    cards.show(Card(1))
    reader = begin()
    failed = reader.failed()
    assert isinstance(failed, GaugeAbsent) and "driver is not loaded" in str(failed)
    assert reader.end() == ""


def test_a_driver_that_is_built_in_counts_as_loaded(cards: Cards, begin: Begin, root: Path) -> None:
    (root / "sys/module/amdgpu/initstate").unlink()
    cards.show(Card(1))
    assert begin().gauges() == {"0000:65:00.0": [1, 80 * GIB]}


def test_without_the_library_there_is_nothing_to_read(cards: Cards, begin: Begin, tmp_path: Path) -> None:
    reader = begin(ROCM_PATH=str(tmp_path))
    failed = reader.failed()
    assert isinstance(failed, GaugeAbsent) and "libamd_smi.so" in str(failed)
    assert reader.end() == ""


def test_no_gpu_listed_is_nothing_to_read(cards: Cards, begin: Begin) -> None:
    cards.show()
    failed = begin().failed()
    assert isinstance(failed, GaugeAbsent) and str(failed) == "the library lists no GPU"


def test_a_driver_that_refuses_is_a_failure_that_says_so(cards: Cards, begin: Begin) -> None:
    failed = begin().failed()
    assert "initialization failed" in str(failed)
    assert not isinstance(failed, GaugeAbsent), "the driver is said to be loaded: somebody should look"


def test_gpus_of_the_amdsmi_package_have_the_same_names(cards: Cards, begin: Begin, tmp_path: Path) -> None:
    """It tells the PCI address as text, of which pyrsmi makes a number with the domain elsewhere."""
    (tmp_path / "amdsmi.py").write_text(
        "class AmdSmiMemoryType: VRAM = 0\n"
        "def amdsmi_init(): pass\n"
        "def amdsmi_shut_down(): pass\n"
        "def amdsmi_get_processor_handles(): return ['one']\n"
        "def amdsmi_get_gpu_device_bdf(handle): return '0002:c1:11.3'\n"
        "def amdsmi_get_gpu_memory_usage(handle, kind): return 5\n"
        "def amdsmi_get_gpu_memory_total(handle, kind): return 100\n"
    )
    cards.show()
    assert begin(PYTHONPATH=ahead(tmp_path)).gauges() == {"0002:c1:11.3": [5, 100]}


class TestSource(AnySource):
    tier = Tier.DEVICE

    @pytest.fixture
    def set_up(self, cards: Cards, begin: Begin) -> Stage:
        return OneCard(cards, begin())
