from __future__ import annotations

import pytest

from tensord.daemon.gauges.reading import GaugeFailed, Reading
from tensord.daemon.gauges.sources.owners import OwnersSource
from tensord.daemon.governor.forms.limits import DEVICES_MAX
from tensord.ipc.messages.modes import Tier

from .conformance import AnySource, Stage

CARD = "0000:65:00.0"


def test_a_device_is_what_was_read_last_whenever_it_was_said() -> None:
    """Of two owners of a device, one may be slow to send what it has read."""
    source = OwnersSource()
    assert source.read(0.0) == {}
    source.report(CARD, 1, 100, read_at=1.0)
    source.report(CARD, 2, 100, read_at=1.5)
    source.report(CARD, 0, 100, read_at=0.5)
    source.report("cuda:1", 3, 50, read_at=1.0)
    assert source.read(2.0) == {CARD: Reading(2, 100, began_at=1.5), "cuda:1": Reading(3, 50, began_at=1.0)}


def test_so_many_devices_are_known_and_no_more_and_the_host_is_none() -> None:
    source = OwnersSource()
    for name in ("host", *(f"card{number}" for number in range(DEVICES_MAX)), "one more"):
        source.report(name, 1, 2, read_at=0.0)
    source.report("card0", 2, 2, read_at=0.0)
    result = source.read(0.0)
    assert list(result) == [f"card{number}" for number in range(DEVICES_MAX)]
    assert result["card0"] == Reading(2, 2, began_at=0.0)


class Owner(Stage):
    """An owner of tensors that reports before each reading, as long as it lives."""

    gauge = CARD

    def __init__(self) -> None:
        self.source = self.owners = OwnersSource()
        self.sees: tuple[int, int] | None = None

    def show(self, used_bytes: int, total_bytes: int) -> None:
        self.sees = used_bytes, total_bytes

    def lose(self) -> None:
        self.sees = None

    def read(self, now: float) -> Reading | GaugeFailed:
        if self.sees is not None:
            self.owners.report(CARD, *self.sees, read_at=now)
        return super().read(now)


class TestSource(AnySource):
    tier = Tier.DEVICE

    @pytest.fixture
    def set_up(self) -> Stage:
        return Owner()
