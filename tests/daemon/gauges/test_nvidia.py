from __future__ import annotations

import ctypes.util
from functools import partial
from pathlib import Path

import pytest

from tensord.daemon.gauges.reading import GaugeAbsent
from tensord.ipc.messages.modes import Tier

from .cards import GIB, Begin, Card, Cards, OneCard
from .conformance import AnySource, Stage

LOST = 15


@pytest.fixture
def begin(nvml_folder: Path, cards: Cards, begun: Begin) -> Begin:
    return partial(begun, "nvidia", LD_LIBRARY_PATH=str(nvml_folder), STANDIN_CARDS=str(cards.file))


def test_every_gpu_is_a_gauge_under_its_pci_address(cards: Cards, begin: Begin) -> None:
    cards.show(Card(3 * GIB, bus=0x65), Card(5 * GIB, 24 * GIB, domain=0x1, bus=0xB3, device=0x1F))
    reader = begin()
    assert reader.gauges() == {"0000:65:00.0": [3 * GIB, 80 * GIB], "0001:b3:1f.0": [5 * GIB, 24 * GIB]}
    assert reader.end() == ""


def test_a_lost_gpu_fails_alone_and_has_a_gauge_once_it_is_back(cards: Cards, begin: Begin) -> None:
    cards.show(Card(1, bus=1, error=LOST), Card(2, bus=2))
    reader = begin()
    assert reader.gauges() == {"nvidia:0": "NVMLError_GpuIsLost: GPU is lost", "0000:02:00.0": [2, 80 * GIB]}
    cards.show(Card(1, bus=1), Card(2, bus=2, error=LOST))
    assert reader.gauges() == {"0000:01:00.0": [1, 80 * GIB], "0000:02:00.0": "NVMLError_GpuIsLost: GPU is lost"}
    cards.show(Card(1, bus=1), Card(22, bus=2))
    assert reader.gauges() == {"0000:01:00.0": [1, 80 * GIB], "0000:02:00.0": [22, 80 * GIB]}


def test_a_driver_that_was_reloaded_is_asked_anew(cards: Cards, begin: Begin) -> None:
    cards.show(Card(1, bus=1), Card(2, bus=2))
    reader = begin()
    reader.gauges()
    cards.generation = 2
    cards.show(Card(9, bus=2))
    assert not isinstance(reader.failed(), GaugeAbsent)
    # Opening may be slow: only 10 s after it was opened last is the library closed, and opened at the next reading.
    assert not isinstance(reader.failed(10.0), GaugeAbsent)
    assert reader.gauges() == {"0000:02:00.0": [9, 80 * GIB]}


def test_without_a_driver_there_is_nothing_to_read_until_there_is_one(cards: Cards, begin: Begin) -> None:
    reader = begin()
    assert isinstance(reader.failed(), GaugeAbsent)
    cards.show(Card(4))
    assert reader.gauges() == {"0000:65:00.0": [4, 80 * GIB]}
    cards.hide()
    reader.failed()


def uuid(number: int) -> str:
    return f"MIG-00000000-0000-0000-0000-{number:012x}"


def test_each_slice_of_a_card_in_mig_mode_is_a_gauge_of_its_own_memory_under_its_uuid(
    cards: Cards, begin: Begin
) -> None:
    """And the card is none: what all slices use together is nobody's limit."""
    slices = [Card(1 * GIB, 10 * GIB, slice_of=0, bus=1), Card(39 * GIB, 40 * GIB, slice_of=0, bus=2)]
    cards.show(Card(41 * GIB, mig=1, bus=0x65), Card(5 * GIB, mig=0, bus=0x66), *slices)
    reader = begin()
    expected = {uuid(1): [1 * GIB, 10 * GIB], uuid(2): [39 * GIB, 40 * GIB], "0000:66:00.0": [5 * GIB, 80 * GIB]}
    assert reader.gauges() == expected
    slices[0].used_bytes = 9 * GIB
    cards.show()
    assert reader.gauges()[uuid(1)] == [9 * GIB, 10 * GIB]


def test_slices_that_are_made_and_destroyed_come_and_go_and_none_is_taken_for_another(
    cards: Cards, begin: Begin
) -> None:
    first, second = (Card(number, 10 * GIB, slice_of=0, bus=number) for number in (1, 2))
    cards.show(Card(0, mig=1), first, second)
    reader = begin()
    assert reader.gauges() == {uuid(1): [1, 10 * GIB], uuid(2): [2, 10 * GIB]}
    cards.show(Card(0, mig=1), second, Card(3, 20 * GIB, slice_of=0, bus=3))
    assert reader.gauges() == {uuid(2): [2, 10 * GIB], uuid(3): [3, 20 * GIB]}
    cards.show(Card(7, mig=0))
    assert reader.gauges() == {"0000:65:00.0": [7, 80 * GIB]}
    cards.show(Card(0, mig=1), first)
    assert reader.gauges() == {uuid(1): [1, 10 * GIB]}


def test_a_library_that_fails_where_there_is_a_gpu_is_a_failure_and_not_absent(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "root/dev").mkdir(parents=True)
    (tmp_path / "root/dev/nvidiactl").touch()
    failed = begin(tmp_path / "root").failed()
    assert not isinstance(failed, GaugeAbsent) and "nvidiactl" in str(failed)


def test_without_the_library_there_is_nothing_to_read(begun: Begin, tmp_path: Path) -> None:
    if ctypes.util.find_library("nvidia-ml"):
        pytest.skip("this machine has the real library")
    reader = begun("nvidia", LD_LIBRARY_PATH=str(tmp_path))
    assert isinstance(reader.failed(), GaugeAbsent)
    assert reader.end() == ""


class TestSource(AnySource):
    tier = Tier.DEVICE

    @pytest.fixture
    def set_up(self, cards: Cards, begin: Begin) -> Stage:
        return OneCard(cards, begin())
